"""`cicada bench paper`: measures what is missing, then writes the report."""

import math
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import environment, latency, plots
from bench.paper import (
    cold,
    density,
    memory_over_time,
    motivation,
    published,
    replays,
    report,
    requests,
    stores,
)
from bench.paper.choices import QUICK_MODELS, SETUPS, Choices, Run
from bench.paper.journal import Journal, claim
from bench.paper.material import Material
from bench.replay import trace
from bench.replay.command import prepare_source
from bench.replay.synthetic import Shape
from bench.replay.trace import Arrival, Window
from models import catalog
from models.errors import ModelError

_SECTIONS: Final = ("density", "motivation", "memory", "requests", "replays", "cold")


_NONE: Final = "none"
_PROCESSES_BYTES: Final = 7 << 30
"""Of ten services with a handler each: what Python and torch take."""


class TooLittle(ModelError):
    """The machine has not the memory for what was chosen."""


def choices(
    *,
    quick: bool,
    models: Sequence[str] | None,
    rounds: int | None,
    threads: int | None,
    trace_file: Path | None,
    window: Window,
    replay_strategies: Sequence[str] | None,
    replay_minutes: int | None,
    replay_speedup: float | None,
    density_models: Sequence[str] | None,
    memory_limit_gb: float,
    cold_models: Sequence[str] | None,
    cold_rounds: int | None,
    disk_mb_per_s: float,
) -> Choices:
    """What was not chosen is as the paper has it, or quick. Raises UnknownChoice."""
    chosen = latency.known_models(models or (QUICK_MODELS if quick else ["paper"]))
    several = [model for model in QUICK_MODELS if model in chosen] or chosen[:1]
    return Choices(
        models=chosen,
        rounds=rounds or (2 if quick else 10),
        threads=latency.threads_or_all(threads),
        trace=None if trace_file is None else str(trace_file.resolve()),
        window=window,
        shape=Shape(),
        seed=0,
        replay_strategies=latency.known_strategies(
            replay_strategies or (["pisel", "cicada"] if quick else published.STRATEGIES)
        ),
        replay_minutes=replay_minutes or (1 if quick else 5),
        replay_speedup=replay_speedup or (2.0 if quick else 1.0),
        density_models=_some(density_models, several[:1] if quick else several),
        memory_limit=int(memory_limit_gb * 1e9),
        cold_models=_some(cold_models, several[:1] if quick else chosen),
        cold_rounds=cold_rounds or (1 if quick else 5),
        disk_bytes_per_s=int(disk_mb_per_s * 1e6),
    )


def _some(given: Sequence[str] | None, usual: Sequence[str]) -> Sequence[str]:
    """Models of a section that may be left out. Raises UnknownChoice."""
    return [] if given == [_NONE] else latency.known_models(given or usual)


def run(chosen: Choices, folder: Path, stores_folder: Path | None, trace_file: Path | None) -> None:
    """Raises ModelError, OSError."""
    plots.require()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # control groups are removed then too
    folder.mkdir(parents=True, exist_ok=True)
    one = Run(chosen, folder, (stores_folder or folder) / "stores", trace_file)
    _require_memory(chosen)
    source = prepare_source(trace_file, chosen.shape, chosen.window, folder)
    arrivals = trace.arrivals(trace.read(source.path), chosen.window)
    one.journals.mkdir(exist_ok=True)
    journals = {name: Journal(one.journals / f"{name}.jsonl") for name in _SECTIONS}
    missing = _missing(chosen, arrivals, journals)
    described = environment.describe(chosen.threads, " ".join(["cicada", *sys.argv[1:]]))
    sessions = claim(folder / "run.json", asdict(chosen), described if missing else None)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        if missing:
            _measure(one, arrivals, journals, missing, progress)
        task = progress.add_task("report", total=None)
        material = Material(
            run=one,
            sessions=sessions,
            arrivals=arrivals,
            trace_name=source.name,
            construction=_data(journals["motivation"]),
            rounds=_data(journals["requests"]),
            memory=_data(journals["memory"]),
            density=_data(journals["density"]),
            replays=_data(journals["replays"]),
            cold=_data(journals["cold"]),
        )
        page = report.write(material)
        progress.remove_task(task)
    shutil.rmtree(one.stores, ignore_errors=True)
    console.print(f"The report is {page}.", highlight=False)


def _measure(
    one: Run,
    arrivals: Sequence[Arrival],
    journals: dict[str, Journal],
    missing: Sequence[str],
    progress: Progress,
) -> None:
    """Section by section; what a journal has is not measured again."""
    one.stores.mkdir(parents=True, exist_ok=True)
    stores.prepare(one, _models_of(one.choices, missing), progress)
    density.measure(one, journals["density"], progress)
    motivation.measure(one, journals["motivation"], progress)
    memory_over_time.measure(one, journals["memory"], progress)
    requests.measure(one, arrivals, journals["requests"], progress)
    replays.measure(one, arrivals, journals["replays"], progress)
    cold.measure(one, journals["cold"], progress)


def _missing(
    chosen: Choices, arrivals: Sequence[Arrival], journals: dict[str, Journal]
) -> list[str]:
    """The sections of which something is not measured yet."""
    cells = len(SETUPS) * len(published.STRATEGIES)
    whole = {
        "density": cells * len(chosen.density_models),
        "motivation": len(chosen.models),
        "memory": len(chosen.memory_models),
        "requests": len(requests.planned(chosen, arrivals)),
        "replays": len(chosen.replay_strategies),
        "cold": len(cold.DISKS) * chosen.cold_rounds * len(chosen.cold_models),
    }
    return [name for name, steps in whole.items() if len(journals[name]) < steps]


def _models_of(chosen: Choices, sections: Sequence[str]) -> list[str]:
    """The models whose files these sections need."""
    own = {"density": chosen.density_models, "cold": chosen.cold_models, "motivation": ()}
    return [model for section in sections for model in own.get(section, chosen.models)]


def _data(journal: Journal) -> list[Any]:
    return list(journal.steps.values())


def _require_memory(chosen: Choices) -> None:
    """All models are resident at once. Whether their files stayed in the page cache the report tells."""
    needed = sum(_approximate_bytes(model) for model in chosen.models) + _PROCESSES_BYTES
    available = psutil.virtual_memory().available
    if needed > available:
        raise TooLittle(
            f"{len(chosen.models)} models need about {needed / 1e9:.0f} GB of memory, resident and in "
            f"the handlers' requests; {available / 1e9:.0f} GB are available: choose fewer"
        )


def _approximate_bytes(model: str) -> int:
    return sum(
        place.dtype.itemsize * math.prod(place.shape)
        for layer in catalog.architecture(model).layers
        for place in layer.tensors
    )
