"""Motivation (Figs. 4 and 5): what models hold, and what constructing and loading them costs."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from bench import plots
from bench.paper import construction, estimates, published
from bench.paper.choices import PAPERS, SETUPS, Run
from bench.paper.journal import Journal
from bench.paper.material import Material, figure
from bench.paper.part import Part, Plot, Sheet, Shown, number, percent
from bench.paper.published import family

PHASES: Final = ("instantiation", "registration", "initialization")
_MIB: Final = 1 << 20
_MOST_ROUNDS: Final = 5
_STRATEGY: Final = "traditional"
"""Its steps run one after another, so that no other unit lengthens them."""


def measure(run: Run, journal: Journal, progress: Progress) -> None:
    task = progress.add_task("motivation", total=len(run.choices.models))
    for model in run.choices.models:
        progress.update(task, description=f"motivation: {model}")
        if model not in journal:
            rounds = min(run.choices.rounds, _MOST_ROUNDS)
            journal.add(model, construction.measured(model, rounds))
        progress.advance(task)
    progress.remove_task(task)


def part(material: Material, described: str) -> Part:
    held = [_held(one) for one in material.construction]
    layers = [_layer(one["model"], row) for one in material.construction for row in one["layers"]]
    phases = [_phases(one, material) for one in material.construction]
    loading = list(_loading(material))
    return Part(
        title="Motivation: memory, construction, weight loading (Figs. 4 and 5)",
        sentences=_sentences(phases, loading),
        tables=[_memory_table(held), _phase_table(phases), _loading_table(loading)],
        plots=[
            Plot(
                "fig4_resident_memory",
                "Private memory that a loaded model adds to its process.",
                partial(_draw_memory, held, described),
            ),
            Plot(
                "fig5_construction",
                "Layer construction by layer (a; colours repeat) and by phase (b): instantiation is "
                "torchvision's constructors without memory and initializers.",
                partial(_draw_construction, layers, phases, described),
            ),
            Plot(
                "fig5_weight_loading",
                "Weight loading by phase (c), under traditional loading: files processed (solid) and "
                "weights applied (hatched).",
                partial(_draw_loading, loading, described),
            ),
        ],
        sheets=[
            Sheet("motivation_memory", held, "does not matter: weights were made, not read"),
            Sheet("motivation_layers", layers, "does not matter: no file is read"),
            Sheet("motivation_phases", phases, "does not matter: no file is read"),
            Sheet("motivation_weight_loading", loading),
        ],
    )


def _held(one: Mapping[str, Any]) -> dict[str, Any]:
    paper = published.RESIDENT_MB.get(one["model"])
    return {
        "model": one["model"],
        "resident_mib": one["resident_bytes"] / _MIB,
        "parameters_mib": one["parameter_bytes"] / _MIB,
        "paper_mib": paper,
    }


def _layer(model: str, row: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, **row}


def _phases(one: Mapping[str, Any], material: Material) -> dict[str, Any]:
    """The constructor's phases; registration and initialization are the sums of the layers'."""
    built = material.values(one["model"], PAPERS, _STRATEGY, figure("construct_ms"))
    constructor = estimates.median(one["constructor_ms"])
    instantiation = estimates.median(one["instantiation_ms"])
    return {
        "model": one["model"],
        "constructor_ms": constructor,
        "instantiation_ms": instantiation,
        "registration_ms": sum(row["registration_ms"] for row in one["layers"]),
        "initialization_ms": sum(row["initialization_ms"] for row in one["layers"]),
        "blueprint_ms": statistics.median(built),
        "beyond_instantiation": 1 - instantiation.median / constructor.median,
    }


def _loading(material: Material) -> list[dict[str, Any]]:
    rows = []
    for setup in SETUPS:
        for model in material.models:
            retrieve = estimates.median(
                material.values(model, setup, _STRATEGY, figure("retrieve_ms"))
            )
            apply = estimates.median(material.values(model, setup, _STRATEGY, figure("apply_ms")))
            rows.append(
                {
                    "model": model,
                    "setup": setup.name,
                    "file_processing_ms": retrieve,
                    "application_ms": apply,
                    "file_processing_share": retrieve.median / (retrieve.median + apply.median),
                }
            )
    return rows


def _sentences(
    phases: Sequence[Mapping[str, Any]], loading: Sequence[Mapping[str, Any]]
) -> list[str]:
    beyond = [row["beyond_instantiation"] for row in phases]
    shares = {
        setup.name: statistics.mean(
            row["file_processing_share"] for row in loading if row["setup"] == setup.name
        )
        for setup in SETUPS
    }
    return [
        (
            "Registration and initialization take "
            f"{percent(min(beyond))} to {percent(max(beyond))} of torchvision's constructors here; the "
            "paper says more than half. They are what MiniLoader does away with."
        ),
        (
            f"File processing is {percent(shares['paper'])} of weight loading from pth files, and "
            f"{percent(shares['ours'])} from mapped safetensors files (means over the models); the paper "
            f"says {percent(published.FILE_PROCESSING_SHARE)}. Applying a pth file's weights copies them; "
            "applying a mapped file's binds them, so hardly anything is left beside populating the mapping."
        ),
        (
            "Registration here only reserves memory; its page faults are paid by initialization, which "
            "is the first to write into it."
        ),
    ]


def _memory_table(held: Sequence[Mapping[str, Any]]) -> Shown:
    rows = [
        [
            row["model"],
            number(row["resident_mib"]),
            number(row["parameters_mib"], 2),
            "" if row["paper_mib"] is None else number(row["paper_mib"], 2),
        ]
        for row in held
    ]
    header = ["model", "private memory, MiB", "parameters, MiB", "paper, MB"]
    return Shown("Fig. 4: a model held resident.", header, rows)


def _phase_table(phases: Sequence[Mapping[str, Any]]) -> Shown:
    rows = [
        [
            row["model"],
            str(row["constructor_ms"]),
            str(row["instantiation_ms"]),
            number(row["registration_ms"], 2),
            number(row["initialization_ms"]),
            percent(row["beyond_instantiation"]),
            number(row["blueprint_ms"], 2),
        ]
        for row in phases
    ]
    header = [
        *("model", "constructor, ms", "instantiation, ms", "registration, ms"),
        *("initialization, ms", "beyond instantiation", "blueprint, ms"),
    ]
    caption = (
        "Fig. 5 (b): construction by phase. The last column is this product's instantiation, in the "
        "requests of traditional loading: layers are copied from a blueprint."
    )
    return Shown(caption, header, rows)


def _loading_table(loading: Sequence[Mapping[str, Any]]) -> Shown:
    rows = [
        [
            row["model"],
            row["setup"],
            str(row["file_processing_ms"]),
            str(row["application_ms"]),
            percent(row["file_processing_share"]),
        ]
        for row in loading
    ]
    header = ["model", "setup", "file processing, ms", "application, ms", "share of files"]
    return Shown("Fig. 5 (c): weight loading by phase.", header, rows)


def _draw_memory(held: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    with plots.figure(stem, 7, 2.8, described) as (_, axes):
        models = [row["model"] for row in held]
        colours = [plots.COLOURS[published.FAMILIES.index(family(model))] for model in models]
        axes.bar(models, [row["resident_mib"] for row in held], color=colours)
        axes.set_ylabel("MiB")
        axes.tick_params(axis="x", rotation=30)


def _draw_construction(
    layers: Sequence[Mapping[str, Any]],
    phases: Sequence[Mapping[str, Any]],
    described: str,
    stem: Path,
) -> None:
    with plots.figure(stem, 9, 3.2, described, ncols=2) as (_, (left, right)):
        models = [row["model"] for row in phases]
        for position, model in enumerate(models):
            bottom = 0.0
            theirs = [row for row in layers if row["model"] == model]
            for index, row in enumerate(theirs):
                height = sum(row[f"{phase}_ms"] for phase in PHASES)
                colour = plots.COLOURS[index % len(plots.COLOURS)]
                left.bar(position, height, bottom=bottom, color=colour)
                bottom += height
        left.set_xticks(range(len(models)), models, rotation=45, ha="right")
        left.set_title("(a) by layer")
        left.set_ylabel("ms")
        bottoms = [0.0] * len(models)
        for index, phase in enumerate(PHASES):
            heights = [_median(row[f"{phase}_ms"]) for row in phases]
            right.bar(
                models,
                heights,
                bottom=bottoms,
                color=plots.COLOURS[index],
                hatch="///" if phase == "initialization" else None,
                edgecolor="white",
                label=phase,
            )
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
        right.set_xticks(range(len(models)), models, rotation=45, ha="right")
        right.set_title("(b) by phase")
        right.legend()


def _median(value: Any) -> float:
    return float(getattr(value, "median", value))


def _draw_loading(loading: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    with plots.figure(stem, 9, 2.8, described, ncols=2) as (_, panels):
        for axes, setup in zip(panels, SETUPS, strict=True):
            rows = [row for row in loading if row["setup"] == setup.name]
            models = [row["model"] for row in rows]
            files = [row["file_processing_ms"].median for row in rows]
            applied = [row["application_ms"].median for row in rows]
            axes.bar(models, files, color=plots.COLOURS[1], label="file processing")
            axes.bar(
                models,
                applied,
                bottom=files,
                color=plots.COLOURS[4],
                hatch="///",
                edgecolor="white",
                label="application",
            )
            axes.set_xticks(range(len(models)), models, rotation=45, ha="right")
            axes.set_title(setup.title)
            axes.set_ylabel("ms")
            axes.legend()
