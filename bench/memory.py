"""`cicada bench memory`: what a request takes beside the resident forward pass, and what handlers share."""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import checkpoints, environment
from bench.latency import RESIDENT, ServedVariant, StandIn, random_input, stand_in
from bench.worker import Worker
from handler import unit
from handler.timeline import now_ns
from models import preparation
from models.store import Store

_SEED: Final = 0
_SAMPLE_S: Final = 0.0005
REST_S: Final = 1.5 * unit.REST_S
_MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """One model; megabytes (10^6 bytes), medians over the rounds.

    resident_peak_mb, cicada_peak_mb: anonymous memory at its highest in a request, above the level
    before the process's first one (for the floor, with its model loaded). left_mb: anonymous memory
    after all rounds, above that level. weights_mb: the weight files. copies: how often handlers at
    work at once have the weights in memory: the file's pages, which are one copy however many map
    them, and what any of them took as pages of its own, over weights_mb.
    """

    model: str
    n: int
    resident_peak_mb: float
    cicada_peak_mb: float
    above_resident_mb: float
    left_mb: float
    weights_mb: float
    handlers: int
    copies: float


@dataclass(frozen=True, slots=True)
class Options:
    models: Sequence[str]
    rounds: int
    handlers: int
    threads: int
    folder: Path | None


class Sample(NamedTuple):
    """A process's resident memory at one moment, bytes: its own, and pages of files that it has mapped."""

    at_ns: int
    anonymous: int
    file_backed: int


class MemorySampler:
    """Samples a process's memory on a thread until stopped; a context manager."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        """Of the anonymous memory; 0 without a sample."""
        return max((sample.anonymous for sample in self.samples), default=0)

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_S):
            memory = self._process.memory_info()
            self.samples.append(Sample(now_ns(), memory.rss - memory.shared, memory.shared))


def anonymous_bytes(process: psutil.Process) -> int:
    memory = process.memory_info()
    anonymous: int = memory.rss - memory.shared
    return anonymous


def own_weight_bytes(pid: int, folder: Path) -> int:
    """Anonymous pages in a process's mappings of weight files: copies of its own (proc(5), smaps)."""
    total = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            inside = str(folder) in line
        elif inside and first == "Anonymous:":
            total += int(line.split()[1]) * 1024
    return total


def measure(options: Options, progress: Progress) -> Iterator[Row]:
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="cicada-bench-", dir=options.folder) as folder:
            yield _measure_model(model, options, Path(folder), progress)


def _measure_model(model: str, options: Options, folder: Path, progress: Progress) -> Row:
    task = progress.add_task(f"{model}: prepare", total=None)
    checkpoints.write(folder / "checkpoints", model, _SEED, onnx=False)
    store = Store(folder / "store")
    prepared = preparation.prepare(
        store, model, preparation.from_seed(_SEED, model, "block"), "safetensors"
    )
    progress.update(task, description=model)
    value = random_input(model)
    with ExitStack() as stack:
        made = folder / "checkpoints"
        floor = stand_in(RESIDENT, "bench.resident", model, made, options.threads, stack)
        handlers = [
            stack.enter_context(Worker.handler(store.root, options.threads))
            for _ in range(options.handlers)
        ]
        served = [
            ServedVariant("cicada", None, None, worker, model, "cicada") for worker in handlers
        ]
        resident, _ = _rise(floor, value, options.rounds)
        cicada, left = _rise(served[0], value, options.rounds)
        copied = _most_copied(served, value, prepared.path, options.rounds)
    progress.remove_task(task)
    return Row(
        model=model,
        n=options.rounds,
        resident_peak_mb=resident,
        cicada_peak_mb=cicada,
        above_resident_mb=cicada - resident,
        left_mb=left,
        weights_mb=prepared.bytes / _MB,
        handlers=options.handlers,
        copies=1 + copied / prepared.bytes,
    )


def _rise(variant: StandIn | ServedVariant, value: bytes, rounds: int) -> tuple[float, float]:
    """Anonymous memory at its highest in a request, and after all, above the level before the first."""
    process = psutil.Process(variant.worker.pid)
    before = anonymous_bytes(process)
    peaks = []
    for _ in range(rounds):
        with MemorySampler(variant.worker.pid) as sampler:
            variant.run(value)
        peaks.append((sampler.peak - before) / _MB)
    time.sleep(REST_S)  # what the requests left free is given back when the handler rests
    return statistics.median(peaks), (anonymous_bytes(process) - before) / _MB


def _most_copied(served: Sequence[ServedVariant], value: bytes, folder: Path, rounds: int) -> int:
    """The most that handlers, all at work at once, had of the weights as pages of their own, bytes."""
    most = 0
    with ThreadPoolExecutor(len(served)) as pool:
        for _ in range(rounds):
            running = [pool.submit(variant.run, value) for variant in served]
            while not all(future.done() for future in running):
                copied = sum(own_weight_bytes(one.worker.pid, folder) for one in served)
                most = max(most, copied)
            for future in running:
                future.result()  # raises what went wrong
    return most


def table(rows: Sequence[Row]) -> Table:
    printed = Table(
        *("model", "n", "resident +MB", "cicada +MB", "above resident MB", "left MB"),
        *("weights MB", "handlers", "copies"),
    )
    for column in printed.columns[1:]:
        column.justify = "right"
    for row in rows:
        figures = (row.resident_peak_mb, row.cicada_peak_mb, row.above_resident_mb, row.left_mb)
        printed.add_row(
            row.model,
            str(row.n),
            *(f"{figure:.1f}" for figure in figures),
            f"{row.weights_mb:.1f}",
            str(row.handlers),
            f"{row.copies:.2f}",
        )
    return printed


def run(options: Options, json_file: Path | None) -> None:
    """Measures, prints the table and writes the figures."""
    described = environment.describe(options.threads, " ".join(["cicada", *sys.argv[1:]]))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = list(measure(options, progress))
    if json_file is not None:
        content = {"environment": described, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    Console().print(table(rows))
