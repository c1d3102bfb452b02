"""Units (Fig. 11): work, wait, idle and preload time per unit and layer, and what changes against pisel."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import plots
from bench.paper import estimates, published
from bench.paper.choices import SETUPS, Setup
from bench.paper.material import Figure, Material, Request, figure
from bench.paper.part import Part, Plot, Sheet, Shown, change, number
from bench.paper.published import STRATEGIES
from handler.strategies import STRATEGIES as KNOWN
from handler.timeline import KINDS, UNITS

MEASURES: Final = ("work", "wait", "idle")
_SHOWN: Final = (
    "layer work",
    "weight work",
    "weight wait",
    "compute work",
    "compute wait",
    "preload",
)


def part(material: Material, described: str) -> Part:
    units = list(_units(material))
    changes = list(_changes(material))
    return Part(
        title="Units (Fig. 11)",
        sentences=[
            (
                "Work is what a unit ran, summed over the layers; wait the sum over layers of (its start - "
                "the preceding unit's end on that layer); idle the time until its last end in which it ran "
                "nothing. Preload is asynchronous retrieval, which is no unit's work; in line it is the "
                "weight unit's. The figure shows means per layer, as the paper's does."
            ),
        ],
        tables=[_changes_table(changes), *(_units_table(setup, units) for setup in SETUPS)],
        plots=[
            Plot(
                f"fig11_units_{setup.name}",
                f"Mean time per layer and unit, {setup.title}. Logarithmic scale.",
                partial(_draw, setup, units, described),
            )
            for setup in SETUPS
        ],
        sheets=[
            Sheet("units", units),
            Sheet("units_by_layer", list(_layers(material))),
            Sheet("units_changes", changes),
        ],
    )


def of_unit(measure: str, unit: str) -> Figure:
    return figure(f"{measure}_ms", unit)


def preload_ms(request: Request) -> float:
    """Retrieval on no unit's time, summed over the layers."""
    if not KNOWN[request["strategy"]].decoupled:
        return 0.0
    return float(sum(layer["retrieve_ms"] for layer in request["layers"]))


def change_against_pisel(
    material: Material, setup: Setup, strategy: str, unit: str, measure: str
) -> float | None:
    """The mean over models; None where pisel has none of it."""
    found = []
    for model in material.models:
        base, other = (
            statistics.median(material.values(model, setup, name, of_unit(measure, unit)))
            for name in ("pisel", strategy)
        )
        if base:
            found.append(other / base - 1)
    return statistics.mean(found) if found else None


def _units(material: Material) -> Iterator[dict[str, Any]]:
    for setup in SETUPS:
        for model in material.models:
            for strategy in STRATEGIES:
                read = partial(material.values, model, setup, strategy)
                yield {
                    "model": model,
                    "setup": setup.name,
                    "strategy": strategy,
                    "layers": int(read(figure("layers"))[0]),
                    **{
                        f"{unit}_{measure}_ms": estimates.median(read(of_unit(measure, unit)))
                        for unit in UNITS
                        for measure in MEASURES
                    },
                    "preload_ms": estimates.median(read(preload_ms)),
                }


def _layers(material: Material) -> Iterator[dict[str, Any]]:
    """Medians over the rounds."""
    columns = [*(f"{kind}_ms" for kind in KINDS), "weight_wait_ms", "compute_wait_ms"]
    for setup in SETUPS:
        for model in material.models:
            for strategy in STRATEGIES:
                requests = [one["layers"] for one in material.of(model, setup, strategy)]
                for rounds in zip(*requests, strict=True):
                    yield {
                        "model": model,
                        "setup": setup.name,
                        "strategy": strategy,
                        "layer": rounds[0]["layer"],
                        **{
                            column: round(statistics.median(row[column] for row in rounds), 4)
                            for column in columns
                        },
                    }


def _changes(material: Material) -> Iterator[dict[str, Any]]:
    for setup in SETUPS:
        for strategy in ("preload", "mini", "cicada"):
            for unit in UNITS:
                for measure in ("work", "wait"):
                    stated = published.WORK_CHANGE if measure == "work" else published.WAIT_CHANGE
                    yield {
                        "setup": setup.name,
                        "strategy": strategy,
                        "unit": unit,
                        "measure": measure,
                        "change": change_against_pisel(material, setup, strategy, unit, measure),
                        "paper": stated.get((strategy, unit)),
                    }


def _changes_table(changes: Sequence[Mapping[str, Any]]) -> Shown:
    by_setup = {
        setup.name: [row for row in changes if row["setup"] == setup.name] for setup in SETUPS
    }
    rows = [
        [
            f"{row['strategy']}: {row['unit']} {row['measure']}",
            *(
                "none under pisel" if one["change"] is None else change(one["change"])
                for one in (row, other)
            ),
            "not stated" if row["paper"] is None else f"{row['paper']:+.2%}",
        ]
        for row, other in zip(by_setup["paper"], by_setup["ours"], strict=True)
        if (row["unit"], row["measure"]) != ("layer", "wait")
    ]
    header = ["against pisel", "paper's setup, here", "our setup", "paper"]
    return Shown("Mean changes over the models.", header, rows)


def _units_table(setup: Setup, units: Sequence[Mapping[str, Any]]) -> Shown:
    rows = [
        [
            row["model"],
            row["strategy"],
            *(number(row[f"{unit}_{measure}_ms"].median) for unit in UNITS for measure in MEASURES),
            number(row["preload_ms"].median),
        ]
        for row in units
        if row["setup"] == setup.name
    ]
    header = [
        "model",
        "strategy",
        *(f"{unit} {measure}" for unit in UNITS for measure in MEASURES),
        "preload",
    ]
    return Shown(f"Medians in ms, whole requests, {setup.title}.", header, rows)


def _draw(setup: Setup, units: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    theirs = [row for row in units if row["setup"] == setup.name]
    models = list(dict.fromkeys(row["model"] for row in theirs))
    width = 0.8 / len(STRATEGIES)
    with plots.figure(stem, 9, 6.4, described, nrows=3, ncols=2, sharex=True) as (_, panels):
        for axes, shown in zip(panels.flat, _SHOWN, strict=True):
            key = f"{shown.replace(' ', '_')}_ms"
            for index, strategy in enumerate(STRATEGIES):
                rows = [row for row in theirs if row["strategy"] == strategy]
                axes.bar(
                    [position + (index - 2) * width for position in range(len(models))],
                    [row[key].median / row["layers"] for row in rows],
                    width,
                    color=plots.COLOURS[index],
                    label=strategy,
                )
            axes.set_title(shown)
            if any(row[key].median > 0 for row in theirs):
                axes.set_yscale("log")
            axes.set_ylabel("ms per layer")
            axes.set_xticks(range(len(models)), models, rotation=45, ha="right")
        panels[0][0].legend(ncols=2, fontsize=7)
