"""Inference requests as OpenTelemetry spans, sent over OTLP/HTTP; a caller's trace is continued.

It needs the extra `[otel]`, so it is imported only where OTEL_EXPORTER_OTLP_ENDPOINT is set. Headers are those
of W3C Trace Context; all else that the SDK reads of the environment (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS, ...) holds as it documents it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version as distribution_version
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import Getter, Setter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handler import timeline
from handler.strategies import STRATEGIES
from handler.timeline import Kind, UnitTimes
from runtime.frames import Timeline
from runtime.requests import Record

FLUSH_S: Final = 1.0
"""At the end, how long the collector may take for the last spans."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PROPAGATOR: Final = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Part:
    """A span below the request's: monotonic nanoseconds, and the parts within it."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    parts: Sequence["Part"] = ()


def parts(record: Record) -> Iterator[Part]:
    """An answered request's parts: receive, queue, input, pipeline and its units, answer; as far as it came."""
    answered_ns = record.answered_ns
    if record.received_ns is None or answered_ns is None:
        return
    yield Part("receive", record.arrived_ns, record.received_ns)
    if record.dispatched_ns is not None:
        yield Part("queue", record.received_ns, record.dispatched_ns)
    if record.timeline is None:
        return
    yield Part("input", *record.timeline.decoded_ns)
    pipeline = _pipeline(record.timeline)
    yield pipeline
    yield Part("answer", pipeline.end_ns, answered_ns)


def _pipeline(found: Timeline) -> Part:
    figures = found.figures
    start = min(span.start_ns for span in found.spans)
    end = max(span.end_ns for span in found.spans if span.kind == "execute")
    attributes = {
        "cicada.layers": figures.layers,
        "cicada.utilization": figures.utilization,
        "cicada.occupancy": figures.occupancy,
        "cicada.placeholder_bytes": figures.placeholder_bytes,
    }
    return Part("pipeline", start, end, attributes, tuple(_units(found)))


def _units(found: Timeline) -> Iterator[Part]:
    """The units from their first to their last span, and retrieval likewise."""
    decoupled = STRATEGIES[found.strategy].decoupled
    for unit in timeline.UNITS:
        kinds = timeline.kinds_of(unit, decoupled=decoupled)
        yield from _over(found, f"{unit} unit", kinds, _times(found, unit))
    retrieval = {
        "cicada.retrieve_ms": found.figures.retrieve_ms,
        "cicada.suspensions": len(found.suspensions),
    }
    yield from _over(found, "retrieval", ("retrieve",), retrieval)


def _over(
    found: Timeline, name: str, kinds: Iterable[Kind], attributes: Attributes
) -> Iterator[Part]:
    spans = [span for span in found.spans if span.kind in kinds]
    if spans:
        start = min(span.start_ns for span in spans)
        yield Part(name, start, max(span.end_ns for span in spans), attributes)


def _times(found: Timeline, unit: timeline.Unit) -> Attributes:
    figures = found.figures
    named: dict[str, UnitTimes] = {
        "work": figures.work_ms,
        "wait": figures.wait_ms,
        "idle": figures.idle_ms,
    }
    return {f"cicada.{name}_ms": getattr(times, unit) for name, times in named.items()}


class Tracing:
    """Makes spans of answered requests and hands them to a thread of the SDK's, which sends them in batches.

    A collector that is slow or down loses spans, beyond a queue of them, and nothing else.
    """

    def __init__(self, endpoint: str) -> None:
        """endpoint: the collector's base URL, as OTEL_EXPORTER_OTLP_ENDPOINT names it."""
        ours = {SERVICE_NAME: "cicada", SERVICE_VERSION: distribution_version("cicada-serverless")}
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("cicada")

    def begin(self, scope: Scope, record: Record) -> Span:
        """The request's span, a child of the caller's; its time began with the request's arrival."""
        attributes = {
            "http.request.method": scope["method"],
            "url.scheme": scope["scheme"],
            "url.path": scope["path"],
            "cicada.request_id": record.id,
        }
        route = getattr(scope.get("route"), "path", None)
        return self._tracer.start_span(
            f"{scope['method']} {route}" if route else scope["method"],
            context=_PROPAGATOR.extract(Headers(scope=scope), Context(), _GETTER),
            kind=SpanKind.SERVER,
            attributes={**attributes, "http.route": route} if route else attributes,
            start_time=_wall_clock(record, record.arrived_ns),
        )

    def end(self, span: Span, record: Record) -> None:
        if span.is_recording():
            named = {"model": record.model, "version": record.version, "strategy": record.strategy}
            known = {f"cicada.{name}": value for name, value in named.items() if value is not None}
            span.set_attributes({**known, "http.response.status_code": record.status or 0})
            if (record.status or 0) >= 500:
                span.set_attribute("error.type", str(record.status))
                span.set_status(StatusCode.ERROR, record.error)
            self._add(parts(record), span, record)
        span.end(_wall_clock(record, record.answered_ns or record.arrived_ns))

    async def close(self) -> None:
        """Sends what is left, within FLUSH_S."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(sent.set)

        # A thread that the interpreter's end does not wait for: the SDK waits for half a minute.
        threading.Thread(target=flush, name="flush spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await sent.wait()

    def _add(self, inner: Iterable[Part], parent: Span, record: Record) -> None:
        context = set_span_in_context(parent, Context())
        for part in inner:
            span = self._tracer.start_span(
                part.name,
                context=context,
                attributes=part.attributes,
                start_time=_wall_clock(record, part.start_ns),
            )
            self._add(part.parts, span, record)
            span.end(_wall_clock(record, part.end_ns))


class TracingMiddleware:
    """Traces inference requests; their answers carry `traceparent`, with the request's span as the parent."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record: Record = scope["state"]["record"]
        span: Span | None = None

        async def marked(message: Message) -> None:
            nonlocal span
            if message["type"] == "http.response.start" and record.inference:
                span = self._tracing.begin(scope, record)
                context = set_span_in_context(span, Context())
                _PROPAGATOR.inject(MutableHeaders(scope=message), context, _SETTER)
            await send(message)

        try:
            await self._app(scope, receive, marked)
        finally:
            if span is not None:
                self._tracing.end(span, record)


class _HeadersGetter(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        values = carrier.getlist(key)
        if key == "traceparent" and len(values) != 1:
            return None  # a trace has one parent (Trace Context, section 3.2)
        return values or None

    def keys(self, carrier: Headers) -> list[str]:
        return carrier.keys()


class _HeadersSetter(Setter[MutableHeaders]):
    def set(self, carrier: MutableHeaders, key: str, value: str) -> None:
        carrier[key] = value


_GETTER: Final = _HeadersGetter()
_SETTER: Final = _HeadersSetter()


def _wall_clock(record: Record, monotonic_ns: int) -> int:
    """Nanoseconds since 1970: the request's arrival was read from both clocks."""
    arrived_at_ns = (record.arrived_at - _EPOCH) // timedelta(microseconds=1) * 1000
    return arrived_at_ns + monotonic_ns - record.arrived_ns
