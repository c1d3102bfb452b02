"""A handler's memory during one request of each strategy and setup, which the paper does not show."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from rich.progress import Progress

from bench import plots
from bench.latency import ServedVariant, random_input
from bench.memory import REST_S, MemorySampler, Sample, anonymous_bytes
from bench.paper import stores
from bench.paper.choices import SETUPS, Run, Setup
from bench.paper.journal import Journal
from bench.paper.material import Material
from bench.paper.part import Part, Plot, Sheet, Shown, number
from bench.paper.published import STRATEGIES
from bench.worker import Worker, starters
from handler.timeline import now_ns

_POINTS: Final = 100
_MB: Final = 1e6
_MS: Final = 1e6
_AT_ONCE: Final = 4


def measure(run: Run, journal: Journal, progress: Progress) -> None:
    models = [model for model in run.choices.memory_models if model not in journal]
    task = progress.add_task("memory over time", total=len(models))
    if models:
        with ExitStack() as stack:
            workers = _workers(run, stack)
            for model in models:
                progress.update(task, description=f"memory over time: {model}")
                journal.add(model, _model(model, workers))
                progress.advance(task)
    progress.remove_task(task)


def _workers(run: Run, stack: ExitStack) -> list[tuple[Setup, str, Worker]]:
    kinds = [(setup, strategy) for setup in SETUPS for strategy in STRATEGIES]

    def started(kind: tuple[Setup, str]) -> tuple[Setup, str, Worker]:
        root = stores.store(run, kind[0]).root
        return *kind, stack.enter_context(Worker.handler(root, run.choices.threads))

    pool = stack.enter_context(starters(_AT_ONCE))
    return list(pool.map(started, kinds))


def _model(model: str, workers: Sequence[tuple[Setup, str, Worker]]) -> dict[str, Any]:
    """After a first request each, which brings the plan in, all handlers come to rest."""
    for setup, _, worker in workers:
        _variant(setup, "cicada", worker, model).run(random_input())
    time.sleep(REST_S)
    return {
        "model": model,
        "requests": [
            _sampled(setup, _variant(setup, strategy, worker, model))
            for setup, strategy, worker in workers
        ],
    }


def _variant(setup: Setup, strategy: str, worker: Worker, model: str) -> ServedVariant:
    return ServedVariant(
        name=strategy,
        format=setup.weight_format,
        granularity=setup.granularity,
        worker=worker,
        model=model,
        strategy=strategy,
    )


def _sampled(setup: Setup, variant: ServedVariant) -> dict[str, Any]:
    process = psutil.Process(variant.worker.pid)
    before = process.memory_info()
    start = now_ns()
    with MemorySampler(variant.worker.pid) as sampler:
        variant.run(random_input())
        answered_ms = (now_ns() - start) / _MS
    peak = max(sampler.peak, anonymous_bytes(process))
    return {
        "setup": setup.name,
        "strategy": variant.name,
        "answered_ms": answered_ms,
        "before_mb": {
            "anonymous": (before.rss - before.shared) / _MB,
            "file_backed": before.shared / _MB,
        },
        "peak_anonymous_mb": peak / _MB,
        "peak_resident_mb": max(
            (sample.anonymous + sample.file_backed for sample in sampler.samples), default=peak
        )
        / _MB,
        "samples": [
            (
                round((sample.at_ns - start) / _MS, 2),
                round(sample.anonymous / _MB, 2),
                round(sample.file_backed / _MB, 2),
            )
            for sample in _thinned(sampler.samples)
        ],
    }


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    step = -(-len(samples) // _POINTS) or 1
    return [*samples[::step], *samples[-1:]]


def part(material: Material, described: str) -> Part:
    rows = [_row(one["model"], request) for one in material.memory for request in one["requests"]]
    return Part(
        title="Memory over time",
        sentences=[
            (
                "A handler's private (anonymous) and file-backed resident memory during one request, "
                "sampled every half millisecond; the level before is that of a handler at rest. Mapped "
                "weights are file pages, which all handlers share and the kernel may drop; pth files "
                "become private memory."
            ),
        ],
        tables=[_table(rows)],
        plots=[
            Plot(
                f"memory_over_time_{one['model']}",
                f"{one['model']}: private memory (upper) and file-backed (lower).",
                partial(_draw, one, described),
            )
            for one in material.memory
        ],
        sheets=[
            Sheet("memory_peaks", rows),
            Sheet("memory_over_time", list(_points(material))),
        ],
    )


def _row(model: str, request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "setup": request["setup"],
        "strategy": request["strategy"],
        "at_rest_mb": request["before_mb"]["anonymous"],
        "private_rise_mb": request["peak_anonymous_mb"] - request["before_mb"]["anonymous"],
        "peak_resident_mb": request["peak_resident_mb"],
        "answered_ms": request["answered_ms"],
    }


def _points(material: Material) -> Iterator[dict[str, Any]]:
    for one in material.memory:
        for request in one["requests"]:
            for at_ms, anonymous, file_backed in request["samples"]:
                yield {
                    "model": one["model"],
                    "setup": request["setup"],
                    "strategy": request["strategy"],
                    "at_ms": at_ms,
                    "anonymous_mb": anonymous,
                    "file_backed_mb": file_backed,
                    "resident_mb": round(anonymous + file_backed, 2),
                }


def _table(rows: Sequence[Mapping[str, Any]]) -> Shown:
    shown = [
        [
            f"{row['model']}, {row['setup']}",
            row["strategy"],
            number(row["at_rest_mb"]),
            number(row["private_rise_mb"]),
            number(row["peak_resident_mb"]),
        ]
        for row in rows
    ]
    header = [
        *("model, setup", "strategy", "private at rest, MB"),
        *("private, rise in the request, MB", "resident at its highest, MB"),
    ]
    return Shown("One request each.", header, shown)


def _draw(one: Mapping[str, Any], described: str, stem: Path) -> None:
    with plots.figure(stem, 9, 4.4, described, nrows=2, ncols=2, sharey="row") as (_, panels):
        for column, setup in enumerate(SETUPS):
            for index, strategy in enumerate(STRATEGIES):
                request = next(
                    request
                    for request in one["requests"]
                    if (request["setup"], request["strategy"]) == (setup.name, strategy)
                )
                times = [sample[0] for sample in request["samples"]]
                for row in (0, 1):
                    panels[row][column].plot(
                        times,
                        [sample[row + 1] for sample in request["samples"]],
                        color=plots.COLOURS[index],
                        ls=plots.DASHES[index],
                        lw=1.2,
                        label=strategy,
                    )
            panels[0][column].set_title(setup.title)
            panels[1][column].set_xlabel("ms since the request was sent")
        panels[0][0].set_ylabel("private, MB")
        panels[1][0].set_ylabel("file-backed, MB")
        panels[0][1].legend(fontsize=8)
