"""The application: settings in, routes and their lifespan out."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI

from models.store import Store
from runtime import (
    documentation,
    errors,
    events,
    limits,
    metrics,
    open_inference,
    pages,
    platforms,
    predictions,
    prepared_models,
    requests,
    status,
    uploads,
)
from runtime.access import Access
from runtime.events import Feed
from runtime.handler_process import End
from runtime.metrics import Metrics
from runtime.pool import Pool
from runtime.service import Service
from runtime.settings import Settings, SettingsError, variable
from runtime.sharing import SharingMiddleware
from runtime.uploads import Uploads
from runtime.visit import LastResortMiddleware, VisitMiddleware

if TYPE_CHECKING:
    from runtime.tracing import Tracing


def create_app(settings: Settings, *, command: Sequence[str] | None = None) -> FastAPI:
    """The proxy's ASGI application, not started; its lifespan starts and ends the handlers.

    command: starts a handler process, without its `--socket-fd`; by default the real handler's.
    """
    has = limits.measure()
    counts = Metrics()
    feed = Feed()

    def handler_ended(end: End) -> None:
        counts.handler_ended(end)
        feed.handler_ended(end)

    pool = Pool(
        command or handler_command(settings, has),
        handlers=settings.handlers,
        queue=settings.queue,
        timeout_s=settings.timeout_s,
        on_ready=feed.handler_ready,
        on_end=handler_ended,
    )
    counts.watch(pool, has)
    access = Access(
        [key.get_secret_value() for key in settings.api_keys or ()],
        health=settings.keys_for_health,
        metrics=settings.keys_for_metrics,
    )
    bodies = Uploads(uploads.limit(settings, has.memory_bytes))
    service = Service(settings, Store(settings.weights), pool, counts, bodies, feed, has)
    app = FastAPI(
        title="Cicada",
        description=documentation.DESCRIPTION,
        version=distribution_version("cicada-serverless"),
        lifespan=_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(access.check)],
    )
    app.state.service = service
    app.state.access = access
    app.state.tracing = _tracing(settings)
    errors.install(app)
    _add_middleware(app, settings)
    routed = (
        *(open_inference, predictions, platforms, prepared_models),
        *(requests, events, status, metrics),
    )
    for module in routed:
        app.include_router(module.router)
    documentation.install(app)
    pages.install(app)
    return app


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """The innermost first: whatever is answered, even a fault, is traced, shared, and has its id."""
    app.add_middleware(LastResortMiddleware)
    if app.state.tracing is not None:
        from runtime.tracing import TracingMiddleware  # noqa: PLC0415 see _tracing

        app.add_middleware(TracingMiddleware, tracing=app.state.tracing)
    if settings.cors_origins is not None:
        app.add_middleware(SharingMiddleware, origins=settings.cors_origins)
    service: Service = app.state.service
    app.add_middleware(VisitMiddleware, finish=service.finish, leave=service.uploads.release)


def _tracing(settings: Settings) -> "Tracing | None":
    """Raises SettingsError where the SDK is not there; imported only where wanted: it costs start-up time."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from runtime.tracing import Tracing  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise SettingsError(
            f"{variable('otlp_endpoint')} is set, but {missing.name} is not installed: "
            "the extra 'otel' of cicada-serverless brings it"
        ) from None
    return Tracing(settings.otlp_endpoint)


def handler_command(settings: Settings, has: limits.Limits) -> list[str]:
    threads = settings.threads or has.threads(settings.handlers)
    return [
        sys.executable,
        "-P",  # the folder in which the service was started may have a `models.py` of the user's
        "-m",
        "handler.process",
        "--weights",
        str(settings.weights.absolute()),
        "--threads",
        str(threads),
        "--memory-limit",
        str(has.memory_each(settings.handlers)),
        "--max-pixels",
        str(settings.max_pixels),
        *(["--processing", settings.processing] if settings.processing else []),
        *(["--default-model", settings.default_model] if settings.default_model else []),
    ]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.start()
    try:
        yield
    finally:
        await service.close()
        if app.state.tracing is not None:
            await app.state.tracing.close()
