"""`cicada bench preparation`: the memory of the process that prepares a checkpoint, beside the file's size."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from rich.console import Console
from rich.table import Table

from bench import environment
from models import catalog
from models.errors import ModelError
from models.random_weights import RandomWeights


def _save_legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def _beside_training(weights: dict[str, torch.Tensor]) -> dict[str, object]:
    """What a training script saves, with the optimizer's momentum of every parameter."""
    parameters = dict(enumerate(weights.values()))
    momentum = {number: {"momentum_buffer": weight / 2} for number, weight in parameters.items()}
    groups = [{"lr": 0.1, "momentum": 0.9, "params": list(parameters)}]
    return {"model": weights, "optimizer": {"state": momentum, "param_groups": groups}, "epoch": 3}


FORMATS: Final[dict[str, Callable[[dict[str, torch.Tensor], Path], None]]] = {
    "zip": torch.save,
    "legacy": _save_legacy,
    "safetensors": safetensors.torch.save_file,
    "training": lambda weights, path: torch.save(_beside_training(weights), path),
    "training-legacy": lambda weights, path: _save_legacy(_beside_training(weights), path),
}
"""How the checkpoint is saved: torch.save since torch 1.6, before it, and the safetensors library; and the
first two beside an optimizer's state."""

ALLOWED_MB: Final = 200.0
"""What preparation may take beyond the file's own size; beyond what its imports take, where that is more."""

_DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_SAMPLE_S: Final = 0.002
_SIZE: Final = re.compile(r"^(VmHWM|RssAnon|RssFile):\s+(\d+) kB$", re.MULTILINE)
_WIDTH: Final = 120
_SEED: Final = 0
_MB: Final = 1e6
_IMPORTS: Final = ("-c", "import runtime.preparation, torch._dynamo")
"""torch imports its compiler when it computes shapes, as preparation does for the memory of activations."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one process's resident memory, megabytes (10^6 bytes): all of it, as the kernel keeps its highest
    mark; and, sampled, its anonymous pages and those of mapped files, libraries included."""

    resident_mb: float
    anonymous_mb: float
    mapped_mb: float


@dataclass(frozen=True, slots=True)
class Row:
    """imports: a process that only imports what `cicada prepare` imports, torch above all."""

    model: str
    format: str
    dtype: str
    file_mb: float
    imports: Peak
    preparing: Peak

    @property
    def beyond_imports_mb(self) -> float:
        return self.preparing.resident_mb - self.imports.resident_mb

    @property
    def bound_mb(self) -> float:
        return max(self.file_mb, self.imports.resident_mb) + ALLOWED_MB

    @property
    def is_bounded(self) -> bool:
        return self.preparing.resident_mb <= self.bound_mb


@dataclass(frozen=True, slots=True)
class Options:
    models: Sequence[str]
    formats: Sequence[str]
    dtypes: Sequence[str]
    folder: Path | None


class UnknownFormat(ModelError):
    """No way to save a checkpoint has that name."""


def options(
    models: Sequence[str], formats: Sequence[str], dtypes: Sequence[str], folder: Path | None
) -> Options:
    """Raises UnknownArchitecture, UnknownFormat."""
    for model in models:
        catalog.architecture(model)
    for kind, known, given in (("format", FORMATS, formats), ("dtype", _DTYPES, dtypes)):
        for name in given:
            if name not in known:
                raise UnknownFormat(f"there is no {kind} {name!r}: known are {', '.join(known)}")
    return Options(models, formats, dtypes, folder)


def measure(options: Options) -> Iterator[Row]:
    imports = peak_of(_IMPORTS)
    for model in options.models:
        for dtype in options.dtypes:
            for name in options.formats:
                yield _measure_file(model, name, dtype, imports, options.folder)


def _measure_file(model: str, name: str, dtype: str, imports: Peak, folder: Path | None) -> Row:
    with tempfile.TemporaryDirectory(prefix="cicada-bench-", dir=folder) as made:
        file = Path(made) / "checkpoint"
        _write(file, model, name, dtype)
        words = ("prepare", model, "--checkpoint", str(file), "--weights", f"{made}/weights")
        preparing = peak_of(("-m", "runtime.cli", *words))
        return Row(model, name, dtype, file.stat().st_size / _MB, imports, preparing)


def _write(file: Path, model: str, name: str, dtype: str) -> None:
    found = _DTYPES[dtype]
    weights = RandomWeights(catalog.architecture(model), _SEED)
    FORMATS[name](
        {key: t.to(found) if t.is_floating_point() else t for key, t in weights.items()}, file
    )


def peak_of(arguments: Sequence[str]) -> Peak:
    """Runs Python with these arguments. Raises CalledProcessError if it fails."""
    command = [sys.executable, *arguments]
    peak = Peak(0, 0, 0)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = _higher(peak, process.pid)
            time.sleep(_SAMPLE_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def _higher(peak: Peak, pid: int) -> Peak:
    """The peak with what /proc/PID/status says now (proc(5)), kilobytes there.

    Not wait4's ru_maxrss: it counts the parent's memory too, which the child has until it executes.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    found = {title: int(size) * 1024 / _MB for title, size in _SIZE.findall(status)}
    if not found:  # ended, and not yet waited for
        return peak
    return Peak(
        max(peak.resident_mb, found["VmHWM"]),
        max(peak.anonymous_mb, found["RssAnon"]),
        max(peak.mapped_mb, found["RssFile"]),
    )


def run(options: Options, json_file: Path | None) -> None:
    """Measures, prints the table and writes the figures."""
    described = environment.describe(1, " ".join(["cicada", *sys.argv[1:]]))
    rows = list(measure(options))
    if json_file is not None:
        content = {"environment": described, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    Console(highlight=False, width=_WIDTH).print(_table(rows))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("model", "format", "dtype"):
        table.add_column(title)
    for title in ("file", "imports", "peak", "bound", "beyond imports", "anonymous", "mapped"):
        table.add_column(f"{title}, MB", justify="right")
    for row in rows:
        peak = row.preparing
        figures = (
            row.file_mb,
            row.imports.resident_mb,
            peak.resident_mb,
            row.bound_mb,
            row.beyond_imports_mb,
            peak.anonymous_mb,
            peak.mapped_mb,
        )
        table.add_row(row.model, row.format, row.dtype, *(f"{figure:.0f}" for figure in figures))
    return table
