"""The headers against the grammars of their standards, with parsers that know nothing of how they were made."""

import re
from decimal import Decimal
from typing import Any

import http_sf
import pytest
from pydantic import ValidationError

from handler.strategies import STRATEGIES
from handler.timeline import Figures, UnitTimes
from runtime.frames import Timeline
from runtime.reporting import NAMES, ProxyTimes, headers

FIGURES = Figures(
    layers=22,
    input_ms=1.9,
    construct_ms=0.9004,
    initialize_ms=0.0,
    retrieve_ms=9.8,
    apply_ms=1e-9,
    execute_ms=999_999_999.9999,
    pipeline_ms=56.9,
    work_ms=UnitTimes(0.9, 1.4, 52.7),
    wait_ms=UnitTimes(0.2, 61.3, 604.8),
    idle_ms=UnitTimes(-0.0, 55.5, 4.2),
    utilization=0.9984,
    occupancy=1.0,
    placeholder_bytes=3194629,
    placeholder_usage_ms=61.3,
)
TIMES = ProxyTimes(receive=0.4, queue=0.1, total=60.2)


def timeline(**changes: Any) -> Timeline:
    values = {
        "strategy": "cicada",
        "model": "resnet50",
        "version": "3f9a0c1b2d4e",
        "layers": ("conv1",),
        "arrival_ns": 0,
        "decoded_ns": (0, 0),
        "spans": (),
        "suspensions": (),
        "placeholder_bytes": 0,
        "figures": FIGURES,
    }
    return Timeline(**{**values, **changes})


# W3C Server Timing, section 4.1; tokens and quoted strings: RFC 9110, sections 5.6.2 and 5.6.4.
NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
VALUE = rf'(?:{NAME}|"(?:[^"\\]|\\.)*")'
PARAMETER = re.compile(rf"[ \t]*;[ \t]*({NAME})(?:[ \t]*=[ \t]*({VALUE}))?")
METRIC = re.compile(rf"({NAME})((?:{PARAMETER.pattern})*)")


def server_timing(value: str) -> dict[str, dict[str, str]]:
    """Name -> parameters; whatever is no metric is an error."""
    metrics = {}
    position = 0
    while True:
        metric = METRIC.match(value, position)
        assert metric, f"no metric at {position} of {value!r}"
        metrics[metric[1]] = dict(PARAMETER.findall(metric[2]))
        position = metric.end()
        if position == len(value):
            return metrics
        separator = re.compile(r"[ \t]*,[ \t]*").match(value, position)
        assert separator, f"no separator at {position} of {value!r}"
        position = separator.end()


def test_server_timing_is_its_grammar() -> None:
    metrics = server_timing(headers(timeline(), TIMES)["Server-Timing"])
    assert all(list(parameters) == ["dur"] for parameters in metrics.values())
    assert {name: float(parameters["dur"]) for name, parameters in metrics.items()} == {
        "receive": 0.4,
        "queue": 0.1,
        "input": 1.9,
        "construct": 0.9,
        "initialize": 0.0,
        "retrieve": 9.8,
        "apply": 0.0,
        "execute": 1_000_000_000.0,
        "pipeline": 56.9,
        "total": 60.2,
    }


@pytest.mark.parametrize("value", ["a;dur=1,,b", "a;dur=", "a b", ";dur=1", "a;dur=1;", "a,"])
def test_the_grammar_refuses_what_is_none(value: str) -> None:
    with pytest.raises(AssertionError):
        server_timing(value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Cicada-Work", {"layer": Decimal("0.9"), "weight": Decimal("1.4"), "compute": 52.7}),
        ("Cicada-Wait", {"layer": 0.2, "weight": 61.3, "compute": 604.8}),
        ("Cicada-Idle", {"layer": 0, "weight": 55.5, "compute": 4.2}),
        ("Cicada-Placeholder", {"bytes": 3194629, "usage": 61.3}),
    ],
)
def test_dictionaries_are_structured_fields(name: str, expected: dict[str, float]) -> None:
    value = headers(timeline(), TIMES)[name]
    parsed: Any = http_sf.parse(value.encode(), tltype="dictionary")
    assert {key: float(item) for key, (item, parameters) in parsed.items()} == pytest.approx(
        {key: float(number) for key, number in expected.items()}
    )
    assert not any(parameters for _, parameters in parsed.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Cicada-Layers", 22), ("Cicada-Utilization", 0.998), ("Cicada-Occupancy", 1.0)],
)
def test_numbers_are_structured_fields(name: str, expected: float) -> None:
    parsed: Any = http_sf.parse(headers(timeline(), TIMES)[name].encode(), tltype="item")
    assert float(parsed[0]) == expected


def test_every_header_has_one_line_of_visible_ascii() -> None:
    told = headers(timeline(), TIMES)
    assert tuple(told) == NAMES
    for value in told.values():
        assert re.fullmatch(r"[!-~]([ -~]*[!-~])?", value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_told_as_it_is(strategy: str) -> None:
    assert headers(timeline(strategy=strategy), TIMES)["Cicada-Strategy"] == strategy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "resnet50\r\nSet-Cookie: a=b"),
        ("model", "Ünïcode"),
        ("model", ""),
        ("version", "3f9a0c1b2d4e\n"),
        ("version", "latest, other"),
        ("strategy", "cicada\r\n\r\n<html>"),
    ],
)
def test_what_could_shape_a_header_is_no_timeline(field: str, value: str) -> None:
    """The only texts among the headers' values come with the handler's frame, and are checked there."""
    with pytest.raises(ValidationError):
        timeline(**{field: value})
