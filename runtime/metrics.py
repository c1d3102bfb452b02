"""Prometheus metrics. Labels come from known sets only, so that no caller can make them grow."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from handler.timeline import KINDS
from runtime.handler_process import End
from runtime.limits import Limits
from runtime.pool import Pool
from runtime.requests import Record

UNKNOWN: Final = "unknown"
BUCKETS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0,
)  # fmt: skip


class Metrics:
    """One application's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "cicada_requests",
            "Inference requests answered.",
            ("model", "strategy", "status"),
            registry=self._registry,
        )
        self._total = self._histogram("total", "Headers complete to answer ready.")
        self._queue = self._histogram("queue", "Body complete to dispatch to a handler.")
        self._pipeline = self._histogram("pipeline", "First span to the end of the last execution.")
        self._kinds = Histogram(
            "cicada_span_seconds",
            "Time of a request's spans of one kind.",
            ("kind", "model", "strategy"),
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._ends = Counter(
            "cicada_handler_restarts",
            "Handler processes that ended and were replaced.",
            ("cause",),
            registry=self._registry,
        )

    def watch(self, pool: Pool, limits: Limits) -> None:
        """Publishes what the pool says of itself, at the moment it is asked."""
        self._gauge("cicada_handlers_alive", "Handlers that are ready or at work.").set_function(
            lambda: pool.ready
        )
        self._gauge("cicada_queue_depth", "Requests that wait for a handler.").set_function(
            lambda: pool.waiting
        )
        self._gauge("cicada_in_flight", "Requests that a handler works on.").set_function(
            lambda: pool.running
        )
        self._gauge("cicada_cpu_limit_cores", "Cores that the container has.").set(limits.cpus)
        if limits.memory_bytes is not None:
            self._gauge("cicada_memory_limit_bytes", "Memory that the container has.").set(
                limits.memory_bytes
            )

    def handler_ended(self, end: End) -> None:
        self._ends.labels(end.cause).inc()

    def observe(self, record: Record) -> None:
        model = record.model or UNKNOWN
        strategy = record.strategy or UNKNOWN
        self._requests.labels(model, strategy, str(record.status)).inc()
        _observe(self._total.labels(model, strategy), record.total_ms)
        _observe(self._queue.labels(model, strategy), record.queue_ms)
        if record.timeline is None:
            return
        figures = record.timeline.figures
        _observe(self._pipeline.labels(model, strategy), figures.pipeline_ms)
        for kind in KINDS:
            _observe(self._kinds.labels(kind, model, strategy), getattr(figures, f"{kind}_ms"))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the form that the `Accept` header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"cicada_{name}_seconds",
            what,
            ("model", "strategy"),
            buckets=BUCKETS_S,
            registry=self._registry,
        )

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, registry=self._registry)


def _observe(histogram: Histogram, milliseconds: float | None) -> None:
    if milliseconds is not None:
        histogram.observe(milliseconds / 1000)
