"""What a section gives to the report: sentences, tables, plots; and to the folder: sheets of data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM = "warm: every file was read by a request before, nothing was dropped"


@dataclass(frozen=True, slots=True)
class Shown:
    """A table as the report shows it; the first column's cells are names, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """draw: writes the plot's SVG and PNG, given their path without suffix."""

    name: str
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Sheet:
    name: str
    rows: Sequence[Mapping[str, Any]]
    cache: str = WARM


@dataclass(frozen=True, slots=True)
class Part:
    title: str
    sentences: Sequence[str]
    tables: Sequence[Shown] = field(default=())
    plots: Sequence[Plot] = field(default=())
    sheets: Sequence[Sheet] = field(default=())


def percent(part: float) -> str:
    return f"{part:.1%}"


def change(part: float) -> str:
    """With its sign."""
    return f"{part:+.1%}"


def number(value: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f}"
