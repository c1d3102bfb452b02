"""Timelines (Fig. 14): what each unit ran when, under every strategy; initialization hatched."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import plots
from bench.paper.choices import SETUPS, Setup
from bench.paper.material import Material, client_ms
from bench.paper.part import Part, Plot, Sheet
from bench.paper.published import STRATEGIES

ROWS: Final = (
    ("Layer", ("construct", "initialize")),
    ("Retrieve", ("retrieve",)),
    ("Weight", ("apply",)),
    ("Compute", ("execute",)),
)
Row = Mapping[str, Any]


def part(material: Material, described: str) -> Part:
    shown = {
        (model, setup.name): _typical(material, model, setup)
        for model in material.run.choices.timeline_models
        for setup in SETUPS
    }
    return Part(
        title="Timelines (Fig. 14)",
        sentences=[
            (
                "Of each strategy the request whose latency is nearest to the median. Neighbouring layers "
                "have different colours, initialization is hatched. In the paper's setup retrieval in line "
                "(traditional, pisel, mini) is drawn in its own row too, though it is the weight unit's work."
            ),
        ],
        plots=[
            Plot(
                f"fig14_timeline_{model}_{setup.name}",
                f"{model}, {setup.title}.",
                partial(_draw, shown[model, setup.name], described),
            )
            for model in material.run.choices.timeline_models
            for setup in SETUPS
        ],
        sheets=[
            Sheet(
                "timelines",
                [
                    {
                        "model": model,
                        "setup": setup,
                        "strategy": strategy,
                        "layer": layer,
                        "kind": kind,
                        "start_ms": round(start, 3),
                        "end_ms": round(end, 3),
                    }
                    for (model, setup), requests in shown.items()
                    for strategy, request in requests.items()
                    for layer, kind, start, end in request["spans"]
                ],
            )
        ],
    )


def _typical(material: Material, model: str, setup: Setup) -> dict[str, Row]:
    """By strategy."""
    found = {}
    for strategy in STRATEGIES:
        requests = list(material.of(model, setup, strategy))
        middle = statistics.median(map(client_ms, requests))
        found[strategy] = min(requests, key=lambda one: abs(client_ms(one) - middle))
    return found


def _draw(requests: Mapping[str, Row], described: str, stem: Path) -> None:
    with plots.figure(stem, 9, 6.0, described, nrows=len(STRATEGIES), sharex=True) as (_, panels):
        for axes, strategy in zip(panels, STRATEGIES, strict=True):
            spans = requests[strategy]["spans"]
            start = min(span[2] for span in spans)
            for height, (_, kinds) in enumerate(reversed(ROWS)):
                for kind in kinds:
                    _bars(axes, [span for span in spans if span[1] == kind], height, start)
            axes.set_yticks(range(len(ROWS)), [name for name, _ in reversed(ROWS)], fontsize=7)
            axes.set_ylim(-0.5, len(ROWS) - 0.5)
            axes.grid(visible=False)
            axes.set_title(strategy, loc="left", fontsize=8)
        panels[-1].set_xlabel("ms since the first unit's start")


def _bars(axes: Any, spans: Sequence[Sequence[Any]], height: int, start: float) -> None:
    if not spans:
        return
    axes.broken_barh(
        [(span[2] - start, span[3] - span[2]) for span in spans],
        (height - 0.4, 0.8),
        facecolors=[plots.COLOURS[span[0] % 6] for span in spans],
        edgecolor="white",
        linewidth=0.15,
        hatch="////" if spans[0][1] == "initialize" else None,
    )
