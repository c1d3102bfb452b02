"""`cicada bench http`: requests per second and latency under concurrent clients, and whether health answers meanwhile.

Three processes besides the handlers: the service, this one with the clients, and one that asks for health, so that
what the clients cost is not taken for the service's delay.
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import environment
from bench.health import Health, HealthProbe
from bench.payload import KINDS, Request, request
from models import catalog, preparation
from models.errors import ModelError
from models.store import Store

_SEED: Final = 0
_WARM_UPS: Final = 2
_START_LIMIT_S: Final = 120.0
_END_LIMIT_S: Final = 30.0


class BenchFailed(ModelError):
    """The service did not start, or a choice on the command line is none."""


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    kinds: Sequence[str]
    clients: Sequence[int]
    seconds: float
    """How long each cell of the table lasts, at most."""
    requests: int
    """How many requests each cell makes, at most."""
    image: bytes | None
    """An image file's content; None: one is made."""
    folder: Path | None
    """Where the store is made, and removed again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of request from one number of clients; milliseconds."""

    kind: str
    clients: int
    n: int
    seconds: float
    requests_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    failures: Mapping[str, int]
    """How many answers had which other status than 200."""
    health_n: int
    health_p50_ms: float
    health_slowest_ms: float


def options(
    *,
    model: str,
    kinds: Sequence[str],
    clients: Sequence[str],
    seconds: float,
    requests: int,
    image: Path | None,
    folder: Path | None,
) -> Options:
    """Checks what was chosen. Raises BenchFailed."""
    for kind in kinds:
        if kind not in KINDS:
            raise BenchFailed(f"there is no kind {kind!r}: known are {', '.join(KINDS)}")
    counts = []
    for count in clients:
        if not count.isdecimal() or int(count) < 1:
            raise BenchFailed(f"a number of clients is {count!r}, expected one from 1")
        counts.append(int(count))
    content = None if image is None else image.read_bytes()
    return Options(model, kinds, counts, seconds, requests, content, folder)


class Served:
    """`cicada serve` in a process of its own, on a free port of the loopback interface; a context manager."""

    def __init__(self, weights: Path, queue: int, threads: int | None = None) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OTEL_", "CICADA_API_KEYS"))
        }
        settings = {
            "CICADA_WEIGHTS": str(weights),
            "CICADA_QUEUE": str(queue),
            "CICADA_TIMEOUT_S": "600",
            "HOST": "127.0.0.1",
            "PORT": "0",
        }
        if threads is not None:
            settings["CICADA_THREADS"] = str(threads)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 `_end` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.cli", "serve"],
            env={**inherited, **settings},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
        )
        self.url = ""

    def __enter__(self) -> Self:
        try:
            deadline = time.monotonic() + _START_LIMIT_S
            self._wait(self._listens, deadline)
            self._wait(self._is_ready, deadline)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _wait(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition():
            if self._process.poll() is not None:
                raise BenchFailed(f"the service ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise BenchFailed(f"the service was not ready within {_START_LIMIT_S:g} s")
            time.sleep(0.05)

    def _listens(self) -> bool:
        """It chose its port itself, and its log tells."""
        size = os.fstat(self._log.fileno()).st_size
        for line in os.pread(self._log.fileno(), size, 0).splitlines():
            event = json.loads(line) if line.endswith(b"}") else {}
            if event.get("event") == "listening":
                self.url = f"http://127.0.0.1:{event['port']}"
        return bool(self.url)

    def _is_ready(self) -> bool:
        return httpx.get(f"{self.url}/v2/health/ready").status_code == 200

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@dataclass(slots=True)
class Load:
    """Concurrent clients, each with one request at a time; until the time or the number is over."""

    request: Request
    deadline: float
    numbers: Iterator[int]
    times_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    async def run(self, url: str, clients: int) -> float:
        """Seconds from the first request to the last answer."""
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:  # noqa: S113 the service has one
            start = time.monotonic()
            await asyncio.gather(*(self._ask(client) for _ in range(clients)))
            return time.monotonic() - start

    async def _ask(self, client: httpx.AsyncClient) -> None:
        for _ in self.numbers:
            sent = time.monotonic()
            answer = await client.post(
                self.request.path, headers=self.request.headers, content=self.request.body
            )
            now = time.monotonic()
            self.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                self.times_ms.append((now - sent) * 1e3)
            if now > self.deadline:
                return


def measure(options: Options, progress: Progress) -> Iterator[Row]:
    """One kind after another, each from ever more clients."""
    task = progress.add_task(f"{options.model}: prepare", total=None)
    with tempfile.TemporaryDirectory(prefix="cicada-bench-", dir=options.folder) as folder:
        store = Store(Path(folder) / "weights")
        source = preparation.from_seed(_SEED, options.model, "block")
        preparation.prepare(store, options.model, source, "safetensors")
        side = catalog.usual_image_size(options.model)
        cells = list(itertools.product(options.kinds, options.clients))
        with Served(store.root, queue=max(options.clients)) as served:
            progress.update(task, total=len(cells))
            for kind, clients in cells:
                progress.update(task, description=f"{kind}, {clients} clients")
                sent = request(kind, options.model, side, options.image)
                yield _measure_cell(served.url, kind, sent, clients, options)
                progress.advance(task)
    progress.remove_task(task)


def _measure_cell(url: str, kind: str, sent: Request, clients: int, options: Options) -> Row:
    warm_up = Load(sent, deadline=float("inf"), numbers=iter(range(_WARM_UPS)))
    asyncio.run(warm_up.run(url, clients=1))
    load = Load(sent, time.monotonic() + options.seconds, iter(range(options.requests)))
    with HealthProbe(url) as probe:
        seconds = asyncio.run(load.run(url, clients))
        health = probe.stop()
    return _row(kind, clients, seconds, load, health)


def _row(kind: str, clients: int, seconds: float, load: Load, health: Health) -> Row:
    failures = {str(status): n for status, n in load.statuses.items() if status != 200}
    if not load.times_ms:
        raise BenchFailed(f"no request of kind {kind} was answered with 200, but {failures}")
    p50, p95, p99 = (float(value) for value in np.percentile(load.times_ms, (50, 95, 99)))
    return Row(
        kind=kind,
        clients=clients,
        n=len(load.times_ms),
        seconds=seconds,
        requests_per_s=len(load.times_ms) / seconds,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        failures=failures,
        health_n=health.n,
        health_p50_ms=health.p50_ms,
        health_slowest_ms=health.slowest_ms,
    )


def table(rows: Sequence[Row]) -> Table:
    """The rows as they are printed."""
    printed = Table(
        *("kind", "clients", "n", "per s", "p50", "p95", "p99", "failed"),
        *("asked", "p50", "slowest"),
        caption="Times in milliseconds; the last three columns are the health routes' meanwhile.",
    )
    for column in printed.columns[1:]:
        column.justify = "right"
    for row in rows:
        printed.add_row(
            row.kind,
            str(row.clients),
            str(row.n),
            f"{row.requests_per_s:.1f}",
            f"{row.p50_ms:.0f}",
            f"{row.p95_ms:.0f}",
            f"{row.p99_ms:.0f}",
            str(sum(row.failures.values())),
            str(row.health_n),
            f"{row.health_p50_ms:.1f}",
            f"{row.health_slowest_ms:.1f}",
        )
    return printed


def run(options: Options, json_file: Path | None) -> None:
    """Measures, prints the table and writes the figures."""
    command = " ".join(["cicada", *sys.argv[1:]])
    described = environment.describe(len(os.sched_getaffinity(0)), command)
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for row in measure(options, progress):
            rows.append(row)
            if json_file is not None:
                content = {"environment": described, "rows": [asdict(row) for row in rows]}
                partial = json_file.with_name(f"{json_file.name}.partial")
                partial.write_text(json.dumps(content, indent=1) + "\n")
                partial.replace(json_file)
    Console().print(table(rows))
