"""Prometheus metrics. Labels come from known sets only, so that no caller can make them grow."""

from collections.abc import Collection, Iterator
from typing import Any, Final

import prometheus_client
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from handler.timeline import KINDS
from runtime import limits
from runtime.handler_process import End
from runtime.pool import Pool
from runtime.requests import Record

UNKNOWN: Final = "unknown"
BUCKETS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0,
)  # fmt: skip

# Else every counter and histogram has a second series, of when it began, which doubles a scrape.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One application's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Use())
        self._models: set[str] = set()
        self._requests = self._counter(
            "requests", "Inference requests answered.", "model", "strategy", "status"
        )
        self._retrieved = self._counter(
            "retrieved_bytes", "Bytes of weight files brought into memory.", "model", "strategy"
        )
        self._total = self._histogram("total", "Headers complete to answer ready.")
        self._queue = self._histogram("queue", "Body complete to dispatch to a handler.")
        self._pipeline = self._histogram("pipeline", "First span to the end of the last execution.")
        self._kinds = self._histogram("span", "Time of a request's spans of one kind.", "kind")
        self._ends = self._counter(
            "handler_restarts", "Handler processes that ended and were replaced.", "cause"
        )

    def watch(self, pool: Pool, has: limits.Limits) -> None:
        """Publishes what the pool says of itself, at the moment it is asked."""
        self._gauge("handlers_alive", "Handlers that are ready or at work.").set_function(
            lambda: pool.ready
        )
        self._gauge("queue_depth", "Requests that wait for a handler.").set_function(
            lambda: pool.waiting
        )
        self._gauge("in_flight", "Requests that a handler works on.").set_function(
            lambda: pool.running
        )
        self._gauge("cpu_limit_cores", "Cores that the container has.").set(has.cpus)
        if has.memory_bytes is not None:
            memory = self._gauge("memory_limit_bytes", "Memory that the container has.")
            memory.set(has.memory_bytes)

    def handler_ended(self, end: End) -> None:
        self._ends.labels(end.cause).inc()

    def observe(self, record: Record) -> None:
        model = record.model or UNKNOWN
        self._models.add(model)
        strategy = record.strategy or UNKNOWN
        self._requests.labels(model, strategy, str(record.status)).inc()
        _observe(self._total.labels(model, strategy), record.total_ms)
        _observe(self._queue.labels(model, strategy), record.queue_ms)
        if record.timeline is None:
            return
        self._retrieved.labels(model, strategy).inc(record.retrieved_bytes)
        figures = record.timeline.figures
        _observe(self._pipeline.labels(model, strategy), figures.pipeline_ms)
        for kind in KINDS:
            _observe(self._kinds.labels(model, strategy, kind), getattr(figures, f"{kind}_ms"))

    def exposition(self, accept: str, models: Collection[str]) -> tuple[bytes, str]:
        """The metrics and their content type, in the form that the `Accept` header asks for.

        models: those there are; what was counted of removed ones is forgotten, or it would stay for good.
        """
        self._forget_all_but({*models, UNKNOWN})
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _forget_all_but(self, models: Collection[str]) -> None:
        counters = (self._requests, self._retrieved)
        histograms = (self._total, self._queue, self._pipeline, self._kinds)
        for model in self._models.difference(models):
            for metric in (*counters, *histograms):
                metric.remove_by_labels({"model": model})
            self._models.remove(model)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"cicada_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(
            f"cicada_{name}_seconds",
            what,
            ("model", "strategy", *labels),
            buckets=BUCKETS_S,
            registry=self._registry,
        )

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"cicada_{name}", what, registry=self._registry)


class _Use(Collector):
    """What the container uses of its limits, read when asked; nothing where the kernel does not tell."""

    def collect(self) -> Iterator[Metric]:
        seconds = limits.cpu_used_s()
        if seconds is not None:
            what = "Processor time that the container has used."
            yield CounterMetricFamily("cicada_cpu_used_seconds", what, value=seconds)
        memory = limits.memory_used()
        if memory is not None:
            what = "Memory that the container uses, without file pages that can be dropped."
            yield GaugeMetricFamily("cicada_memory_used_bytes", what, value=memory)


def _observe(histogram: Histogram, milliseconds: float | None) -> None:
    if milliseconds is not None:
        histogram.observe(milliseconds / 1000)


router = APIRouter(tags=["metrics"])

_TEXT: Final = {"schema": {"type": "string"}}
_FORMS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The metrics",
        "content": {"text/plain": _TEXT, "application/openmetrics-text": _TEXT},
    }
}


@router.get(
    "/metrics",
    response_class=Response,
    responses=_FORMS,
    summary="Metrics in Prometheus' text format, or OpenMetrics where `Accept` asks for it",
)
async def metrics(request: Request) -> Response:
    service = request.app.state.service
    models = {*service.store.names(), *service.store.damaged()}
    accept = request.headers.get("Accept", "")
    content, content_type = service.metrics.exposition(accept, models)
    return Response(content, headers={"Content-Type": content_type})
