"""A request's timeline as a Gantt chart in the terminal (the paper's Fig. 14)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.style import Style
from rich.table import Table
from rich.text import Text

Row = tuple[str, frozenset[str]]

ROWS: Final[tuple[Row, ...]] = (
    ("layer", frozenset({"construct", "initialize"})),
    ("retrieve", frozenset({"retrieve"})),
    ("weight", frozenset({"apply"})),
    ("compute", frozenset({"execute"})),
)
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's, which colour-blind people tell apart; neighbouring layers differ."""
_SOLID: Final = "█"
_INITIALIZING: Final = "▒"
_SUSPENDED: Final = "·"


def chart(request: Mapping[str, Any], width: int) -> Table:
    """The rows layer, retrieve, weight and compute over one time axis, a colour per layer.

    request: what `/requests/{id}` answers. width: columns of the axis. A column shows the layer that
    took the most of it; initialization is hatched, a suspended retrieval dotted.
    """
    spans: Sequence[Mapping[str, Any]] = request["spans"]
    start = min(span["start_ms"] for span in spans)
    end = max(span["end_ms"] for span in spans)
    axis = _Axis(start, end, width)
    table = Table.grid(padding=(0, 1))
    for name, kinds in ROWS:
        chosen = [span for span in spans if span["kind"] in kinds]
        held = request["suspensions"] if name == "retrieve" else ()
        table.add_row(name, axis.draw(chosen, held))
    table.add_row("", _scale(end - start, width))
    return table


class _Axis:
    def __init__(self, start_ms: float, end_ms: float, width: int) -> None:
        self._start = start_ms
        self._column_ms = max(end_ms - start_ms, 1e-6) / width
        self._width = width

    def draw(
        self, spans: Sequence[Mapping[str, Any]], suspensions: Sequence[Mapping[str, Any]]
    ) -> Text:
        longest = [0.0] * self._width
        cells: list[tuple[str, Style]] = [(" ", Style.null())] * self._width
        for span in spans:
            style = Style(color=_COLOURS[span["layer"] % len(_COLOURS)])
            mark = _INITIALIZING if span["kind"] == "initialize" else _SOLID
            for column, share in self._columns(span):
                if share > longest[column]:
                    longest[column] = share
                    cells[column] = (mark, style)
        for held in suspensions:
            for column, share in self._columns(held):
                if share > longest[column] / 2:
                    cells[column] = (_SUSPENDED, cells[column][1])
        return Text.assemble(*cells)

    def _columns(self, span: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        """The columns that a span touches, and how many milliseconds of each."""
        start = (span["start_ms"] - self._start) / self._column_ms
        end = (span["end_ms"] - self._start) / self._column_ms
        for column in range(int(start), min(int(end) + 1, self._width)):
            share = min(end, column + 1) - max(start, column)
            if share > 0:
                yield column, share * self._column_ms


def _scale(length_ms: float, width: int) -> str:
    first, last = "0", f"{length_ms:.1f} ms"
    return first + last.rjust(width - len(first))
