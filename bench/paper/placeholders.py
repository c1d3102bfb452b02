"""Placeholders (Fig. 10): what construction holds until weights are applied, and for how long, mini against pisel."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import plots
from bench.paper import estimates, published
from bench.paper.choices import SETUPS
from bench.paper.material import Material, figure
from bench.paper.part import Part, Plot, Sheet, Shown, change, number, percent

_MIB: Final = 1 << 20
COMPARED: Final = ("pisel", "mini")


def part(material: Material, described: str) -> Part:
    rows = rows_of(material)
    ratios = [row["mini_mib"] / row["pisel_mib"] for row in rows]
    return Part(
        title="Memory: placeholders (Fig. 10)",
        sentences=[
            (
                "Bytes that parameters really have when their layer's construction ends, summed over the "
                "layers, and the sum over layers of the time from there to the application of weights."
            ),
            (
                f"mini holds {percent(min(ratios))} to {percent(max(ratios))} of pisel's bytes; the paper "
                f"says 1/32, which is {percent(published.PLACEHOLDER_RATIO)}."
            ),
        ],
        tables=[_table(rows)],
        plots=[
            Plot(
                "fig10_placeholders",
                "Placeholder memory (logarithmic) and usage time; upper row the paper's setup.",
                partial(_draw, rows, described),
            )
        ],
        sheets=[Sheet("placeholders", rows)],
    )


def rows_of(material: Material) -> list[dict[str, Any]]:
    rows = []
    for setup in SETUPS:
        for model in material.models:
            row: dict[str, Any] = {"model": model, "setup": setup.name}
            for strategy in COMPARED:
                held = material.values(model, setup, strategy, figure("placeholder_bytes"))
                used = material.values(model, setup, strategy, figure("placeholder_usage_ms"))
                row[f"{strategy}_mib"] = statistics.median(held) / _MIB
                row[f"{strategy}_usage_ms"] = estimates.median(used)
            row["usage_change"] = (
                row["mini_usage_ms"].median / row["pisel_usage_ms"].median - 1
                if row["pisel_usage_ms"].median
                else None
            )
            rows.append(row)
    return rows


def usage_change(material: Material, setup_name: str) -> float:
    """Mean over the models."""
    changes: list[float] = [
        row["usage_change"]
        for row in rows_of(material)
        if row["setup"] == setup_name and row["usage_change"] is not None
    ]
    return statistics.mean(changes)


def _table(rows: Sequence[Mapping[str, Any]]) -> Shown:
    shown = [
        [
            row["model"],
            row["setup"],
            number(row["pisel_mib"], 2),
            number(row["mini_mib"], 2),
            str(row["pisel_usage_ms"]),
            str(row["mini_usage_ms"]),
            "" if row["usage_change"] is None else change(row["usage_change"]),
        ]
        for row in rows
    ]
    header = [
        *("model", "setup", "pisel, MiB", "mini, MiB"),
        *("pisel's usage, ms", "mini's usage, ms", "usage, change"),
    ]
    caption = (
        "The paper: 97.49 to 1162 MB under pisel, 3.04 to 36.27 MB under mini; usage time "
        f"{change(published.USAGE_TIME_CHANGE)} on average."
    )
    return Shown(caption, header, shown)


def _draw(rows: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    with plots.figure(stem, 9, 4.6, described, nrows=2, ncols=2) as (_, panels):
        for (left, right), setup in zip(panels, SETUPS, strict=True):
            theirs = [row for row in rows if row["setup"] == setup.name]
            models = [row["model"] for row in theirs]
            for index, strategy in enumerate(COMPARED):
                places = [position + (index - 0.5) * 0.4 for position in range(len(models))]
                colour = plots.COLOURS[index]
                left.bar(
                    places,
                    [row[f"{strategy}_mib"] for row in theirs],
                    0.4,
                    color=colour,
                    label=strategy,
                )
                right.bar(
                    places,
                    [row[f"{strategy}_usage_ms"].median for row in theirs],
                    0.4,
                    color=colour,
                    label=strategy,
                )
            for axes in (left, right):
                axes.set_xticks(range(len(models)), models, rotation=45, ha="right")
                axes.legend()
            left.set_yscale("log")
            left.set_ylabel("MiB")
            left.set_title(f"{setup.name}: placeholder memory")
            right.set_ylabel("ms")
            right.set_title(f"{setup.name}: usage time")
