"""Utilization (Fig. 13) in both definitions, with the active and total pipeline time."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import plots
from bench.paper import estimates, published
from bench.paper.choices import SETUPS, Setup
from bench.paper.material import Material, Request, figure
from bench.paper.part import Part, Plot, Sheet, Shown, number, percent
from bench.paper.published import STRATEGIES, family

DEFINITIONS: Final = ("utilization", "occupancy")
_PAPERS_COLUMN: Final = {
    "pisel": "without",
    "preload": "without",
    "mini": "with MiniLoader",
    "cicada": "with MiniLoader",
}


def part(material: Material, described: str) -> Part:
    rows = list(_rows(material))
    families = list(_families(material))
    return Part(
        title="Utilization (Fig. 13)",
        sentences=[
            (
                "Utilization, as the paper has it: the part of the pipeline's time in which anything but "
                "initialization ran, since that is superfluous work. Occupancy: the same with "
                "initialization. Active time is the first's numerator, total time the pipeline's length."
            ),
        ],
        tables=[_families_table(families), _rows_table(rows)],
        plots=[
            Plot(
                "fig13_utilization",
                "Mean utilization (solid) and what occupancy adds to it (hatched), per family.",
                partial(_draw, families, described),
            ),
            Plot(
                "fig13_active_and_total",
                "Active (solid) and idle or superfluous (hatched) pipeline time, pisel and cicada.",
                partial(_draw_times, rows, described),
            ),
        ],
        sheets=[Sheet("utilization", rows), Sheet("utilization_by_family", families)],
    )


def of_family(material: Material, setup: Setup, strategy: str, name: str, definition: str) -> float:
    """Mean over the family's models of their medians."""
    return statistics.mean(
        statistics.median(material.values(model, setup, strategy, figure(definition)))
        for model in material.models
        if family(model) == name
    )


def _useful_ms(request: Request) -> float:
    figures = request["figures"]
    return float(figures["utilization"] * figures["pipeline_ms"])


def _rows(material: Material) -> Iterator[dict[str, Any]]:
    for setup in SETUPS:
        for model in material.models:
            for strategy in STRATEGIES:
                read = partial(material.values, model, setup, strategy)
                yield {
                    "model": model,
                    "setup": setup.name,
                    "strategy": strategy,
                    **{name: estimates.median(read(figure(name))) for name in DEFINITIONS},
                    "active_ms": estimates.median(read(_useful_ms)),
                    "total_ms": estimates.median(read(figure("pipeline_ms"))),
                }


def _families(material: Material) -> Iterator[dict[str, Any]]:
    present = dict.fromkeys(family(model) for model in material.models)
    for setup in SETUPS:
        for name in present:
            for strategy in STRATEGIES:
                column = _PAPERS_COLUMN.get(strategy)
                yield {
                    "setup": setup.name,
                    "family": name,
                    "strategy": strategy,
                    **{
                        definition: of_family(material, setup, strategy, name, definition)
                        for definition in DEFINITIONS
                    },
                    "paper": None if column is None else published.UTILIZATION[column][name],
                }


def _families_table(families: Sequence[Mapping[str, Any]]) -> Shown:
    rows = [
        [
            f"{row['family']}, {row['strategy']}",
            row["setup"],
            percent(row["utilization"]),
            percent(row["occupancy"]),
            "not stated" if row["paper"] is None else f"{row['paper']:.2%}",
        ]
        for row in families
    ]
    header = ["family, strategy", "setup", "utilization", "occupancy", "paper's utilization"]
    return Shown("Means over the families' models.", header, rows)


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Shown:
    shown = [
        [
            row["model"],
            row["setup"],
            row["strategy"],
            percent(row["utilization"].median),
            percent(row["occupancy"].median),
            number(row["active_ms"].median),
            number(row["total_ms"].median),
        ]
        for row in rows
        if row["strategy"] in {"pisel", "cicada"}
    ]
    header = [
        *("model", "setup", "strategy", "utilization", "occupancy"),
        *("active, ms", "total, ms"),
    ]
    return Shown(
        "The paper's two groups by model (all strategies: utilization.csv).", header, shown
    )


def _draw(families: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    with plots.figure(stem, 9, 2.8, described, ncols=2, sharey=True) as (_, panels):
        for axes, setup in zip(panels, SETUPS, strict=True):
            names = list(dict.fromkeys(row["family"] for row in families))
            width = 0.8 / len(STRATEGIES)
            for index, strategy in enumerate(STRATEGIES):
                rows = [
                    row
                    for row in families
                    if (row["setup"], row["strategy"]) == (setup.name, strategy)
                ]
                places = [position + (index - 2) * width for position in range(len(names))]
                useful = [row["utilization"] for row in rows]
                colour = plots.COLOURS[index]
                axes.bar(places, useful, width, color=colour, label=strategy)
                axes.bar(
                    places,
                    [row["occupancy"] - row["utilization"] for row in rows],
                    width,
                    bottom=useful,
                    color="white",
                    edgecolor=colour,
                    hatch="////",
                )
            axes.set_xticks(range(len(names)), names)
            axes.set_title(setup.title)
        panels[0].set_ylabel("part of the pipeline's time")
        panels[1].legend(ncols=2, fontsize=7, loc="lower right")


def _draw_times(rows: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    with plots.figure(stem, 9, 2.8, described, ncols=2) as (_, panels):
        for axes, setup in zip(panels, SETUPS, strict=True):
            for index, strategy in enumerate(("pisel", "cicada")):
                theirs = [
                    row for row in rows if (row["setup"], row["strategy"]) == (setup.name, strategy)
                ]
                places = [position + (index - 0.5) * 0.4 for position in range(len(theirs))]
                active = [row["active_ms"].median for row in theirs]
                rest = [row["total_ms"].median - row["active_ms"].median for row in theirs]
                colour = plots.COLOURS[index]
                axes.bar(places, active, 0.4, color=colour, label=strategy)
                axes.bar(
                    places,
                    rest,
                    0.4,
                    bottom=active,
                    color="white",
                    edgecolor=colour,
                    hatch="////",
                )
            models = [row["model"] for row in theirs]
            axes.set_xticks(range(len(models)), models, rotation=45, ha="right")
            axes.set_ylabel("ms")
            axes.set_title(setup.title)
            axes.legend()
