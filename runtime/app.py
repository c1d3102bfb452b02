"""The application: settings in, routes and their lifespan out."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from models.store import Store
from runtime import errors, limits, open_inference, platforms, predictions, requests
from runtime.metrics import Metrics
from runtime.pool import Pool
from runtime.service import Service
from runtime.settings import Settings
from runtime.visit import VisitMiddleware


def create_app(settings: Settings, *, command: Sequence[str] | None = None) -> FastAPI:
    """The proxy's ASGI application, not started; its lifespan starts and ends the handlers.

    command: starts a handler process, without its `--socket-fd`; by default the real handler's.
    """
    has = limits.measure()
    metrics = Metrics()
    pool = Pool(
        command or handler_command(settings, has),
        handlers=settings.handlers,
        queue=settings.queue,
        timeout_s=settings.timeout_s,
        on_end=metrics.handler_ended,
    )
    metrics.watch(pool, has)
    service = Service(settings, Store(settings.weights), pool, metrics)
    app = FastAPI(
        title="Cicada",
        description="Image classification that builds, loads and runs the model for each request.",
        lifespan=_lifespan,
        redirect_slashes=False,
        responses={"default": {"model": errors.ErrorBody, "description": "Any error"}},
    )
    app.state.service = service
    errors.install(app)
    app.add_middleware(VisitMiddleware, finish=service.finish)
    for module in (open_inference, predictions, platforms, requests):
        app.include_router(module.router)
    app.add_api_route("/metrics", _metrics, tags=["metrics"], summary="Prometheus metrics")
    return app


def handler_command(settings: Settings, has: limits.Limits) -> list[str]:
    threads = settings.threads or has.threads(settings.handlers)
    return [
        sys.executable,
        "-m",
        "handler.process",
        "--weights",
        str(settings.weights.absolute()),
        "--threads",
        str(threads),
        "--memory-limit",
        str(has.memory_each(settings.handlers)),
    ]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    pool: Pool = app.state.service.pool
    pool.start()
    try:
        yield
    finally:
        await pool.close()


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    content, content_type = service.metrics.exposition(request.headers.get("Accept", ""))
    return Response(content, headers={"Content-Type": content_type})
