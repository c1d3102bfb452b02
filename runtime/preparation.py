"""`cicada prepare`: shows what `models.preparation` does, and gives up cleanly on a signal."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from models import catalog, own, preparation, pretrained
from models.download import OnProgress
from models.errors import ModelError
from models.manifest import Granularity, InputSpec, Manifest, TensorSpec, WeightFormat
from models.preparation import Options, Source
from models.store import PreparedModel, Store, StoreError
from runtime import limits
from runtime.facts import execution_facts

_ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


class NotAllPrepared(ModelError):
    """Of several models, some could not be prepared."""


def prepare(
    weights: Path,
    name: str,
    *,
    architecture: str | None,
    checkpoint: Path | None,
    key: str | None,
    seed: int | None,
    pretrained: str | None,
    granularity: Granularity,
    weight_format: WeightFormat,
    optimize: bool,
    options: Options,
    factory: str | None = None,
    kwargs: str | None = None,
    example: str | None = None,
    processing: str | None = None,
) -> None:
    """Prepares a model from the one source given. Raises ModelError and OSError."""
    started_ns = time.monotonic_ns()
    store = Store(weights)
    store.check_name(name)
    with _termination_as_exit():
        if factory is None:
            source = _source(
                name, architecture, granularity, checkpoint, key, seed, pretrained, options
            )
        else:
            source = preparation.from_factory(
                factory,
                own.keywords(kwargs),
                example or "",
                granularity,
                checkpoint_file=checkpoint,
                key=key,
                seed=seed,
                labels_file=options.labels,
            )
        if processing is not None:
            source = preparation.with_processing(source, processing)
        if optimize:
            source = _optimized(name, source, weight_format)
        with _progress(name, source.bytes) as advance:
            model = preparation.prepare(store, name, source, weight_format, advance)
    _print_findings(source)
    _print_summary(model, options, (time.monotonic_ns() - started_ns) / 1e9)


def prepare_all_pretrained(
    weights: Path,
    *,
    granularity: Granularity,
    weight_format: WeightFormat,
    optimize: bool,
    options: Options,
) -> None:
    """Prepares the paper's models with torchvision's weights, except those that are so already.

    Raises NotAllPrepared in the end, if one could not be prepared.
    """
    store = Store(weights)
    failed = []
    console = _console()
    for name in catalog.PAPER:
        if _is_prepared(store, name, granularity, weight_format, optimize, options):
            console.print(f"{name}: prepared already")
            continue
        try:
            with _termination_as_exit():
                model = _prepare_pretrained(
                    store, name, granularity, weight_format, optimize, options
                )
        except (ModelError, OSError) as error:
            print(f"cicada: {name}: {_sentence(error)}", file=sys.stderr)  # noqa: T201
            failed.append(name)
        else:
            console.print(f"{name}: prepared, {decimal(model.bytes)}, version {model.version}")
    if failed:
        raise NotAllPrepared(
            f"{len(failed)} of {len(catalog.PAPER)} models are not prepared: {', '.join(failed)}; "
            "the same command goes on with them"
        )


def _sentence(error: ModelError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _prepare_pretrained(
    store: Store,
    name: str,
    granularity: Granularity,
    weight_format: WeightFormat,
    optimize: bool,
    options: Options,
) -> PreparedModel:
    store.check_name(name)
    with _download_progress(name) as on_download:
        source = preparation.from_torchvision("DEFAULT", name, granularity, options, on_download)
    if optimize:
        source = _optimized(name, source, weight_format)
    with _progress(name, source.bytes) as advance:
        return preparation.prepare(store, name, source, weight_format, advance)


def _is_prepared(
    store: Store,
    name: str,
    granularity: Granularity,
    weight_format: WeightFormat,
    optimize: bool,
    options: Options,
) -> bool:
    """Whether the store has just that, and its files are whole."""
    try:
        manifest = store.open(name).manifest
    except StoreError:
        return False
    wanted = (
        f"pretrained:{pretrained.weights(name).name}",
        granularity,
        weight_format,
        options.dtype,
    )
    found = (manifest.source, manifest.granularity, manifest.weight_format, manifest.dtype)
    is_optimized = manifest.optimization is not None
    return found == wanted and is_optimized == optimize and not store.verify(name)


def _source(
    name: str,
    architecture: str | None,
    granularity: Granularity,
    checkpoint: Path | None,
    key: str | None,
    seed: int | None,
    pretrained: str | None,
    options: Options,
) -> Source:
    if checkpoint is not None:
        known = architecture or (name if name in catalog.NAMES else None)
        return preparation.from_checkpoint(checkpoint, known, granularity, key, options)
    if seed is not None:
        return preparation.from_seed(seed, architecture or name, granularity, options)
    if pretrained is not None:
        with _download_progress(name) as on_download:
            return preparation.from_torchvision(
                pretrained, architecture or name, granularity, options, on_download
            )
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
    """SIGTERM, and a terminal that is closed, unwind as Ctrl-C does, so that nothing half-written stays."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line anywhere else."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"preparing {name}: {decimal(total_bytes)}", highlight=False)
        yield lambda _: None
        return
    with _bar(console) as progress:
        task = progress.add_task(f"preparing {name}", total=total_bytes)
        yield lambda written: progress.advance(task, written)


@contextmanager
def _download_progress(name: str) -> Iterator[OnProgress]:
    """The same of a download, once there is one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Announcement(console, name)
        return
    with _bar(console) as progress:
        task = progress.add_task(f"downloading {name}", total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


class _Announcement:
    """Says once that a download began, and from where."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._said = False

    def __call__(self, done: int, total: int | None) -> None:
        if self._said:
            return
        self._said = True
        size = "" if total is None else f": {decimal(total)}"
        continued = f", {decimal(done)} are there" if done else ""
        self._console.print(f"downloading {self._name}{size}{continued}", highlight=False)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _print_findings(source: Source) -> None:
    for sentence in source.findings.sentences():
        print(f"cicada: {sentence}", file=sys.stderr)  # noqa: T201 - beside the summary


def _taken(manifest: Manifest) -> dict[str, str]:
    """What the model takes, in words."""
    rows = {}
    if manifest.input is not None:
        rows["preset"] = f"{manifest.preset}: {_resizing(manifest.input)}"
        rows["normalize"] = _normalizing(manifest.input)
    if manifest.factory is not None:
        rows["factory"] = manifest.factory.target
        rows["inputs"] = _described(manifest.inputs)
        rows["outputs"] = _described(manifest.outputs)
    if manifest.processing is not None:
        rows["processing"] = manifest.processing.target
    return rows


def _described(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {list(spec.shape)} {spec.dtype}" for spec in specs)


def _print_summary(model: PreparedModel, options: Options, seconds: float) -> None:
    manifest = model.manifest
    rows = {
        "model": model.name,
        "version": model.version,
        "architecture": manifest.architecture,
        "classes": str(manifest.classes) if manifest.classes else "none",
        "labels": _labels(model, options),
        "layers": f"{len(manifest.layers)}, by {manifest.granularity}",
        "files": f"{sum(layer.file is not None for layer in manifest.layers)}, {manifest.weight_format}",
        "dtype": _dtype(manifest),
        "size": f"{decimal(model.bytes)} ({model.bytes} bytes)",
        "source": manifest.source,
        **execution_facts(manifest.optimization),
        **_taken(manifest),
        "folder": str(model.path),
        "seconds": f"{seconds:.1f}",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, value in rows.items():
        table.add_row(title, value)
    console = _console()
    console.print(table)
    if manifest.source.startswith("random:"):
        console.print("The weights are random: labels mean nothing, timings do.")


def _labels(model: PreparedModel, options: Options) -> str:
    if options.labels is not None:
        return f"from {options.labels.name}"
    return "torchvision's categories" if model.labels else "none, classes have numbers only"


def _dtype(manifest: Manifest) -> str:
    if not manifest.found_dtypes:
        return manifest.dtype
    return f"{manifest.dtype}, converted from {', '.join(manifest.found_dtypes)}"


def _resizing(spec: InputSpec) -> str:
    resize = spec.resize if isinstance(spec.resize, int) else "x".join(map(str, spec.resize))
    return f"resize {resize}, crop {spec.crop}, {spec.interpolation}"


def _normalizing(spec: InputSpec) -> str:
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (spec.mean, spec.std))
    return f"mean {mean}, std {std}"


def _console() -> Console:
    return Console(highlight=False, markup=False, soft_wrap=True)
