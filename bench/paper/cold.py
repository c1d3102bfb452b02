"""Cold storage: the page cache dropped before every request, and a slower disk beside; the scheduler on and off.

Straight to handler processes, since the product has no switch for the scheduler (`bench.paper.variant` has).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from rich.progress import Progress

from bench import control_groups, page_cache, plots
from bench.control_groups import NotAllowed
from bench.latency import DirectRead, random_input
from bench.paper import estimates, stores
from bench.paper.choices import OURS, SETUPS, Run, Setup
from bench.paper.estimates import Estimate
from bench.paper.journal import Journal
from bench.paper.material import Material
from bench.paper.part import Part, Plot, Sheet, Shown, change, number
from bench.paper.published import STRATEGIES
from bench.settling import settle
from bench.worker import Worker, starters
from handler.strategies import STRATEGIES as KNOWN
from handler.timeline import now_ns

Disk = Literal["as it is", "limited"]
DISKS: Final[tuple[Disk, ...]] = ("as it is", "limited")
_SHAPE: Final = (1, 3, 224, 224)
_STARTED_AT_ONCE: Final = 4
_MS: Final = 1e6


@dataclass(frozen=True, slots=True)
class Limit:
    """How a disk is limited: arguments for the variant, and in words."""

    arguments: tuple[str, ...]
    described: str


@dataclass(frozen=True, slots=True)
class Contender:
    setup: Setup
    strategy: str
    scheduler: bool
    worker: Worker


def measure(run: Run, journal: Journal, progress: Progress) -> None:
    task = progress.add_task("cold", total=len(list(_steps(run))))
    for disk in DISKS:
        steps = [step for step in _steps(run) if step[1] == disk]
        pending = [step for step in steps if step[0] not in journal]
        progress.advance(task, len(steps) - len(pending))
        if not pending:
            continue
        with ExitStack() as stack:
            limit = _limit(run, disk, stack)
            contenders = _contenders(run, limit, stack)
            _warm_up(contenders, dict.fromkeys(model for _, _, model in pending))
            for name, _, model in pending:
                progress.update(task, description=f"cold: {name}")
                told = _round(run, model, contenders, len(journal))
                journal.add(name, {"disk": disk, "limit": limit.described, **told})
                progress.advance(task)
    progress.remove_task(task)


def _steps(run: Run) -> Iterator[tuple[str, Disk, str]]:
    for disk in DISKS:
        for count in range(1, run.choices.cold_rounds + 1):
            for model in run.choices.cold_models:
                yield f"{model}, disk {disk}, round {count}", disk, model


def _limit(run: Run, disk: Disk, stack: ExitStack) -> Limit:
    """A control group where it may be made; else our own throttled retrieval source."""
    if disk == "as it is":
        return Limit((), "none")
    wanted = run.choices.disk_bytes_per_s
    try:
        group = stack.enter_context(control_groups.read_limited(run.stores, wanted))
    except NotAllowed as error:
        return Limit(
            ("--bytes-per-s", str(wanted)),
            f"our own throttled retrieval source, {wanted / 1e6:.0f} MB/s for all files of a "
            f"request together (no control group: {error})",
        )
    return Limit(("--group", str(group.folder)), f"control group, {group.setting}")


def _contenders(run: Run, limit: Limit, stack: ExitStack) -> list[Contender]:
    kinds = [
        (setup, strategy, scheduler)
        for setup in SETUPS
        for strategy in STRATEGIES
        for scheduler in ((True, False) if KNOWN[strategy].decoupled else (True,))
    ]

    def started(kind: tuple[Setup, str, bool]) -> Contender:
        setup, strategy, scheduler = kind
        arguments = [
            *limit.arguments,
            *("--scheduler", "on" if scheduler else "off", "--"),
            *("--weights", str(stores.store(run, setup).root)),
            *("--threads", str(run.choices.threads)),
        ]
        worker = stack.enter_context(Worker("bench.paper.entry", arguments))
        return Contender(setup, strategy, scheduler, worker)

    pool = stack.enter_context(starters(_STARTED_AT_ONCE))
    return list(pool.map(started, kinds))


def _warm_up(contenders: Sequence[Contender], models: dict[str, None]) -> None:
    """Plans and processes, not files: those are dropped before each request."""
    for contender in contenders:
        for model in models:
            _ask(contender.worker, model, "cicada")


def _round(run: Run, model: str, contenders: Sequence[Contender], number: int) -> dict[str, Any]:
    first = number % len(contenders)
    return {
        "model": model,
        "direct_read_ms": _direct_read(run, model),
        "requests": [
            _cold(run, model, contender) for contender in [*contenders[first:], *contenders[:first]]
        ],
    }


def _direct_read(run: Run, model: str) -> float:
    """Reading the files past the page cache, without a limit."""
    prepared = stores.prepared(run, OURS, model)
    return DirectRead(sorted(prepared.path.glob("*.safetensors"))).run(b"")


def _cold(run: Run, model: str, contender: Contender) -> dict[str, Any]:
    settle()
    page_cache.make_cold(stores.prepared(run, contender.setup, model).path)
    ms, header = _ask(contender.worker, model, contender.strategy)
    figures = header["timeline"]["figures"]
    return {
        "setup": contender.setup.name,
        "strategy": contender.strategy,
        "scheduler": contender.scheduler,
        "ms": ms,
        "pipeline_ms": figures["pipeline_ms"],
        "retrieve_ms": figures["retrieve_ms"],
        "execute_ms": figures["execute_ms"],
        "compute_wait_ms": figures["wait_ms"]["compute"],
        "first_execution_ms": _first_execution(header["timeline"]),
        "suspensions": len(header["timeline"]["suspensions"]),
        "suspended_ms": sum(end - start for _, start, end in header["timeline"]["suspensions"])
        / _MS,
    }


def _ask(worker: Worker, model: str, strategy: str) -> tuple[float, dict[str, Any]]:
    """From the request's frame to its answer's, milliseconds, and the answer's header."""
    described = {"kind": "tensor", "datatype": "FP32", "shape": list(_SHAPE)}
    start = now_ns()
    header, _ = worker.infer(model, strategy, described, random_input())
    return (now_ns() - start) / _MS, header


def _first_execution(timeline: dict[str, Any]) -> float:
    """From the request's arrival to the first layer's execution, milliseconds."""
    first: int = min(start for _, kind, start, _ in timeline["spans"] if kind == "execute")
    arrival: int = timeline["arrival_ns"]
    return (first - arrival) / _MS


VARIANTS: Final = tuple(
    (strategy, scheduler)
    for strategy in STRATEGIES
    for scheduler in ((True, False) if KNOWN[strategy].decoupled else (True,))
)
_COMPARED: Final = (
    ("preload", "pisel"),
    ("mini", "pisel"),
    ("cicada", "pisel"),
    ("cicada", "mini"),
    ("cicada", "preload"),
)
COLD: Final = "cold: the model's files dropped from the page cache before each request"


def part(material: Material, described: str) -> Part:
    rows = list(_rows(material))
    scheduling = list(_scheduling(material))
    means = list(_means(material))
    limits = dict.fromkeys(one["limit"] for one in material.cold if one["disk"] == "limited")
    return Part(
        title="Cold storage, and the scheduler",
        sentences=[
            (
                "The model's files are dropped from the page cache before every request; straight to "
                "handler processes, from the request's frame to its answer. The same once more from a "
                f"slower disk: {', '.join(limits) or 'not measured'}."
            ),
            (
                "Preload and cicada run with the priority-aware scheduler and without. It can only hold "
                "back a retrieval that runs beside a later-than-expected needed one, at 4 MiB chunks."
            ),
        ],
        tables=[
            *(_table(disk, rows) for disk in DISKS),
            _means_table(means),
            _scheduling_table(scheduling),
        ],
        plots=[
            Plot(
                f"cold_{setup.name}",
                f"Cold requests, {setup.title}: the disk as it is, and limited. Hatched: scheduler off.",
                partial(_draw, setup, rows, described),
            )
            for setup in SETUPS
        ],
        sheets=[
            Sheet("cold", rows, COLD),
            Sheet("cold_reductions", means, COLD),
            Sheet("cold_scheduler", scheduling, COLD),
        ],
    )


def _values(
    material: Material, disk: str, model: str, setup: Setup, variant: tuple[str, bool], name: str
) -> list[float]:
    return [
        float(request[name])
        for one in material.cold
        if (one["disk"], one["model"]) == (disk, model)
        for request in one["requests"]
        if request["setup"] == setup.name and (request["strategy"], request["scheduler"]) == variant
    ]


def _rows(material: Material) -> Iterator[dict[str, Any]]:
    for disk in DISKS:
        for setup in SETUPS:
            for model in material.run.choices.cold_models:
                direct = [
                    one["direct_read_ms"]
                    for one in material.cold
                    if (one["disk"], one["model"]) == (disk, model)
                ]
                pisel = _values(material, disk, model, setup, ("pisel", True), "ms")
                for variant in VARIANTS:
                    read = partial(_values, material, disk, model, setup, variant)
                    yield {
                        "disk": disk,
                        "setup": setup.name,
                        "model": model,
                        "strategy": variant[0],
                        "scheduler": variant[1],
                        "latency_ms": estimates.median(read("ms")),
                        "reduction_against_pisel": estimates.reduction(pisel, read("ms")),
                        "first_execution_ms": estimates.median(read("first_execution_ms")),
                        "retrieve_ms": estimates.median(read("retrieve_ms")),
                        "suspensions": sum(read("suspensions")) / len(read("suspensions")),
                        "suspended_ms": sum(read("suspended_ms")) / len(read("suspended_ms")),
                        "direct_read_ms": estimates.median(direct),
                    }


def _scheduling(material: Material) -> Iterator[dict[str, Any]]:
    """By how much the scheduler shortens a request, and the wait for its first execution."""
    for disk in DISKS:
        for setup in SETUPS:
            for model in material.run.choices.cold_models:
                for strategy in STRATEGIES:
                    if not KNOWN[strategy].decoupled:
                        continue
                    on = partial(_values, material, disk, model, setup, (strategy, True))
                    off = partial(_values, material, disk, model, setup, (strategy, False))
                    yield {
                        "disk": disk,
                        "setup": setup.name,
                        "model": model,
                        "strategy": strategy,
                        "latency": estimates.reduction(off("ms"), on("ms")),
                        "first_execution": estimates.reduction(
                            off("first_execution_ms"), on("first_execution_ms")
                        ),
                        "suspensions": sum(on("suspensions")) / len(on("suspensions")),
                    }


def mean_reduction(material: Material, disk: str, setup: Setup, base: str, other: str) -> Estimate:
    """Over the models, scheduler on."""
    return estimates.mean_reduction(
        [
            (
                _values(material, disk, model, setup, (base, True), "ms"),
                _values(material, disk, model, setup, (other, True), "ms"),
            )
            for model in material.run.choices.cold_models
        ]
    )


def _means(material: Material) -> Iterator[dict[str, Any]]:
    for setup in SETUPS:
        for strategy, base in _COMPARED:
            yield {
                "setup": setup.name,
                "strategy": strategy,
                "against": base,
                **{
                    f"disk_{disk.replace(' ', '_')}": mean_reduction(
                        material, disk, setup, base, strategy
                    )
                    for disk in DISKS
                },
            }


def _means_table(rows: Sequence[Mapping[str, Any]]) -> Shown:
    shown = [
        [
            f"{row['strategy']} against {row['against']}",
            row["setup"],
            *(_interval(row[f"disk_{disk.replace(' ', '_')}"]) for disk in DISKS),
        ]
        for row in rows
    ]
    header = ["latency", "setup", *(f"disk {disk}" for disk in DISKS)]
    return Shown(
        "Mean changes over these models, page cache dropped; negative is less.", header, shown
    )


def _name(strategy: str, scheduler: bool) -> str:
    return strategy if scheduler else f"{strategy}, scheduler off"


def _table(disk: str, rows: Sequence[Mapping[str, Any]]) -> Shown:
    theirs = [row for row in rows if row["disk"] == disk]
    shown = []
    for key in dict.fromkeys((row["model"], row["setup"]) for row in theirs):
        mine = {
            (row["strategy"], row["scheduler"]): row
            for row in theirs
            if (row["model"], row["setup"]) == key
        }
        direct = mine["cicada", True]["direct_read_ms"]
        shown.append(
            [
                ", ".join(key),
                *(number(mine[variant]["latency_ms"].median) for variant in VARIANTS),
                number(direct.median),
            ]
        )
    header = ["model, setup", *(_name(*variant) for variant in VARIANTS), "direct read, unlimited"]
    return Shown(f"Latency in ms, medians, page cache dropped, disk {disk}.", header, shown)


def _scheduling_table(rows: Sequence[Mapping[str, Any]]) -> Shown:
    shown = [
        [
            f"{row['model']}, {row['setup']}, disk {row['disk']}",
            row["strategy"],
            _interval(row["latency"]),
            _interval(row["first_execution"]),
            number(row["suspensions"]),
        ]
        for row in rows
    ]
    header = [
        *("model, setup, disk", "strategy", "latency, on against off"),
        *("until the first execution", "suspensions per request"),
    ]
    return Shown("What the scheduler changes; negative is less.", header, shown)


def _interval(found: Estimate) -> str:
    return f"{change(-found.median)} [{change(-found.high)}, {change(-found.low)}]"


def _draw(setup: Setup, rows: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    with plots.figure(stem, 9, 3, described, ncols=2) as (_, panels):
        for axes, disk in zip(panels, DISKS, strict=True):
            theirs = [row for row in rows if (row["disk"], row["setup"]) == (disk, setup.name)]
            models = list(dict.fromkeys(row["model"] for row in theirs))
            width = 0.85 / len(VARIANTS)
            for index, (strategy, scheduler) in enumerate(VARIANTS):
                found = [
                    row["latency_ms"].median
                    for row in theirs
                    if (row["strategy"], row["scheduler"]) == (strategy, scheduler)
                ]
                axes.bar(
                    [position + (index - 3) * width for position in range(len(models))],
                    found,
                    width,
                    color=plots.COLOURS[STRATEGIES.index(strategy)],
                    hatch=None if scheduler else "////",
                    edgecolor="white",
                    label=_name(strategy, scheduler),
                )
            axes.set_xticks(range(len(models)), models)
            axes.set_title(f"disk {disk}")
            axes.set_ylabel("ms")
        panels[0].legend(fontsize=6)
