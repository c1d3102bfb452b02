"""The paper's figures beside ours, and what explains a difference: from the measurement, not from guesses.

What a technique can save is bounded by how long nothing but what it does away with ran: initialization for
MiniLoader, retrieval in line for the WeightDecoupler. Those times are measured in the requests of the strategy that
it is compared with.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.paper import latency, placeholders, published, units, utilization
from bench.paper.choices import PAPERS, SETUPS, Setup
from bench.paper.material import Figure, Material, Request, figure
from bench.paper.part import Part, Sheet, Shown, percent
from bench.paper.published import family

_AGREES: Final = 0.05
"""Nearer than this, in points of a hundred, needs no explanation."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of the paper; parts of one."""

    what: str
    paper: float
    here: Mapping[str, float]
    """By setup."""
    explained: str


def part(material: Material) -> Part:
    compared = list(_all(material))
    return Part(
        title="The paper's figures beside this machine's",
        sentences=[
            (
                f"The paper's machine: {published.MACHINE}. Where a figure of the paper's setup is further "
                f"than {_AGREES * 100:.0f} points from the paper's, the last column says what explains it, "
                "from this run's measurements. 'Exposed' is time in which nothing but one kind of step ran: "
                "the most that doing away with it could save."
            ),
        ],
        tables=[_table(compared), _shares_table(material)],
        sheets=[
            Sheet(
                "comparison",
                [
                    {
                        "figure": one.what,
                        "paper": one.paper,
                        **{f"here_{setup}": value for setup, value in one.here.items()},
                        "explanation": one.explained,
                    }
                    for one in compared
                ],
            ),
            Sheet("pipeline_shares", list(_shares(material))),
        ],
    )


def _all(material: Material) -> Iterator[Compared]:
    yield from _latencies(material)
    yield from _unit_changes(material)
    yield from _usage(material)
    yield from _utilizations(material)


def exposed_share(material: Material, setup: Setup, strategy: str, *kinds: str) -> float:
    """Mean over the models: what part of the pipeline's time nothing but one of the kinds ran."""

    def share(request: Request) -> float:
        alone = sum(request["exposed_ms"][kind] for kind in kinds)
        return float(alone / request["figures"]["pipeline_ms"])

    return _mean(material, setup, strategy, share)


def _mean(material: Material, setup: Setup, strategy: str, read: Figure) -> float:
    return statistics.mean(
        statistics.median(material.values(model, setup, strategy, read))
        for model in material.models
    )


def _each(setups: Sequence[Setup], text: Any) -> str:
    return "; ".join(f"{setup.name}: {text(setup)}" for setup in setups)


def _latencies(material: Material) -> Iterator[Compared]:
    bounds = {
        ("preload", "pisel"): ("retrieve",),
        ("mini", "pisel"): ("initialize",),
        ("cicada", "pisel"): ("initialize", "retrieve"),
        ("cicada", "mini"): ("retrieve",),
        ("cicada", "preload"): ("initialize",),
    }
    stated = {
        **{(name, "pisel"): value for name, value in published.LATENCY_REDUCTION.items()},
        **{("cicada", name): value for name, value in published.CICADA_AGAINST.items()},
    }
    for (strategy, base), paper in stated.items():
        kinds = bounds[strategy, base]

        def exposed(setup: Setup, base: str = base, kinds: tuple[str, ...] = kinds) -> str:
            return percent(exposed_share(material, setup, base, *kinds))

        def execution(setup: Setup, names: tuple[str, str] = (base, strategy)) -> str:
            before, after = (_mean(material, setup, name, figure("execute_ms")) for name in names)
            return f"{before:.0f} and {after:.0f} ms"

        yield Compared(
            what=f"latency, {strategy} less than {base}",
            paper=paper,
            here={
                setup.name: latency.reduction_over_models(
                    material, setup, base, strategy, material.models
                ).median
                for setup in SETUPS
            },
            explained=(
                f"Exposed {' or '.join(kinds)} in {base}'s requests, the part that {strategy} can "
                f"take away: {_each(SETUPS, exposed)} of the pipeline's time (mean over the models). "
                f"What runs beside execution slows it: under {base} and {strategy} it takes "
                f"{_each(SETUPS, execution)}."
            ),
        )


def _unit_changes(material: Material) -> Iterator[Compared]:
    stated = [
        *(("work", key, value) for key, value in published.WORK_CHANGE.items()),
        *(("wait", key, value) for key, value in published.WAIT_CHANGE.items()),
    ]
    for measure, (strategy, unit), paper in stated:
        here = {}
        for setup in SETUPS:
            found = units.change_against_pisel(material, setup, strategy, unit, measure)
            if found is not None:
                here[setup.name] = found
        yield Compared(
            what=f"{unit} {measure}, {strategy} against pisel",
            paper=paper,
            here=here,
            explained=_unit_explanation(material, unit, measure, strategy),
        )


def _unit_explanation(material: Material, unit: str, measure: str, strategy: str) -> str:
    if (unit, measure) == ("layer", "work"):
        blueprint = _mean(material, PAPERS, "traditional", figure("construct_ms"))
        constructors = statistics.mean(
            statistics.median(one["instantiation_ms"]) for one in material.construction
        )
        return (
            "What mini leaves is instantiation. torchvision's constructors without initializers take "
            f"{constructors:.1f} ms (mean over the models); here layers are copied from a blueprint "
            f"instead, in {blueprint:.2f} ms, so hardly any layer work is left."
        )
    if (unit, measure) == ("weight", "work"):

        def files(setup: Setup) -> str:
            return percent(_mean(material, setup, "pisel", _file_share))

        return (
            "preload moves file processing out of the weight unit: under pisel that is "
            f"{_each(SETUPS, files)} of its work; the paper says "
            f"{percent(published.FILE_PROCESSING_SHARE)}."
        )

    def times(setup: Setup) -> str:
        before, after = (
            _mean(material, setup, name, units.of_unit(measure, unit))
            for name in ("pisel", strategy)
        )
        return f"{before:.0f} ms under pisel, {after:.0f} under {strategy}"

    def ahead(setup: Setup) -> str:
        return f"{_mean(material, setup, strategy, units.of_unit('work', 'compute')):.0f} ms"

    return (
        f"Mean waits: {_each(SETUPS, times)}. A unit waits for those before it on the same layer, so "
        "its queue grows with how far they run ahead: with construction all but gone, layers queue for "
        f"the slowest unit, whose work is {_each(SETUPS, ahead)} (execution)."
    )


def _file_share(request: Request) -> float:
    figures = request["figures"]
    loading = figures["work_ms"]["weight"]
    return float((loading - figures["apply_ms"]) / loading) if loading else 0.0


def _usage(material: Material) -> Iterator[Compared]:
    def times(setup: Setup) -> str:
        pisel, mini = (
            _mean(material, setup, name, figure("placeholder_usage_ms"))
            for name in placeholders.COMPARED
        )
        return f"{pisel:.1f} ms under pisel, {mini:.1f} under mini"

    yield Compared(
        what="placeholder usage time, mini against pisel",
        paper=published.USAGE_TIME_CHANGE,
        here={setup.name: placeholders.usage_change(material, setup.name) for setup in SETUPS},
        explained=(
            f"Mean usage: {_each(SETUPS, times)}. Quick construction makes layers wait for the weight "
            "unit, which retrieves one file after another: the quicker the construction and the slower "
            "the files, the longer."
        ),
    )


def _utilizations(material: Material) -> Iterator[Compared]:
    for name in dict.fromkeys(family(model) for model in material.models):
        for strategy, column in (("pisel", "without"), ("cicada", "with MiniLoader")):

            def idle(setup: Setup, name: str = name, strategy: str = strategy) -> str:
                occupancy = utilization.of_family(material, setup, strategy, name, "occupancy")
                return f"occupancy {percent(occupancy)}"

            yield Compared(
                what=f"utilization, {strategy}, {name}",
                paper=published.UTILIZATION[column][name],
                here={
                    setup.name: utilization.of_family(
                        material, setup, strategy, name, "utilization"
                    )
                    for setup in SETUPS
                },
                explained=(
                    f"{_each(SETUPS, idle)}: what occupancy has more is initialization with nothing "
                    "else running; what is missing to 100 % is waiting between the units' steps."
                ),
            )


def _table(compared: Sequence[Compared]) -> Shown:
    rows = [
        [
            one.what,
            f"{one.paper:+.2%}" if "against" in one.what else f"{one.paper:.2%}",
            *(percent(one.here[setup.name]) if setup.name in one.here else "" for setup in SETUPS),
            _explanation(one),
        ]
        for one in compared
    ]
    header = ["figure", "paper", "here, paper's setup", "here, our setup", "what explains it"]
    return Shown("Every mean that the paper states.", header, rows)


def _explanation(one: Compared) -> str:
    near = [abs(value - one.paper) <= _AGREES for value in one.here.values()]
    return "agrees" if near and all(near) else one.explained


def _shares(material: Material) -> Iterator[dict[str, Any]]:
    for setup in SETUPS:
        for model in material.models:
            for strategy in published.STRATEGIES:
                row: dict[str, Any] = {
                    "model": model,
                    "setup": setup.name,
                    "strategy": strategy,
                }
                for kind in ("initialize", "retrieve", "apply", "construct", "execute"):
                    shares = [
                        request["exposed_ms"][kind] / request["figures"]["pipeline_ms"]
                        for request in material.of(model, setup, strategy)
                    ]
                    row[f"exposed_{kind}"] = statistics.median(shares)
                yield row


def _shares_table(material: Material) -> Shown:
    kinds = ("initialize", "retrieve", "apply", "construct", "execute")
    rows = [
        [
            strategy,
            setup.name,
            *(percent(exposed_share(material, setup, strategy, kind)) for kind in kinds),
        ]
        for setup in SETUPS
        for strategy in published.STRATEGIES
    ]
    header = ["strategy", "setup", *(f"only {kind}" for kind in kinds)]
    return Shown("Exposed time as a part of the pipeline's, means over the models.", header, rows)
