"""Latency (the paper's Fig. 9/10): every strategy under the trace's order, through HTTP, beside the resident floor."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import plots
from bench.paper import estimates, published
from bench.paper.choices import SETUPS, Setup
from bench.paper.estimates import Estimate
from bench.paper.material import Material, client_ms, figure
from bench.paper.part import Part, Plot, Sheet, Shown, number, percent
from bench.paper.published import STRATEGIES, family

_WARM: Final = 0.99


def part(material: Material, described: str) -> Part:
    latencies = list(_latencies(material))
    means = list(_means(material))
    families = list(_families(material))
    others = ", ".join(
        f"{percent(value)} in {where}"
        for where, value in published.OTHER_LATENCY_REDUCTIONS.items()
    )
    return Part(
        title="Latency (Figs. 9 and 10)",
        sentences=[
            (
                "The client's time, from sending a request with a 1x3x224x224 tensor to its whole answer, "
                "through HTTP, medians with 95 % bootstrap intervals. Models follow one another in the "
                "order in which the trace asks for them; for each, all strategies and setups are asked in "
                "turn. Resident is the forward pass alone of a model kept in memory, without HTTP, in the "
                "same rounds; the paper does not show it."
            ),
            (
                f"In {_not_warm(material)} of {_asked(material)} requests less than "
                f"{percent(_WARM)} of the model's files were in the page cache, as asked just before."
            ),
            (
                "Published means of cicada against pisel differ: "
                f"{percent(published.LATENCY_REDUCTION['cicada'])} in the paper at hand, {others}, where "
                "PISeL is slower than plain loading. So traditional stands beside pisel here."
            ),
        ],
        tables=[
            *(_latency_table(setup, latencies) for setup in SETUPS),
            _means_table(means),
            _families_table(families),
        ],
        plots=[
            Plot(
                f"fig9_latency_{setup.name}",
                f"Latency, {setup.title}; bars with 95 % intervals, the line is the resident forward "
                "pass. Logarithmic scale.",
                partial(_draw, setup, latencies, described),
            )
            for setup in SETUPS
        ],
        sheets=[
            Sheet("latency", latencies),
            Sheet("latency_reductions", means),
            Sheet("latency_reductions_by_family", families),
        ],
    )


def _not_warm(material: Material) -> int:
    return sum(
        request["cached_share"] < _WARM for one in material.rounds for request in one["requests"]
    )


def _asked(material: Material) -> int:
    return sum(len(one["requests"]) for one in material.rounds)


def reduction_over_models(
    material: Material, setup: Setup, base: str, other: str, models: Sequence[str]
) -> Estimate:
    """The mean over models of how much less `other` takes than `base`."""
    return estimates.mean_reduction(
        [
            (
                material.values(model, setup, base, client_ms),
                material.values(model, setup, other, client_ms),
            )
            for model in models
        ]
    )


def _latencies(material: Material) -> Iterator[dict[str, Any]]:
    for setup in SETUPS:
        for model in material.models:
            resident = estimates.median(material.resident_ms(model))
            pisel = material.values(model, setup, "pisel", client_ms)
            for strategy in STRATEGIES:
                values = material.values(model, setup, strategy, client_ms)
                latency = estimates.median(values)
                yield {
                    "model": model,
                    "setup": setup.name,
                    "strategy": strategy,
                    "latency_ms": latency,
                    "resident_ms": resident,
                    "pipeline_ms": estimates.median(
                        material.values(model, setup, strategy, figure("pipeline_ms"))
                    ),
                    "execute_ms": estimates.median(
                        material.values(model, setup, strategy, figure("execute_ms"))
                    ),
                    "over_resident": latency.median / resident.median,
                    "reduction_against_pisel": estimates.reduction(pisel, values),
                }


def _means(material: Material) -> Iterator[dict[str, Any]]:
    against: list[tuple[str, str, float | None]] = [
        *((name, "pisel", value) for name, value in published.LATENCY_REDUCTION.items()),
        *(("cicada", name, value) for name, value in published.CICADA_AGAINST.items()),
        ("pisel", "traditional", None),
        ("cicada", "traditional", None),
    ]
    for setup in SETUPS:
        for strategy, base, paper in against:
            yield {
                "setup": setup.name,
                "strategy": strategy,
                "against": base,
                "reduction": reduction_over_models(
                    material, setup, base, strategy, material.models
                ),
                "paper": paper,
            }


def _families(material: Material) -> Iterator[dict[str, Any]]:
    for setup in SETUPS:
        for name in published.FAMILIES:
            models = [model for model in material.models if family(model) == name]
            for base in ("pisel", "mini", "preload"):
                if models:
                    yield {
                        "setup": setup.name,
                        "family": name,
                        "against": base,
                        "reduction": reduction_over_models(material, setup, base, "cicada", models),
                        "paper": _paper_range(base, models),
                    }


def _paper_range(base: str, models: Sequence[str]) -> str:
    known = {
        "mini": published.CICADA_AGAINST_MINI,
        "preload": published.CICADA_AGAINST_PRELOAD,
    }.get(base, {})
    return ", ".join(f"{model} {percent(known[model])}" for model in models if model in known)


def _latency_table(setup: Setup, latencies: Sequence[Mapping[str, Any]]) -> Shown:
    theirs = [row for row in latencies if row["setup"] == setup.name]
    rows = []
    for model in dict.fromkeys(row["model"] for row in theirs):
        mine = {row["strategy"]: row for row in theirs if row["model"] == model}
        rows.append(
            [
                model,
                *(_cell(mine[strategy]) for strategy in STRATEGIES),
                str(mine["cicada"]["resident_ms"]),
                f"{mine['cicada']['over_resident']:.3f}",
                number(mine["cicada"]["pipeline_ms"].median),
                number(mine["cicada"]["execute_ms"].median),
            ]
        )
    ratio = statistics.geometric_mean(
        row["over_resident"] for row in theirs if row["strategy"] == "cicada"
    )
    rows.append(["geometric mean", *[""] * (len(STRATEGIES) + 1), f"{ratio:.3f}", "", ""])
    header = [
        *("model", *STRATEGIES, "resident", "cicada / resident"),
        *("cicada: pipeline", "and execution in it"),
    ]
    caption = f"Latency in ms, {setup.title}; in parentheses the reduction against pisel."
    return Shown(caption, header, rows)


def _cell(row: Mapping[str, Any]) -> str:
    if row["strategy"] == "pisel":
        return str(row["latency_ms"])
    return f"{row['latency_ms']} ({percent(row['reduction_against_pisel'].median)})"


def _interval(found: Estimate) -> str:
    return f"{percent(found.median)} [{percent(found.low)}, {percent(found.high)}]"


def _means_table(means: Sequence[Mapping[str, Any]]) -> Shown:
    rows = [
        [
            f"{row['strategy']} against {row['against']}",
            row["setup"],
            _interval(row["reduction"]),
            "not stated" if row["paper"] is None else f"{row['paper']:.2%}",
        ]
        for row in means
    ]
    header = ["reduction of latency", "setup", "here", "paper"]
    return Shown("Mean reductions over the models.", header, rows)


def _families_table(families: Sequence[Mapping[str, Any]]) -> Shown:
    rows = [
        [
            f"{row['family']}, against {row['against']}",
            row["setup"],
            _interval(row["reduction"]),
            row["paper"],
        ]
        for row in families
    ]
    header = ["cicada's reduction", "setup", "here, mean of the family", "paper, single models"]
    return Shown("Per family.", header, rows)


def _draw(setup: Setup, latencies: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    theirs = [row for row in latencies if row["setup"] == setup.name]
    models = list(dict.fromkeys(row["model"] for row in theirs))
    width = 0.8 / len(STRATEGIES)
    with plots.figure(stem, 9, 3.4, described) as (_, axes):
        for index, strategy in enumerate(STRATEGIES):
            found = [row["latency_ms"] for row in theirs if row["strategy"] == strategy]
            axes.bar(
                [position + (index - 2) * width for position in range(len(models))],
                [one.median for one in found],
                width,
                yerr=[
                    [one.median - one.low for one in found],
                    [one.high - one.median for one in found],
                ],
                error_kw={"lw": 0.7},
                color=plots.COLOURS[index],
                label=strategy,
            )
        for position, model in enumerate(models):
            floor = next(row["resident_ms"].median for row in theirs if row["model"] == model)
            axes.plot(
                [position - 0.42, position + 0.42],
                [floor, floor],
                color="black",
                lw=1.2,
                label="resident" if position == 0 else None,
            )
        axes.set_yscale("log")
        axes.set_ylabel("ms")
        axes.set_xticks(range(len(models)), models, rotation=30)
        axes.set_title(setup.title)
        axes.legend(ncols=6, fontsize=8)
