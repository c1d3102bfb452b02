"""The models, prepared once for all sections: a store for each setup, and the floors' checkpoints."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from rich.progress import Progress

from bench import checkpoints, latency
from bench.latency import RESIDENT
from bench.paper.choices import SETUPS, Run, Setup
from bench.worker import Worker
from handler import wire
from models import preparation
from models.store import PreparedModel, Store, UnknownModel

SEED: Final = 0
SIDE: Final = 224


def store(run: Run, setup: Setup) -> Store:
    return Store(run.stores / setup.name)


def prepared(run: Run, setup: Setup, model: str) -> PreparedModel:
    return store(run, setup).open(model)


def prepare(run: Run, models: Iterable[str], progress: Progress) -> None:
    """Makes what is not there yet."""
    missing = list(_missing(run, dict.fromkeys(models)))
    task = progress.add_task("prepare models", total=len(missing))
    for setup, model in missing:
        progress.update(task, description=f"prepare {model}, {setup.weight_format}")
        source = preparation.from_seed(SEED, model, setup.granularity)
        preparation.prepare(store(run, setup), model, source, setup.weight_format)
        progress.advance(task)
    progress.remove_task(task)


def _missing(run: Run, models: Iterable[str]) -> Iterator[tuple[Setup, str]]:
    for setup in SETUPS:
        for model in models:
            try:
                prepared(run, setup, model)
            except UnknownModel:
                yield setup, model


@dataclass(frozen=True, slots=True)
class Floor:
    """torchvision's models kept in memory, all in one process: a forward pass per request."""

    worker: Worker

    def run(self, model: str) -> float:
        """Milliseconds."""
        header: wire.Header = {
            "type": "infer",
            "architecture": model,
            "input": {"shape": [1, 3, SIDE, SIDE]},
        }
        answer, _ = self.worker.exchange(header, latency.random_input())
        duration: float = answer["duration_ms"]
        return duration


def floor(run: Run, models: Sequence[str], stack: ExitStack) -> Floor:
    """Each checkpoint is made, loaded by a first request, and removed again."""
    made = run.stores / "checkpoints"
    found: Floor | None = None
    for model in models:
        shutil.rmtree(made, ignore_errors=True)  # of a run that was interrupted
        checkpoints.write_pth(made, model, SEED)
        if found is None:
            one = latency.stand_in(
                RESIDENT, "bench.resident", model, made, run.choices.threads, stack
            )
            found = Floor(one.worker)
        found.run(model)
        shutil.rmtree(made)
    if found is None:
        raise ValueError("no model was chosen")
    return found
