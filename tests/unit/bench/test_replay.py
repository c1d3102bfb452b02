"""The open loop against a server that the test holds back, and `cicada replay` against a real one."""

import csv
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from bench.http import Served
from bench.payload import Request
from bench.replay import driver, report
from bench.replay.cost import cost, weights_bytes
from bench.replay.driver import NOT_SENT, Call, Memory, Outcome, Replay
from bench.replay.trace import Arrival
from models import preparation
from models.store import Store

LIMIT_S: Final = 30.0
HEADERS: Final = {
    "Server-Timing": "queue;dur=1.5, pipeline;dur=40.250, total;dur=42.000",
    "Cicada-Strategy": "cicada",
    "Cicada-Placeholder": "bytes=1000, usage=3.000",
}


class HeldServer(ThreadingHTTPServer):
    """Answers inference once the test lets it; the metrics at once."""

    daemon_threads = True

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.status = status
        self.let_go = threading.Event()
        self.arrived = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HeldServer

    def do_GET(self) -> None:
        self._answer(200, b"# TYPE cicada_memory_used_bytes gauge\ncicada_memory_used_bytes 5e8\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.arrived.release()
        self.server.let_go.wait(LIMIT_S)
        self._answer(self.server.status, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def held(status: int = 200) -> Iterator[HeldServer]:
    with HeldServer(status) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            server.let_go.set()
            server.shutdown()
            serving.join()


def replay(url: str, in_flight: int = 100) -> Replay:
    return Replay(url, {"m": Request("/infer", {}, b"x")}, {}, in_flight, LIMIT_S)


def calls(*offsets_s: float, speedup: float = 1.0) -> list[Call]:
    return driver.calls([(offset, "app/f", "m") for offset in offsets_s], speedup)


def test_a_server_that_does_not_answer_does_not_hold_arrivals_back() -> None:
    """It answers only when all have come: a loop that waited for answers would never end."""
    with held() as server, ThreadPoolExecutor(1) as pool:
        running = replay(server.url)
        over = pool.submit(running.run, calls(*(number / 100 for number in range(20))))
        assert all(server.arrived.acquire(timeout=LIMIT_S) for _ in range(20))
        assert running.outcomes == []
        server.let_go.set()
        over.result(LIMIT_S)
    assert [outcome.error for outcome in running.outcomes] == [None] * 20


def test_what_is_due_while_too_many_are_in_flight_is_not_sent() -> None:
    with held() as server:
        running = replay(server.url, in_flight=2)

        def told() -> None:
            if len(running.outcomes) == 3:
                server.let_go.set()

        running.run(calls(0, 0, 0, 0, 0), told)
        assert server.arrived.acquire(timeout=0)
        assert server.arrived.acquire(timeout=0)
        assert not server.arrived.acquire(timeout=0)
    errors = [outcome.error for outcome in running.outcomes]
    assert errors == [NOT_SENT, NOT_SENT, NOT_SENT, None, None]


def test_arrivals_are_spaced_as_in_the_trace_divided_by_the_speedup() -> None:
    with held() as server:
        server.let_go.set()
        running = replay(server.url)
        running.run(calls(0, 30, speedup=60))
    assert running.seconds >= 0.5
    assert [one.due_s for one in calls(0, 30, speedup=60)] == [0, 0.5]


def test_latency_counts_from_when_a_call_was_due() -> None:
    with held() as server:
        server.let_go.set()
        running = replay(server.url)
        running.run([Call(0, 0.0, -5.0, "app/f", "m")])
    (outcome,) = running.outcomes
    assert outcome.late_ms is not None
    assert outcome.late_ms >= 5000
    assert outcome.latency_ms is not None
    assert outcome.latency_ms >= outcome.late_ms


def test_an_answer_s_headers_and_the_server_s_memory_are_kept() -> None:
    with held() as server:
        server.let_go.set()
        running = replay(server.url)
        running.run(calls(61, speedup=610))
    (outcome,) = running.outcomes
    assert (outcome.minute, outcome.status, outcome.error) == (1, 200, None)
    assert (outcome.queue_ms, outcome.pipeline_ms, outcome.total_ms) == (1.5, 40.25, 42.0)
    assert (outcome.strategy, outcome.placeholder_bytes) == ("cicada", 1000)
    assert {sample.bytes for sample in running.memory} == {500_000_000}
    assert running.memory[-1].at_s >= 0.1, "the last sample is of the replay's end"


@pytest.mark.parametrize("status", [429, 502, 503])
def test_an_error_is_counted_by_its_status(status: int) -> None:
    with held(status) as server:
        server.let_go.set()
        running = replay(server.url)
        running.run(calls(0))
    (outcome,) = running.outcomes
    assert (outcome.status, outcome.error) == (status, f"status {status}")


def test_a_server_that_is_not_there_is_an_error_of_every_call(free_port: int) -> None:
    running = replay(f"http://127.0.0.1:{free_port}")
    running.run(calls(0, 0))
    assert [outcome.error for outcome in running.outcomes] == ["ConnectError", "ConnectError"]


def outcome(**known: Any) -> Outcome:
    usual = Outcome(
        number=0,
        minute=0,
        offset_s=0.0,
        function="a/f",
        model="m",
        status=200,
        error=None,
        late_ms=0.1,
        latency_ms=100.0,
        queue_ms=0.0,
        pipeline_ms=500.0,
        total_ms=600.0,
        strategy="cicada",
        placeholder_bytes=1_000_000_000 // 32,
    )
    return replace(usual, **known)


def test_weights_are_told_from_placeholders_of_either_precision() -> None:
    answered = [
        outcome(model="one_bit", placeholder_bytes=100),
        outcome(model="full", strategy="pisel", placeholder_bytes=3200),
        outcome(model="unknown", placeholder_bytes=None),
    ]
    assert weights_bytes(answered) == {"one_bit": 3200, "full": 3200}


def test_cost_is_weights_times_the_time_they_are_used_against_the_whole_window() -> None:
    outcomes = [outcome(), outcome(), outcome(error="status 503", pipeline_ms=None)]
    memory = [Memory(0.0, 1_000_000_000), Memory(10.0, 2_000_000_000)]
    found = cost(outcomes, memory, window_s=3600)
    assert found is not None
    assert found.served_gb_s == pytest.approx(1.0)  # twice 1 GB for half a second
    assert found.resident_gb_s == pytest.approx(3600)
    assert found.saved == pytest.approx(1 - 1 / 3600)
    assert found.container_gb_s == pytest.approx(15)
    assert found.container_resident_gb_s == pytest.approx(20)  # 1 GB at its lowest, and the model


def test_without_an_answer_there_is_no_cost() -> None:
    assert cost([outcome(error="ReadTimeout")], [], 60) is None


def test_each_minute_has_the_latencies_of_what_arrived_in_it() -> None:
    outcomes = [
        *(outcome(minute=0, latency_ms=float(latency)) for latency in (10, 20, 30)),
        outcome(minute=2, latency_ms=7.0),
        outcome(minute=2, error=NOT_SENT, latency_ms=None),
    ]
    first, second, third = report.minutes(outcomes, 3)
    assert (first.invocations, first.answered, first.p50_ms) == (3, 3, 20.0)
    assert (second.invocations, second.p50_ms) == (0, None)
    assert (third.invocations, third.answered, third.errors, third.p99_ms) == (2, 1, 1, 7.0)


def test_the_window_is_described_by_its_bursts_and_its_most_invoked_functions() -> None:
    found = [Arrival(1.0, "a")] * 8 + [Arrival(61.0, name) for name in "bcdefghijk"]
    told = report.arrivals(found, ["m"] * 8 + ["n"] * 10, minutes=2)
    assert (told.invocations, told.functions, told.busiest_minute) == (18, 11, 10)
    assert told.top_function_share == pytest.approx(8 / 18)
    assert told.top_tenth_share == pytest.approx(9 / 18)  # two of eleven functions
    assert told.index_of_dispersion == pytest.approx(1 / 9)
    assert told.per_model == {"m": 8, "n": 10}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = Store(tmp_path_factory.mktemp("weights"))
    source = preparation.from_seed(0, "resnet18", "block")
    preparation.prepare(store, "resnet18", source, "safetensors")
    with Served(store.root, queue=64, threads=1) as served:
        yield served.url


def cicada(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.cli", "replay", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_replay_of_the_synthetic_hour_tells_all_that_it_promises(
    service: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = cicada(
        *("--url", service, "--models", "resnet18", "--minutes", "2", "--speedup", "20"),
        *("--strategy", "mini", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((out / "summary.json").read_text())
    assert told["trace"] == "synthetic hour, seed 0"
    assert told["synthetic"]["dispersion"] == 10
    assert "publishes none" in told["synthetic"]["why_this_dispersion"]
    assert told["complete"]
    assert told["errors"] == {}
    assert told["environment"]["cores"] >= 1
    with (out / "invocations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == told["answered"] == told["arrivals"]["invocations"] > 10
    assert {row["strategy"] for row in rows} == {"mini"}
    assert all("torch=" in row["versions"] and row["cache"] for row in rows)
    assert [int(row["number"]) for row in rows] == list(range(len(rows)))
    with (out / "minutes.csv").open() as file:
        by_minute = list(csv.DictReader(file))
    assert sum(int(row["invocations"]) for row in by_minute) == len(rows)
    weights = told["cost"]["weights_bytes"]["resnet18"]
    assert weights == pytest.approx(11_689_512 * 4, rel=0.001), "torchvision's parameter count"
    assert told["cost"]["resident_gb_s"] == pytest.approx(weights * 120 / 1e9)
    assert 0 < told["cost"]["served_gb_s"] < told["cost"]["resident_gb_s"]
    for name in ("invocations_per_minute", "latency_over_time"):
        assert (out / f"{name}.svg").read_text().startswith("<?xml")
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "synthetic hour, seed 0" in done.stdout


def test_a_trace_of_one_s_own_is_read_and_its_window_replayed(service: str, tmp_path: Path) -> None:
    trace = tmp_path / "mine.txt"
    trace.write_text("app,func,end_timestamp,duration\nx,f,3601,1\nx,g,3610,0.5\nx,f,9000,1\n")
    out = tmp_path / "out"
    done = cicada(
        *(str(trace), "--url", service, "--models", "resnet18", "--day", "1", "--hour", "1"),
        *("--speedup", "100", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((out / "summary.json").read_text())
    assert (told["trace"], told["synthetic"], told["answered"]) == ("mine.txt", None, 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--models", "resnet18,nosuch"], "does not serve nosuch"),
        (["--models", "paper"], "does not serve resnet50, "),
        (["missing.csv", "--models", "resnet18"], "missing.csv: No such file"),
        (["--models", "resnet18", "--minutes", "61"], "the synthetic trace is an hour long"),
        (["--models", "resnet18", "--strategy", "best"], "answered none of"),
    ],
)
def test_what_cannot_be_replayed_is_one_sentence(
    service: str, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = cicada(*arguments, "--url", service, "--speedup", "1000", "--out", str(tmp_path))
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_that_is_not_there_is_one_sentence(tmp_path: Path, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    done = cicada("--url", url, "--models", "resnet18", "--out", str(tmp_path))
    assert done.returncode == 1
    assert f"{url} does not answer" in done.stderr
