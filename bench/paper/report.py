"""From what was measured to the folder's files: sheets of data, plots, and one self-contained HTML page."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.paper import (
    cold,
    comparison,
    density,
    latency,
    memory_over_time,
    motivation,
    placeholders,
    replays,
    sheets,
    timelines,
    units,
    utilization,
)
from bench.paper.choices import SETUPS
from bench.paper.material import Material
from bench.paper.part import WARM, Part

_MOST_SVG_BYTES: Final = 60_000
TITLE: Final = "The Cicada paper, measured again"
_SUBTITLE: Final = (
    "The evaluation of 'Cicada: A Pipeline-Efficient Approach to Serverless Inference with Decoupled "
    "Management', made by `cicada bench paper` on the machine below. Rounds are interleaved; intervals in "
    "brackets are 95 % bootstrap intervals of medians."
)


def write(material: Material) -> Path:
    """All files but the journals, which are there; returns the page's path."""
    run = material.run
    described = json.dumps({**material.sessions[-1], "cache": WARM})
    cold_described = json.dumps({**material.sessions[-1], "cache": cold.COLD})
    parts = [
        motivation.part(material, described),
        latency.part(material, described),
        placeholders.part(material, described),
        memory_over_time.part(material, described),
        units.part(material, described),
        *([density.part(material, described)] if material.density else []),
        utilization.part(material, described),
        timelines.part(material, described),
        replays.part(material, described),
        *([cold.part(material, cold_described)] if material.cold else []),
        comparison.part(material),
    ]
    for folder in (run.data, run.figures):
        folder.mkdir(exist_ok=True)
    for part in parts:
        for sheet in part.sheets:
            sheets.write(run.data, sheet.name, sheet.rows, material.sessions, sheet.cache)
        for plot in part.plots:
            plot.draw(run.figures / plot.name)
    page = run.folder / "report.html"
    page.write_text(_page(material, parts), encoding="utf-8")
    return page


def _page(material: Material, parts: Sequence[Part]) -> str:
    import jinja2  # noqa: PLC0415 an optional extra

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    images = {
        plot.name: _embedded(material.run.figures / plot.name)
        for part in parts
        for plot in part.plots
    }
    return environment.get_template("report.html.j2").render(
        title=TITLE,
        subtitle=_SUBTITLE,
        facts=_facts(material),
        parts=parts,
        images=images,
    )


def _embedded(stem: Path) -> str:
    """A picture within the page, which needs no file beside it; one of very many shapes as pixels."""
    drawn = stem.with_suffix(".svg").read_bytes()
    if len(drawn) <= _MOST_SVG_BYTES:
        return f"data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"
    return (
        f"data:image/png;base64,{base64.b64encode(stem.with_suffix('.png').read_bytes()).decode()}"
    )


def _facts(material: Material) -> list[tuple[str, str]]:
    last: Mapping[str, Any] = material.sessions[-1]
    choices = material.run.choices
    return [
        ("command", last["command"]),
        ("date", ", ".join(session["date"] for session in material.sessions)),
        ("processor", f"{last['processor']}, {last['cores']} cores, {last['threads']} threads"),
        ("memory", f"{last['memory_bytes'] / 1e9:.1f} GB"),
        ("kernel, Python", f"{last['kernel']}, {last['python']}"),
        ("versions", ", ".join(f"{name} {value}" for name, value in last["versions"].items())),
        ("models", ", ".join(choices.models)),
        ("rounds", f"{choices.rounds} of each model, strategy and setup"),
        ("setups", "; ".join(f"{setup.name} is {setup.title}" for setup in SETUPS)),
        ("page cache", "warm, unless a section says otherwise"),
        ("weights", "random; timings do not depend on their values"),
    ]
