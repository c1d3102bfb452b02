"""`cicada prepare`: shows what `models.preparation` does, and gives up cleanly on a signal."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from models import preparation
from models.manifest import Granularity, WeightFormat
from models.preparation import Source
from models.store import PreparedModel, Store
from runtime import limits
from runtime.inspection import execution_facts


def prepare(
    weights: Path,
    name: str,
    *,
    architecture: str,
    checkpoint: Path | None,
    key: str | None,
    seed: int | None,
    pretrained: str | None,
    granularity: Granularity,
    weight_format: WeightFormat,
    optimize: bool,
) -> None:
    """Prepares a model from the one source given. Raises ModelError and OSError."""
    started_ns = time.monotonic_ns()
    store = Store(weights)
    store.check_name(name)
    with _termination_as_exit():
        source = _source(architecture, granularity, checkpoint, key, seed, pretrained)
        if optimize:
            source = _optimized(name, source, weight_format)
        with _progress(name, source.bytes) as advance:
            model = preparation.prepare(store, name, source, weight_format, advance)
    _print_summary(model, (time.monotonic_ns() - started_ns) / 1e9)


def _source(
    architecture: str,
    granularity: Granularity,
    checkpoint: Path | None,
    key: str | None,
    seed: int | None,
    pretrained: str | None,
) -> Source:
    if checkpoint is not None:
        return preparation.from_checkpoint(checkpoint, architecture, granularity, key)
    if seed is not None:
        return preparation.from_seed(seed, architecture, granularity)
    if pretrained is not None:
        return preparation.from_torchvision(pretrained, architecture, granularity)
    raise ValueError("expected a checkpoint, a seed or the name of pretrained weights")


def _optimized(name: str, source: Source, weight_format: WeightFormat) -> Source:
    with Console(stderr=True).status(f"measuring {name}, plain and optimized"):
        chosen = preparation.optimized(source, weight_format, limits.measure().threads(handlers=1))
    if chosen.optimization is None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"{name}: nothing is faster here than torchvision's own execution, so it stays as it is"
        )
    return chosen


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that nothing half-written stays."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line anywhere else."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"preparing {name}: {decimal(total_bytes)}", highlight=False)
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"preparing {name}", total=total_bytes)
        yield lambda written: progress.advance(task, written)


def _print_summary(model: PreparedModel, seconds: float) -> None:
    manifest = model.manifest
    rows = {
        "model": model.name,
        "version": model.version,
        "architecture": manifest.architecture,
        "classes": str(manifest.classes),
        "labels": "torchvision's categories" if model.labels else "none, classes have numbers only",
        "layers": f"{len(manifest.layers)}, by {manifest.granularity}",
        "files": f"{sum(layer.file is not None for layer in manifest.layers)}, {manifest.weight_format}",
        "size": f"{decimal(model.bytes)} ({model.bytes} bytes)",
        "source": manifest.source,
        **execution_facts(manifest.optimization),
        "preset": f"{manifest.preset}: resize {manifest.input.resize}, crop {manifest.input.crop}",
        "folder": str(model.path),
        "seconds": f"{seconds:.1f}",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, value in rows.items():
        table.add_row(title, value)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    if manifest.source.startswith("random:"):
        console.print("The weights are random: labels mean nothing, timings do.")
