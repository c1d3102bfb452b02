"""A service under load and faults for as long as asked: what it answered, what it lost, what it kept.

Callers mix models, formats, granularities and strategies; some send what is no request, some leave. Every few
seconds a handler is killed. Every answer is compared with torchvision's logits for that caller's own input.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import torch
import typer

from handler.strategies import STRATEGIES
from models import catalog, preparation
from models.manifest import Granularity, WeightFormat
from models.pretrained import preset
from models.random_weights import RandomWeights
from models.store import Store
from runtime import limits

CLASSES: Final = 10
INPUTS: Final = 6
CALLERS: Final = 4
HANDLERS: Final = 2
KILL_EVERY_S: Final = 10.0
BAD_SHARE: Final = 0.05
LEAVING_SHARE: Final = 0.05
TIMEOUT_S: Final = 30.0
OUTPUTS: Final = [{"name": "logits"}]
SETTLING_S: Final = 20.0
WARM_UP: Final = 20
MOST_GROWTH_BYTES: Final = 48 << 20
SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the models under load."""

    architecture: str
    granularity: Granularity
    weight_format: WeightFormat
    seed: int


KINDS: Final[Mapping[str, Kind]] = {
    "small": Kind("resnet18", "block", "safetensors", 0),
    "small-pth": Kind("resnet18", "stage", "pth", 1),
    "deeper": Kind("resnet34", "block", "safetensors", 2),
}
BAD: Final[tuple[tuple[str, bytes], ...]] = (
    ("/v2/models/small/infer", b'{"inputs": ['),
    ("/v2/models/small/infer", b'{"inputs": []}'),
    ("/v2/models/deeper/infer", b"[" * 5000),
    ("/predictions/small-pth", b"no image"),
    ("/predictions/small", b"\xff\xd8\xff\xe0" + bytes(400)),
    ("/predictions/nobody", b"x"),
)


@dataclass(slots=True)
class Held:
    """What the proxy has at rest."""

    memory_bytes: int
    threads: int
    descriptors: int


@dataclass(slots=True)
class Report:
    seconds: float = 0.0
    right: int = 0
    """Answers whose logits are torchvision's for that caller's input."""
    wrong: int = 0
    crossed: int = 0
    """Answers that carry another request's id."""
    refused: int = 0
    """Bad input, answered with 400 or 404."""
    left: int = 0
    """Callers that closed their connection before the answer."""
    killed: int = 0
    """Handlers that were killed; at work or not."""
    lost: int = 0
    """Requests that a killed handler was at work on: 502."""
    unexpected: Counter[str] = field(default_factory=Counter)
    """Everything else."""
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    before: Held | None = None
    after: Held | None = None
    handler_memory_bytes: int = 0
    """The most private memory that a handler had when it was looked at."""

    def faults(self) -> Iterator[str]:
        """What must not be, a sentence each."""
        if not self.right:
            yield "no request was answered"
        for name in ("wrong", "crossed"):
            if count := getattr(self, name):
                yield f"{count} answers were {name}"
        if self.lost > self.killed:
            yield f"{self.lost} requests were lost, {self.killed} handlers killed"
        if self.unexpected:
            yield f"unexpected: {dict(self.unexpected)}"
        if self.before is None or self.after is None:
            yield "the proxy was not measured"
            return
        if self.after.memory_bytes > self.before.memory_bytes + MOST_GROWTH_BYTES:
            yield f"memory grew from {self.before.memory_bytes} to {self.after.memory_bytes} bytes"
        for name in ("threads", "descriptors"):
            if getattr(self.after, name) > getattr(self.before, name):
                yield f"{name} grew from {getattr(self.before, name)} to {getattr(self.after, name)}"


class Table:
    """The known answers: the logits of each model for each input, by torchvision."""

    def __init__(self, store: Store) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = [torch.randn(1, 3, 224, 224, generator=generator) for _ in range(INPUTS)]
        self.logits = {name: self._prepared(store, name, kind) for name, kind in KINDS.items()}

    def _prepared(self, store: Store, name: str, kind: Kind) -> list[list[float]]:
        chain = catalog.architecture(
            kind.architecture, granularity=kind.granularity, classes=CLASSES
        )
        weights = dict(RandomWeights(chain, kind.seed))
        source = preparation.Source(
            f"random:{kind.seed}", chain, weights, preset(chain.name, chain.image_size)
        )
        preparation.prepare(store, name, source, kind.weight_format)
        model = catalog.torchvision_model(kind.architecture, classes=CLASSES)
        model.load_state_dict(weights)
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # as the handlers: sums are rounded alike only then
        with torch.inference_mode():
            logits = [model(value)[0].tolist() for value in self.inputs]
        torch.set_num_threads(before)
        return logits


class Service:
    """`cicada serve` over a store, as a process."""

    def __init__(self, store: Store, log: Path) -> None:
        settings = {
            "CICADA_WEIGHTS": str(store.root),
            "CICADA_HANDLERS": str(HANDLERS),
            "CICADA_THREADS": "1",
            "CICADA_TIMEOUT_S": str(TIMEOUT_S),
            "HOST": "127.0.0.1",
            "PORT": "0",
        }
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CICADA_", "OTEL_"))
        }
        self._log = log
        with log.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, "-m", "runtime.cli", "serve"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **settings},
            )
        try:
            self.port = self._listening()
        except BaseException:
            self.kill()
            raise
        self.url = f"http://127.0.0.1:{self.port}"

    def _listening(self) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self._log.read_text().splitlines():
                event = json.loads(line) if line.endswith("}") else {}  # it may be half written
                if event.get("event") == "listening":
                    port: int = event["port"]
                    return port
            time.sleep(0.05)
        raise RuntimeError(f"the service does not start: {self._log.read_text()}")

    def wait_until_ready(self, handlers: int = HANDLERS) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S) as client:
            while f"cicada_handlers_alive {handlers}.0" not in client.get("/metrics").text:
                if time.monotonic() > deadline:
                    raise RuntimeError("the handlers do not get ready")
                time.sleep(0.1)

    def handlers(self) -> list[psutil.Process]:
        return list(self.process.children())

    def held(self) -> Held:
        """At rest: the callers have gone, and their connections with them."""
        return Held(
            memory_bytes=limits.private_memory(self.process.pid),
            threads=self.process.num_threads(),
            descriptors=self.process.num_fds(),
        )

    def settle(self, before: Held) -> Held:
        """What it has when what callers left behind is gone, or after a while at the latest."""
        deadline = time.monotonic() + SETTLING_S
        found = self.held()
        while found.descriptors > before.descriptors and time.monotonic() < deadline:
            time.sleep(0.1)
            found = self.held()
        return found

    def stop(self) -> int:
        self.process.terminate()
        code: int = self.process.wait(TIMEOUT_S)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def _service(store: Store, log: Path) -> Iterator[Service]:
    service = Service(store, log)
    try:
        yield service
    finally:
        service.kill()


class Caller(threading.Thread):
    """Asks without a pause until it is told to stop."""

    def __init__(
        self, number: int, service: Service, table: Table, stopping: threading.Event
    ) -> None:
        super().__init__(name=f"caller-{number}")
        self._number = number
        self._service = service
        self._table = table
        self._stopping = stopping
        self._random = random.Random(number)  # noqa: S311 - a repeatable mixture
        self._asked = 0
        self.report = Report()
        self.latencies_ms: list[float] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._service.url, timeout=2 * TIMEOUT_S) as client:
            while not self._stopping.is_set():
                self._ask(client)

    def _ask(self, client: httpx.Client) -> None:
        chance = self._random.random()
        try:
            if chance < BAD_SHARE:
                self._ask_badly(client)
            elif chance < BAD_SHARE + LEAVING_SHARE:
                self._leave()
            else:
                self._ask_well(client)
        except Exception as error:  # noqa: BLE001 - the loop's boundary: a caller that ends is load that is missing
            self.report.unexpected[type(error).__name__] += 1

    def _ask_badly(self, client: httpx.Client) -> None:
        path, body = self._random.choice(BAD)
        answer = client.post(path, content=body)
        if answer.status_code in {400, 404}:
            self.report.refused += 1
        else:
            self._note_failure(answer)

    def _ask_well(self, client: httpx.Client) -> None:
        model, index, request_id, body, headers = self._request()
        start_ns = time.monotonic_ns()
        answer = client.post(f"/v2/models/{model}/infer", content=body, headers=headers)
        self.latencies_ms.append((time.monotonic_ns() - start_ns) / 1e6)
        if answer.headers.get("X-Request-ID") != request_id:
            self.report.crossed += 1
        elif answer.status_code != 200:
            self._note_failure(answer)
        elif answer.json()["id"] != request_id:
            self.report.crossed += 1
        elif answer.json()["outputs"][0]["data"] != self._table.logits[model][index]:
            self.report.wrong += 1
        else:
            self.report.right += 1

    def _note_failure(self, answer: httpx.Response) -> None:
        if answer.status_code == 502:
            self.report.lost += 1
        else:
            self.report.unexpected[f"{answer.status_code}: {answer.text[:200]}"] += 1

    def _leave(self) -> None:
        model, _, _, body, headers = self._request()
        lines = [
            f"POST /v2/models/{model}/infer HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        sent = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        with socket.create_connection(("127.0.0.1", self._service.port)) as connection:
            connection.sendall(sent[: self._random.choice((len(sent), len(sent), len(sent) // 2))])
            self._stopping.wait(self._random.uniform(0, 0.1))
        self.report.left += 1

    def _request(self) -> tuple[str, int, str, bytes, dict[str, str]]:
        """A model, an input, an id of the caller's own, and the request for them."""
        self._asked += 1
        request_id = f"c{self._number}-{self._asked}"
        model = self._random.choice(list(KINDS))
        index = self._random.randrange(INPUTS)
        content = self._table.inputs[index].numpy().tobytes()
        tensor = {
            "name": "input",
            "shape": [1, 3, 224, 224],
            "datatype": "FP32",
            "parameters": {"binary_data_size": len(content)},
        }
        described = json.dumps({"id": request_id, "inputs": [tensor], "outputs": OUTPUTS}).encode()
        headers = {
            "X-Request-ID": request_id,
            "Inference-Header-Content-Length": str(len(described)),
            "Cicada-Strategy": self._random.choice(list(STRATEGIES)),
            "Priority": f"u={self._random.randrange(8)}",
        }
        return model, index, request_id, described + content, headers


def soak(seconds: float, folder: Path) -> Report:
    """Loads a service of its own, with its store and log in `folder`."""
    store = Store(folder / "weights")
    table = Table(store)
    with _service(store, folder / "log") as service:
        service.wait_until_ready()
        _warm_up(service, table)
        before = service.held()
        stopping = threading.Event()
        callers = [Caller(number, service, table, stopping) for number in range(CALLERS)]
        start = time.monotonic()
        for caller in callers:
            caller.start()
        killed, memory = _kill_handlers(service, start + seconds)
        stopping.set()
        for caller in callers:
            caller.join()
        report = _summed(callers)
        report.seconds = time.monotonic() - start
        report.killed = killed
        report.handler_memory_bytes = memory
        service.wait_until_ready()
        report.before, report.after = before, service.settle(before)
        if service.stop() != 0:
            report.unexpected["exit code"] += 1
    return report


def _warm_up(service: Service, table: Table) -> None:
    """Every handler and model once or more, a leaving caller and a bad one among them."""
    never = threading.Event()
    caller = Caller(99, service, table, never)
    with httpx.Client(base_url=service.url, timeout=2 * TIMEOUT_S) as client:
        for _ in range(WARM_UP):
            caller._ask_well(client)  # noqa: SLF001 - its own module
        caller._ask_badly(client)  # noqa: SLF001
        caller._leave()  # noqa: SLF001


def _kill_handlers(service: Service, end: float) -> tuple[int, int]:
    """Until `end`: how many were killed, and the most private memory that one had."""
    chance = random.Random(0)  # noqa: S311
    killed = memory = 0
    next_kill = time.monotonic() + KILL_EVERY_S
    while (now := time.monotonic()) < end:
        handlers = service.handlers()
        memory = max([memory, *(limits.private_memory(process.pid) for process in handlers)])
        if now >= next_kill and handlers:
            with suppress(psutil.NoSuchProcess):
                chance.choice(handlers).send_signal(SIGNALS[killed % len(SIGNALS)])
                killed += 1
            next_kill += KILL_EVERY_S
        time.sleep(0.1)
    return killed, memory


def _summed(callers: list[Caller]) -> Report:
    total = Report()
    for caller in callers:
        for name in ("right", "wrong", "crossed", "refused", "left", "lost"):
            setattr(total, name, getattr(total, name) + getattr(caller.report, name))
        total.unexpected += caller.report.unexpected
    latencies = sorted(latency for caller in callers for latency in caller.latencies_ms)
    if latencies:
        total.p50_ms = latencies[len(latencies) // 2]
        total.p95_ms = latencies[len(latencies) * 95 // 100]
    return total


def main(seconds: float = 600.0, json_file: Path | None = None) -> None:
    """Runs a soak and prints its report; exit code 1 if anything was wrong, lost without cause, or grew."""
    with tempfile.TemporaryDirectory(prefix="cicada-soak-") as folder:
        report = soak(seconds, Path(folder))
    for line in lines(report):
        print(line)  # noqa: T201 - the command's output
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=2))
    faults = list(report.faults())
    for fault in faults:
        print(f"FAULT: {fault}")  # noqa: T201
    sys.exit(1 if faults else 0)


def lines(report: Report) -> Iterator[str]:
    """The report as it is printed."""
    mebibyte = 1 << 20
    before, after = report.before, report.after
    answered = report.right + report.wrong
    rows: dict[str, Any] = {
        "duration": f"{report.seconds:.0f} s, {CALLERS} callers, {HANDLERS} handlers of 1 thread",
        "load held": f"{answered / report.seconds:.1f} answers per second, "
        f"p50 {report.p50_ms:.0f} ms, p95 {report.p95_ms:.0f} ms",
        "faults injected": f"{report.killed} handlers killed, {report.refused} bad requests, "
        f"{report.left} callers that left",
        "right": report.right,
        "wrong": report.wrong,
        "crossed": report.crossed,
        "lost": f"{report.lost} (502, at most one for each handler killed)",
        "unexpected": dict(report.unexpected) or 0,
    }
    if before is not None and after is not None:
        rows["proxy memory"] = (
            f"{before.memory_bytes / mebibyte:.0f} MiB before, {after.memory_bytes / mebibyte:.0f} after"
        )
        rows["proxy threads"] = f"{before.threads} before, {after.threads} after"
        rows["proxy descriptors"] = f"{before.descriptors} before, {after.descriptors} after"
    rows["handler memory"] = f"{report.handler_memory_bytes / mebibyte:.0f} MiB at most"
    for name, value in rows.items():
        yield f"{name:18} {value}"


if __name__ == "__main__":
    typer.run(main)
