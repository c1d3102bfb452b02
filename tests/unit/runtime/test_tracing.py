"""Spans as a collector on this machine receives them over OTLP/HTTP."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from handler.timeline import Figures, Suspension, UnitTimes
from handler.timeline import Span as Spent
from runtime.frames import Timeline
from runtime.requests import Record
from runtime.tracing import FLUSH_S, Part, Tracing, TracingMiddleware, parts

pytestmark = pytest.mark.anyio

CALLER_TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN: Final = "b7ad6b7169203331"
FIGURES: Final = Figures(
    layers=2, input_ms=0, construct_ms=0, initialize_ms=0, retrieve_ms=2.5, apply_ms=0, execute_ms=0,
    pipeline_ms=0, work_ms=UnitTimes(1.0, 2.0, 3.0), wait_ms=UnitTimes(4.0, 5.0, 6.0),
    idle_ms=UnitTimes(7.0, 8.0, 9.0), utilization=0.75, occupancy=1, placeholder_bytes=42,
    placeholder_usage_ms=0,
)  # fmt: skip
SPANS: Final = (
    Spent(0, "retrieve", 3100, 6000),
    Spent(1, "retrieve", 4000, 8000),
    Spent(0, "construct", 3000, 4000),
    Spent(1, "construct", 4000, 4200),
    Spent(0, "apply", 6000, 6500),
    Spent(1, "apply", 8000, 8100),
    Spent(0, "execute", 6500, 7000),
    Spent(1, "execute", 8100, 9000),
)
ARRIVED_AT: Final = datetime(2026, 11, 30, 6, 0, 0, 123456, UTC)
ARRIVED_AT_NS: Final = int(ARRIVED_AT.timestamp()) * 10**9 + 123_456_000
OFFSET_NS: Final = ARRIVED_AT_NS - 1000


def answered(strategy: str = "cicada", status: int = 200) -> Record:
    timeline = Timeline(
        strategy=strategy,
        model="resnet50",
        version="0123456789ab",
        layers=("conv1", "fc"),
        arrival_ns=2900,
        decoded_ns=(3050, 4500),
        spans=SPANS,
        suspensions=(Suspension(1, 4500, 5000),),
        placeholder_bytes=42,
        figures=FIGURES,
    )
    return Record(
        "mine",
        arrived_ns=1000,
        arrived_at=ARRIVED_AT,
        inference=True,
        model="resnet50",
        version="0123456789ab",
        strategy=strategy,
        received_ns=2000,
        dispatched_ns=2800,
        answered_ns=9500,
        status=status,
        timeline=timeline if status == 200 else None,
        error=None if status == 200 else "the handler was killed by SIGKILL",
    )


class Collector:
    """Takes what is exported; `answer_s` seconds pass until it answers."""

    def __init__(self, answer_s: float = 0.0) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.release = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.release.wait(answer_s)
                collector.paths.append(self.path)
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> dict[str, Span]:
        """By name; names are unique within one request."""
        spans = [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        named = {span.name: span for span in spans}
        assert len(named) == len(spans)
        return named


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


async def ask(tracing: Tracing, record: Record, **headers: str) -> dict[str, str]:
    """One request through the middleware; the answer's headers."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        scope["route"] = type("Route", (), {"path": "/predictions/{model}"})
        await send({"type": "http.response.start", "status": record.status, "headers": []})
        await send({"type": "http.response.body", "body": b"[]"})

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the middleware reads no body")

    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": "/predictions/resnet50",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "state": {"record": record},
    }
    await TracingMiddleware(app, tracing)(scope, receive, send)
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def attributes(span: Span) -> dict[str, Any]:
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        assert kind
        values[attribute.key] = getattr(attribute.value, kind)
    return values


async def test_a_request_is_a_span_with_its_parts_and_the_pipelines_units(
    collector: Collector,
) -> None:
    tracing = Tracing(collector.url)
    await ask(tracing, answered())
    await tracing.close()
    spans = collector.spans()
    assert set(collector.paths) == {"/v1/traces"}
    times = {
        name: (span.start_time_unix_nano - OFFSET_NS, span.end_time_unix_nano - OFFSET_NS)
        for name, span in spans.items()
    }
    assert times == {
        "POST /predictions/{model}": (1000, 9500),
        "receive": (1000, 2000),
        "queue": (2000, 2800),
        "input": (3050, 4500),
        "pipeline": (3000, 9000),
        "layer unit": (3000, 4200),
        "weight unit": (6000, 8100),
        "compute unit": (6500, 9000),
        "retrieval": (3100, 8000),
        "answer": (9000, 9500),
    }
    ids = {span.span_id: name for name, span in spans.items()}
    parents = {name: ids.get(span.parent_span_id) for name, span in spans.items()}
    request = "POST /predictions/{model}"
    assert parents == {
        request: None,
        **dict.fromkeys(("receive", "queue", "input", "pipeline", "answer"), request),
        **dict.fromkeys(("layer unit", "weight unit", "compute unit", "retrieval"), "pipeline"),
    }
    assert len({span.trace_id for span in spans.values()}) == 1


async def test_spans_say_what_they_are_of(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    tracing = Tracing(f"{collector.url}/")
    await ask(tracing, answered())
    await tracing.close()
    (exported,) = collector.requests[0].resource_spans
    resource = {pair.key: pair.value.string_value for pair in exported.resource.attributes}
    assert resource["service.name"] == "cicada"
    assert resource["deployment.environment"] == "test"
    spans = collector.spans()
    request = spans["POST /predictions/{model}"]
    assert request.kind == Span.SPAN_KIND_SERVER
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/predictions/{model}",
        "http.response.status_code": 200,
        "url.path": "/predictions/resnet50",
        "url.scheme": "http",
        "cicada.request_id": "mine",
        "cicada.model": "resnet50",
        "cicada.version": "0123456789ab",
        "cicada.strategy": "cicada",
    }
    assert attributes(spans["pipeline"])["cicada.utilization"] == 0.75
    assert attributes(spans["weight unit"]) == {
        "cicada.work_ms": 2.0,
        "cicada.wait_ms": 5.0,
        "cicada.idle_ms": 8.0,
    }
    assert attributes(spans["retrieval"]) == {"cicada.retrieve_ms": 2.5, "cicada.suspensions": 1}


async def test_the_service_may_have_another_name(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "classifier")
    tracing = Tracing(collector.url)
    await ask(tracing, answered())
    await tracing.close()
    (exported,) = collector.requests[0].resource_spans
    resource = {pair.key: pair.value.string_value for pair in exported.resource.attributes}
    assert resource["service.name"] == "classifier"


async def test_a_failed_request_is_an_error_and_has_the_parts_that_it_came_to(
    collector: Collector,
) -> None:
    tracing = Tracing(collector.url)
    await ask(tracing, answered(status=502))
    await tracing.close()
    spans = collector.spans()
    assert set(spans) == {"POST /predictions/{model}", "receive", "queue"}
    request = spans["POST /predictions/{model}"]
    assert request.status.code == Status.STATUS_CODE_ERROR
    assert request.status.message == "the handler was killed by SIGKILL"
    assert attributes(request)["error.type"] == "502"


async def test_the_callers_trace_is_continued_and_told(collector: Collector) -> None:
    tracing = Tracing(collector.url)
    told = await ask(
        tracing,
        answered(),
        traceparent=f"00-{CALLER_TRACE}-{CALLER_SPAN}-01",
        tracestate="vendor=opaque:1,other=2",
    )
    await tracing.close()
    request = collector.spans()["POST /predictions/{model}"]
    assert request.trace_id.hex() == CALLER_TRACE
    assert request.parent_span_id.hex() == CALLER_SPAN
    assert told == {
        "traceparent": f"00-{CALLER_TRACE}-{request.span_id.hex()}-01",
        "tracestate": "vendor=opaque:1,other=2",
    }


async def test_what_the_caller_does_not_sample_is_not_exported(collector: Collector) -> None:
    tracing = Tracing(collector.url)
    told = await ask(tracing, answered(), traceparent=f"00-{CALLER_TRACE}-{CALLER_SPAN}-00")
    await tracing.close()
    assert collector.requests == []
    assert re.fullmatch(rf"00-{CALLER_TRACE}-[0-9a-f]{{16}}-00", told["traceparent"])


# W3C Trace Context, section 3.2.2 and 3.3.1: what is not valid is as if it were not there.
@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-00000000000000000000000000000000-b7ad6b7169203331-01"},
        {"traceparent": f"00-{CALLER_TRACE}-0000000000000000-01"},
        {"traceparent": f"ff-{CALLER_TRACE}-{CALLER_SPAN}-01"},
        {"traceparent": f"00-{CALLER_TRACE.upper()}-{CALLER_SPAN}-01"},
        {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01-more"},
        {"traceparent": "a" * 10_000},
        {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01\r\nSet-Cookie: a=b"},
        {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01", "Traceparent": "again"},
        {"tracestate": "vendor=1"},
    ],
)
async def test_an_invalid_trace_is_replaced_by_a_new_one(
    collector: Collector, headers: dict[str, str]
) -> None:
    tracing = Tracing(collector.url)
    told = await ask(tracing, answered(), **headers)
    await tracing.close()
    assert list(told) == ["traceparent"]
    parent = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0[13]", told["traceparent"])
    assert parent
    assert parent[1] != CALLER_TRACE


async def test_a_hostile_tracestate_stays_within_its_header(collector: Collector) -> None:
    tracing = Tracing(collector.url)
    told = await ask(
        tracing,
        answered(),
        traceparent=f"00-{CALLER_TRACE}-{CALLER_SPAN}-01",
        tracestate="good=1,bad\r\nSet-Cookie: a=b,=,ünï=2",
    )
    await tracing.close()
    assert re.fullmatch(r"[ -~]*", told.get("tracestate", ""))
    assert "Set-Cookie" not in told


async def test_probes_are_not_traced(collector: Collector) -> None:
    tracing = Tracing(collector.url)
    assert await ask(tracing, Record("probe", status=200)) == {}
    await tracing.close()
    assert collector.requests == []


async def test_a_collector_that_is_down_costs_no_request_and_no_shutdown(free_port: int) -> None:
    tracing = Tracing(f"http://127.0.0.1:{free_port}")
    told = [await ask(tracing, answered()) for _ in range(3000)]  # the queue holds 2048 spans
    assert all("traceparent" in headers for headers in told)
    start = time.monotonic()
    await tracing.close()
    assert time.monotonic() - start < FLUSH_S + 9, "by itself the SDK waits for 30 s"


async def test_a_collector_that_hangs_delays_no_shutdown() -> None:
    collector = Collector(answer_s=60.0)
    try:
        tracing = Tracing(collector.url)
        await ask(tracing, answered())
        start = time.monotonic()
        await tracing.close()
        assert time.monotonic() - start < FLUSH_S + 9, "by itself the SDK waits for 30 s"
    finally:
        collector.close()


@pytest.mark.parametrize("strategy", ["traditional", "pisel", "mini"])
def test_retrieval_in_line_is_the_weight_units_own(strategy: str) -> None:
    (pipeline,) = (part for part in parts(answered(strategy)) if part.name == "pipeline")
    (weight,) = (part for part in pipeline.parts if part.name == "weight unit")
    assert (weight.start_ns, weight.end_ns) == (3100, 8100)


def test_a_request_refused_before_its_body_came_has_no_parts() -> None:
    assert list(parts(Record("r", answered_ns=5, status=404))) == []


def test_bad_input_did_not_queue() -> None:
    record = Record("r", arrived_ns=1, received_ns=3, answered_ns=5, status=400)
    assert list(parts(record)) == [Part("receive", 1, 3)]


def test_a_service_that_is_told_to_end_has_sent_its_spans(
    collector: Collector, repository: Path, tmp_path: Path
) -> None:
    environment = {
        "CICADA_WEIGHTS": str(tmp_path),
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "HOST": "127.0.0.1",
        "PORT": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "runtime.cli", "serve"],
        cwd=repository,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as service:
        assert service.stdout
        port = json.loads(service.stdout.readline())["port"]
        answer = httpx.post(
            f"http://127.0.0.1:{port}/predictions/none",
            headers={"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"},
            content=b"image",
        )
        httpx.get(f"http://127.0.0.1:{port}/v2/health/live")
        service.terminate()
        service.stdout.read()
    assert (answer.status_code, service.returncode) == (404, 0)
    (span,) = collector.spans().values()
    assert span.name == "POST /predictions/{model}"
    assert answer.headers["traceparent"] == f"00-{CALLER_TRACE}-{span.span_id.hex()}-01"
    assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 60
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9


def python(code: str, repository: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_collector_nothing_of_the_sdk_is_imported(
    repository: Path, tmp_path: Path
) -> None:
    code = f"""
import sys
from pathlib import Path
from runtime.app import create_app
from runtime.settings import Settings
create_app(Settings(weights=Path({str(tmp_path)!r})))
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
print("runtime.tracing" in sys.modules)
"""
    done = python(code, repository)
    assert (done.stdout, done.stderr) == ("[]\nFalse\n", "")


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter"])
def test_without_the_extra_a_collector_is_one_sentence_at_the_start(
    repository: Path, missing: str
) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\nfrom runtime.cli import app\napp(['serve'])"
    )
    collector = "http://127.0.0.1:9"
    done = python(code, repository, OTEL_EXPORTER_OTLP_ENDPOINT=collector, PORT="0")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        rf"cicada: OTEL_EXPORTER_OTLP_ENDPOINT is set, but {missing}[a-z._]* is not installed: "
        r"the extra 'otel' of cicada-serverless brings it\n",
        done.stderr,
    )
