"""Every figure against DESIGN section 8, counted tick by tick."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.timeline import (
    UNITS,
    Figures,
    Kind,
    Span,
    Suspension,
    Timeline,
    Unit,
    UnitTimes,
    union_ns,
    without,
)

MS = 1_000_000
Ticks = set[int]


def ticks(start: int, end: int) -> Ticks:
    """The unit intervals that [start, end) consists of."""
    return set(range(start, end))


class Reference:
    """The figures by their definitions, from sets of occupied ticks."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.start = min(span.start_ns for span in timeline.spans)
        self.end = max(span.end_ns for span in self.of("execute"))
        self.pipeline = self.end - self.start

    def of(self, *kinds: Kind) -> list[Span]:
        return [span for span in self.timeline.spans if span.kind in kinds]

    def of_unit(self, unit: Unit) -> list[Span]:
        if unit == "layer":
            return self.of("construct", "initialize")
        if unit == "compute":
            return self.of("execute")
        return self.of("apply") if self.timeline.decoupled else self.of("retrieve", "apply")

    def total(self, *kinds: Kind) -> int:
        return sum(span.end_ns - span.start_ns for span in self.of(*kinds))

    def covered(self, spans: list[Span]) -> Ticks:
        return set().union(*(ticks(span.start_ns, span.end_ns) for span in spans))

    def retrieving(self) -> int:
        busy: Ticks = set()
        for span in self.of("retrieve"):
            own = ticks(span.start_ns, span.end_ns)
            for held in self.timeline.suspensions:
                if held.layer == span.layer:
                    own -= ticks(held.start_ns, held.end_ns)
            busy |= own
        return len(busy)

    def work(self, unit: Unit) -> int:
        return sum(span.end_ns - span.start_ns for span in self.of_unit(unit))

    def idle(self, unit: Unit) -> int:
        spans = self.of_unit(unit)
        if not spans:
            return 0
        last = max(span.end_ns for span in spans)
        return len(ticks(self.start, last) - self.covered(spans))

    def wait(self, unit: Unit) -> int:
        if unit == "layer":
            return max(0, min(s.start_ns for s in self.of_unit("layer")) - self.timeline.arrival_ns)
        total = 0
        for layer in range(len(self.timeline.layers)):
            own = [span for span in self.of_unit(unit) if span.layer == layer]
            if own:
                start = min(span.start_ns for span in own)
                total += max(0, start - self.preceding_end(unit, layer))
        return total

    def preceding_end(self, unit: Unit, layer: int) -> int:
        constructed = max(s.end_ns for s in self.of("construct", "initialize") if s.layer == layer)
        if unit == "weight":
            return constructed
        applied = [span.end_ns for span in self.of("apply") if span.layer == layer]
        return max(applied) if applied else constructed

    def usage(self) -> int:
        return sum(
            span.start_ns - self.preceding_end("weight", span.layer) for span in self.of("apply")
        )

    def figures(self) -> Figures:
        return Figures(
            layers=len(self.timeline.layers),
            input_ms=(self.timeline.decoded[1] - self.timeline.decoded[0]) / MS,
            construct_ms=self.total("construct") / MS,
            initialize_ms=self.total("initialize") / MS,
            retrieve_ms=self.retrieving() / MS,
            apply_ms=self.total("apply") / MS,
            execute_ms=self.total("execute") / MS,
            pipeline_ms=self.pipeline / MS,
            work_ms=UnitTimes(*(self.work(unit) / MS for unit in UNITS)),
            wait_ms=UnitTimes(*(self.wait(unit) / MS for unit in UNITS)),
            idle_ms=UnitTimes(*(self.idle(unit) / MS for unit in UNITS)),
            utilization=len(self.covered(self.of("construct", "retrieve", "apply", "execute")))
            / self.pipeline,
            occupancy=len(self.covered(self.timeline.spans)) / self.pipeline,
            placeholder_bytes=self.timeline.placeholder_bytes,
            placeholder_usage_ms=self.usage() / MS,
        )


intervals = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda at: (at[0], at[0] + at[1]))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Spans in any places at all, even such as no pipeline could have had."""
    count = draw(st.integers(1, 4))
    timeline = Timeline(
        layers=[f"layer{index}" for index in range(count)],
        decoupled=draw(st.booleans()),
        arrival_ns=draw(st.integers(0, 30)),
        decoded=draw(intervals),
        placeholder_bytes=draw(st.integers(0, 1 << 40)),
    )
    for layer in range(count):
        timeline.record(layer, "construct", *draw(intervals))
        if draw(st.booleans()):
            timeline.record(layer, "initialize", *draw(intervals))
        if draw(st.booleans()):
            timeline.record(layer, "retrieve", *draw(intervals))
            timeline.record(layer, "apply", *draw(intervals))
            for start, end in draw(st.lists(intervals, max_size=3)):
                timeline.suspensions.append(Suspension(layer, start, end))
        timeline.record(layer, "execute", *draw(intervals))
    timeline.record(count - 1, "execute", 90, 90 + draw(st.integers(1, 10)))
    timeline.spans = draw(st.permutations(timeline.spans))
    return timeline


@given(timelines())
def test_every_figure_is_its_definition_counted_tick_by_tick(timeline: Timeline) -> None:
    found, expected = timeline.figures(), Reference(timeline).figures()

    for name, value in asdict(expected).items():
        assert asdict(found)[name] == pytest.approx(value), name


@given(st.lists(intervals))
def test_the_union_counts_each_tick_once(spans: list[tuple[int, int]]) -> None:
    assert union_ns(spans) == len(set().union(*(ticks(*span) for span in spans)))


@given(intervals, st.lists(intervals))
def test_cutting_holes_leaves_exactly_the_ticks_outside_them(
    interval: tuple[int, int], holes: list[tuple[int, int]]
) -> None:
    parts = without(interval, holes)

    left = ticks(*interval) - set().union(*(ticks(*hole) for hole in holes))
    assert set().union(*(ticks(*part) for part in parts)) == left
    assert sum(end - start for start, end in parts) == len(left), "the parts are disjoint"
    assert all(start < end for start, end in parts)


def test_the_figures_of_a_decoupled_request_counted_by_hand() -> None:
    """Three layers: `conv` and `fc` have weights, `relu` has none; ticks of one millisecond.

              0         1         2
              0123456789012345678901234567
    layer       LLLILLI                      L construct, I initialize
    W of conv  WWWWWWWWWW
    W of fc     WW----WWWWWW                 - suspended
    weight               AA  AAA
    compute                EEEEE E    EEEE
    """
    timeline = Timeline(["conv", "relu", "fc"], decoupled=True, arrival_ns=0, decoded=(0, 3 * MS))
    timeline.placeholder_bytes = 77
    rows: tuple[tuple[int, Kind, int, int], ...] = (
        (0, "construct", 2, 5),
        (0, "initialize", 5, 6),
        (1, "construct", 6, 7),
        (2, "construct", 7, 8),
        (2, "initialize", 8, 9),
        (0, "retrieve", 1, 11),
        (2, "retrieve", 2, 14),
        (0, "apply", 11, 13),
        (2, "apply", 15, 18),
        (0, "execute", 13, 18),
        (1, "execute", 19, 20),
        (2, "execute", 24, 28),
    )
    for layer, kind, start, end in rows:
        timeline.record(layer, kind, start * MS, end * MS)
    timeline.suspensions.append(Suspension(2, 4 * MS, 8 * MS))

    assert timeline.figures() == Figures(
        layers=3,
        input_ms=3,
        construct_ms=3 + 1 + 1,
        initialize_ms=1 + 1,
        retrieve_ms=13,  # 1 to 14: what fc's suspension leaves out, conv covers
        apply_ms=2 + 3,
        execute_ms=5 + 1 + 4,
        pipeline_ms=28 - 1,
        work_ms=UnitTimes(layer=7, weight=5, compute=10),
        wait_ms=UnitTimes(
            layer=2,  # arrival at 0, first L at 2
            weight=(11 - 6) + (15 - 9),
            compute=(13 - 13) + (19 - 7) + (24 - 18),  # relu waits for its construction alone
        ),
        idle_ms=UnitTimes(
            layer=(9 - 1) - 7,
            weight=(18 - 1) - 5,
            compute=(28 - 1) - 10,
        ),
        utilization=(18 - 1 + 1 + 4) / 27,  # 1 to 18, 19 to 20, 24 to 28
        occupancy=(18 - 1 + 1 + 4) / 27,
        placeholder_bytes=77,
        placeholder_usage_ms=(11 - 6) + (15 - 9),
    )


def test_initialization_is_occupied_time_but_not_utilized_time() -> None:
    timeline = Timeline(["fc"], decoupled=False, arrival_ns=5)
    timeline.record(0, "construct", 10, 20)
    timeline.record(0, "initialize", 20, 60)
    timeline.record(0, "retrieve", 60, 80)
    timeline.record(0, "apply", 80, 90)
    timeline.record(0, "execute", 90, 110)

    figures = timeline.figures()

    assert figures.utilization == 60 / 100
    assert figures.occupancy == 1


def test_in_line_retrieval_is_the_weight_units_work_and_asynchronous_retrieval_is_not() -> None:
    figures = {}
    for decoupled in (False, True):
        timeline = Timeline(["fc"], decoupled=decoupled, arrival_ns=0)
        timeline.record(0, "construct", 0, 10 * MS)
        timeline.record(0, "retrieve", 12 * MS, 20 * MS)
        timeline.record(0, "apply", 20 * MS, 23 * MS)
        timeline.record(0, "execute", 25 * MS, 30 * MS)
        figures[decoupled] = timeline.figures()

    assert figures[False].work_ms.weight == 8 + 3
    assert figures[False].wait_ms.weight == 12 - 10
    assert figures[False].idle_ms.weight == 12
    assert figures[True].work_ms.weight == 3
    assert figures[True].wait_ms.weight == 20 - 10
    assert figures[True].idle_ms.weight == 20
    assert figures[False].placeholder_usage_ms == figures[True].placeholder_usage_ms == 20 - 10


@st.composite
def pipelines(draw: st.DrawFn) -> Timeline:
    """Spans as the units produce them: one layer at a time per unit, each after what it needs."""
    decoupled = draw(st.booleans())
    count = draw(st.integers(1, 8))
    timeline = Timeline([str(index) for index in range(count)], decoupled, arrival_ns=0)
    duration = st.integers(1, 50)
    layer_free = retrieval_free = weight_free = compute_free = draw(st.integers(0, 20))
    for layer in range(count):
        start = layer_free
        layer_free += draw(duration)
        timeline.record(layer, "construct", start, layer_free)
        if draw(st.booleans()):
            start = layer_free
            layer_free += draw(duration)
            timeline.record(layer, "initialize", start, layer_free)
        ready = layer_free
        if draw(st.booleans()):
            start = retrieval_free if decoupled else max(weight_free, layer_free)
            retrieved = start + draw(duration)
            retrieval_free = retrieved if draw(st.booleans()) else start
            timeline.record(layer, "retrieve", start, retrieved)
            start = max(weight_free, retrieved, layer_free)
            ready = weight_free = start + draw(duration)
            timeline.record(layer, "apply", start, weight_free)
        start = max(compute_free, ready)
        compute_free = start + draw(duration)
        timeline.record(layer, "execute", start, compute_free)
    return timeline


@given(pipelines())
def test_the_invariants_hold_for_every_possible_pipeline(timeline: Timeline) -> None:
    figures = timeline.figures()

    assert 0 < figures.utilization <= figures.occupancy <= 1
    for unit in UNITS:
        work, idle = getattr(figures.work_ms, unit), getattr(figures.idle_ms, unit)
        assert 0 <= work <= figures.pipeline_ms
        assert idle >= 0
        assert work + idle <= figures.pipeline_ms * (1 + 1e-9)
        assert getattr(figures.wait_ms, unit) >= 0
    assert figures.retrieve_ms <= figures.pipeline_ms
    assert figures.placeholder_usage_ms >= 0


def test_figures_go_into_a_frame_as_json() -> None:
    timeline = Timeline(["fc"], decoupled=True, arrival_ns=0)
    timeline.record(0, "construct", 0, 10)
    timeline.record(0, "execute", 10, 20)

    figures = asdict(timeline.figures())

    assert json.loads(json.dumps(figures)) == figures
    assert figures["idle_ms"] == {"layer": 0, "weight": 0, "compute": 10 / MS}
