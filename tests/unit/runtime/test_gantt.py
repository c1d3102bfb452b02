from typing import Any

from rich.text import Text

from runtime import gantt


def span(layer: int, kind: str, start_ms: float, end_ms: float) -> dict[str, Any]:
    return {"layer": layer, "kind": kind, "start_ms": start_ms, "end_ms": end_ms}


def rows(request: dict[str, Any], width: int) -> dict[str, Text]:
    labels, bars = (list(column.cells) for column in gantt.chart(request, width).columns)
    return {
        str(label): bar
        for label, bar in zip(labels, bars, strict=True)
        if isinstance(bar, Text) and label
    }


REQUEST = {
    "spans": [
        span(0, "construct", 10.0, 11.0),
        span(0, "initialize", 11.0, 14.0),
        span(1, "construct", 14.0, 15.0),
        span(0, "retrieve", 10.0, 12.0),
        span(1, "retrieve", 12.0, 18.0),
        span(0, "apply", 14.0, 15.0),
        span(1, "apply", 18.0, 19.0),
        span(0, "execute", 15.0, 18.0),
        span(1, "execute", 19.0, 20.0),
    ],
    "suspensions": [{"layer": 1, "start_ms": 14.0, "end_ms": 16.0}],
}


def test_every_unit_has_a_row_on_one_axis() -> None:
    """A column is a millisecond here, so that the rows can be counted by hand."""
    drawn = rows(REQUEST, 10)
    assert {name: bar.plain for name, bar in drawn.items()} == {
        "layer": "█▒▒▒█     ",
        "retrieve": "████··██  ",
        "weight": "    █   █ ",
        "compute": "     ███ █",
    }


def test_layers_differ_in_colour() -> None:
    compute = rows(REQUEST, 10)["compute"]
    first, second = compute.spans[0].style, compute.spans[-1].style
    assert first != second


def test_a_column_shows_what_took_the_most_of_it() -> None:
    short_and_long = {
        "spans": [span(0, "construct", 0.0, 1.0), span(0, "initialize", 1.0, 10.0)],
        "suspensions": [],
    }
    assert rows(short_and_long, 1)["layer"].plain == "▒"


def test_the_axis_tells_its_length() -> None:
    (_, bars) = gantt.chart(REQUEST, 40).columns
    assert str(list(bars.cells)[-1]) == "0" + "10.0 ms".rjust(39)
