from itertools import pairwise
from typing import Any

import pytest

from handler.timeline import Figures, Span, Suspension, UnitTimes
from runtime.errors import NotFound
from runtime.frames import Timeline
from runtime.requests import Record, Records, trace

NONE = UnitTimes(0.0, 0.0, 0.0)
FIGURES = Figures(
    layers=2, input_ms=0, construct_ms=0, initialize_ms=0, retrieve_ms=0, apply_ms=0, execute_ms=0,
    pipeline_ms=0, work_ms=NONE, wait_ms=NONE, idle_ms=NONE, utilization=1, occupancy=1,
    placeholder_bytes=0, placeholder_usage_ms=0,
)  # fmt: skip


def record(strategy: str, spans: tuple[Span, ...], *held: Suspension) -> Record:
    timeline = Timeline(
        strategy=strategy,
        model="m",
        version="0123456789ab",
        layers=("conv1", "fc"),
        arrival_ns=3000,
        decoded_ns=(3500, 4500),
        spans=spans,
        suspensions=held,
        placeholder_bytes=0,
        figures=FIGURES,
    )
    return Record(
        "mine",
        arrived_ns=1000,
        model="m",
        strategy=strategy,
        received_ns=2000,
        dispatched_ns=3000,
        answered_ns=9000,
        timeline=timeline,
    )


SPANS = (
    Span(0, "retrieve", 3000, 6000),
    Span(1, "retrieve", 4000, 8000),
    Span(0, "construct", 3000, 4000),
    Span(0, "apply", 6000, 6500),
    Span(0, "execute", 6500, 7000),
)


def tracks(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def by_track(shown: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = tracks(shown["traceEvents"])
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in shown["traceEvents"]:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
    return rows


def test_a_trace_has_a_track_for_each_unit_and_for_retrieval() -> None:
    rows = by_track(trace(record("cicada", SPANS, Suspension(1, 5000, 5500))))
    shown = {name: [(e["name"], e["ts"], e["dur"]) for e in row] for name, row in rows.items()}
    assert shown == {
        "proxy": [("receive", 0.0, 1.0), ("queue", 1.0, 1.0)],
        "input": [("input", 2.5, 1.0)],
        "layer": [("conv1", 2.0, 1.0)],
        "weight": [("conv1", 5.0, 0.5)],
        "compute": [("conv1", 5.5, 0.5)],
        "retrieval": [("conv1", 2.0, 3.0)],
        "retrieval 2": [("fc", 3.0, 4.0), ("fc suspended", 4.0, 0.5)],
    }


def test_events_of_one_track_never_cross() -> None:
    """Viewers nest what overlaps on one thread, and lose what crosses."""
    for strategy in ("cicada", "preload"):
        for row in by_track(trace(record(strategy, SPANS, Suspension(1, 5000, 5500)))).values():
            for first, second in pairwise(sorted(row, key=lambda e: (e["ts"], -e["dur"]))):
                end = first["ts"] + first["dur"]
                assert second["ts"] >= end or second["ts"] + second["dur"] <= end


def test_retrieval_in_line_is_the_weight_units_own() -> None:
    spans = (Span(0, "construct", 3000, 4000), Span(0, "retrieve", 4000, 5000))
    rows = by_track(trace(record("pisel", spans)))
    assert [event["cat"] for event in rows["weight"]] == ["retrieve"]


def test_without_a_pipeline_everything_ran_on_the_compute_thread() -> None:
    spans = (Span(0, "initialize", 3000, 4000), Span(0, "retrieve", 4000, 5000))
    rows = by_track(trace(record("traditional", spans)))
    assert [event["cat"] for event in rows["compute"]] == ["initialize", "retrieve"]


def test_a_request_without_an_answer_still_has_a_trace() -> None:
    failed = Record("mine", arrived_ns=0, received_ns=1000)
    assert list(by_track(trace(failed))) == ["proxy"]


def test_spans_are_shown_in_milliseconds_since_the_request_arrived() -> None:
    shown = record("cicada", SPANS).whole()
    assert shown["total_ms"] == 0.008
    assert shown["spans"][0] == {
        "layer": 0,
        "name": "conv1",
        "kind": "retrieve",
        "start_ms": 0.002,
        "end_ms": 0.005,
    }


def test_records_keep_the_last_and_the_later_of_one_id() -> None:
    records = Records(limit=2)
    first, again, second, third = Record("a"), Record("a"), Record("b"), Record("c")
    for one in (first, second, again):
        records.add(one)
    assert list(records) == [again, second]
    records.add(third)
    assert list(records) == [third, again]
    with pytest.raises(NotFound):
        records.get("b")
