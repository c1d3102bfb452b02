"""A request's spans, and the figures that follow from them (DESIGN section 8; paper, section V)."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Kind = Literal["construct", "initialize", "retrieve", "apply", "execute"]
Unit = Literal["layer", "weight", "compute"]
Interval = tuple[int, int]

KINDS: Final[tuple[Kind, ...]] = ("construct", "initialize", "retrieve", "apply", "execute")
UNITS: Final[tuple[Unit, ...]] = ("layer", "weight", "compute")

now_ns = time.monotonic_ns
"""The one clock of all spans; CLOCK_MONOTONIC, so the proxy's times are comparable."""


def kinds_of(unit: Unit, *, decoupled: bool) -> tuple[Kind, ...]:
    """What a unit does; retrieval is the weight unit's work only where it is in line."""
    if unit == "layer":
        return ("construct", "initialize")
    if unit == "compute":
        return ("execute",)
    return ("apply",) if decoupled else ("retrieve", "apply")


class Span(NamedTuple):
    """What one unit or retrieval did for one layer, nanoseconds on the monotonic clock."""

    layer: int
    kind: Kind
    start_ns: int
    end_ns: int


class Suspension(NamedTuple):
    """A while in which the scheduler held a layer's retrieval, nanoseconds."""

    layer: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class UnitTimes:
    layer: float
    weight: float
    compute: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What the response's headers tell; milliseconds, bytes, ratios from 0 to 1."""

    layers: int
    input_ms: float
    construct_ms: float
    initialize_ms: float
    retrieve_ms: float
    apply_ms: float
    execute_ms: float
    pipeline_ms: float
    work_ms: UnitTimes
    wait_ms: UnitTimes
    idle_ms: UnitTimes
    utilization: float
    occupancy: float
    placeholder_bytes: int
    placeholder_usage_ms: float


@dataclass(slots=True)
class Timeline:
    """Collects a request's spans. Appending is atomic, so every unit may record."""

    layers: Sequence[str]
    decoupled: bool
    """Whether retrieval is asynchronous; in line it is the weight unit's own work."""
    arrival_ns: int
    decoded: Interval = (0, 0)
    spans: list[Span] = field(default_factory=list)
    suspensions: list[Suspension] = field(default_factory=list)
    placeholder_bytes: int = 0

    def record(self, layer: int, kind: Kind, start_ns: int, end_ns: int) -> None:
        self.spans.append(Span(layer, kind, start_ns, end_ns))

    def figures(self) -> Figures:
        """The figures of a finished request; it has at least one `execute` span."""
        return _Figuring(self).figures()

    def waits(self, unit: Literal["weight", "compute"]) -> dict[int, int]:
        """Of a finished request: how long the unit waited for each of its layers, nanoseconds."""
        return _Figuring(self).waits(unit)


class _Figuring:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._by_kind: dict[Kind, list[Span]] = defaultdict(list)
        recorded = tuple(timeline.spans)
        self._start = min(span.start_ns for span in recorded)
        self._end = max(span.end_ns for span in recorded if span.kind == "execute")
        # A layer to which the forward does not come may still be on its way into memory.
        self._spans = [
            span if span.end_ns <= self._end else span._replace(end_ns=self._end)
            for span in recorded
            if span.start_ns <= self._end
        ]
        for span in self._spans:
            self._by_kind[span.kind].append(span)

    def figures(self) -> Figures:
        timeline = self._timeline
        pipeline = self._end - self._start
        occupied = union_ns(_intervals(self._spans))
        useful = occupied
        if self._by_kind["initialize"]:
            useful = union_ns(_intervals(s for s in self._spans if s.kind != "initialize"))
        return Figures(
            layers=len(timeline.layers),
            input_ms=_ms(timeline.decoded[1] - timeline.decoded[0]),
            construct_ms=_ms(self._total("construct")),
            initialize_ms=_ms(self._total("initialize")),
            retrieve_ms=_ms(self._retrieving()),
            apply_ms=_ms(self._total("apply")),
            execute_ms=_ms(self._total("execute")),
            pipeline_ms=_ms(pipeline),
            work_ms=self._per_unit(self._work),
            wait_ms=self._per_unit(self._wait),
            idle_ms=self._per_unit(self._idle),
            utilization=useful / pipeline,
            occupancy=occupied / pipeline,
            placeholder_bytes=timeline.placeholder_bytes,
            placeholder_usage_ms=_ms(self._usage()),
        )

    def _per_unit(self, measure: Callable[[Unit], int]) -> UnitTimes:
        return UnitTimes(*(_ms(measure(unit)) for unit in UNITS))

    def _total(self, kind: Kind) -> int:
        return sum(span.end_ns - span.start_ns for span in self._by_kind[kind])

    def _retrieving(self) -> int:
        retrievals = self._by_kind["retrieve"]
        if not self._timeline.suspensions:
            return union_ns(_intervals(retrievals))
        held: dict[int, list[Interval]] = defaultdict(list)
        for suspension in self._timeline.suspensions:
            held[suspension.layer].append((suspension.start_ns, suspension.end_ns))
        return union_ns(
            part
            for span in retrievals
            for part in without((span.start_ns, span.end_ns), held[span.layer])
        )

    def _spans_of(self, unit: Unit) -> list[Span]:
        kinds = kinds_of(unit, decoupled=self._timeline.decoupled)
        return [span for kind in kinds for span in self._by_kind[kind]]

    def _work(self, unit: Unit) -> int:
        return sum(span.end_ns - span.start_ns for span in self._spans_of(unit))

    def _idle(self, unit: Unit) -> int:
        intervals = _intervals(self._spans_of(unit))
        if not intervals:
            return 0
        return max(end for _, end in intervals) - self._start - union_ns(intervals)

    def _wait(self, unit: Unit) -> int:
        if unit == "layer":
            first = min(span.start_ns for span in self._spans_of("layer"))
            return max(0, first - self._timeline.arrival_ns)
        return sum(self.waits(unit).values())

    def waits(self, unit: Literal["weight", "compute"]) -> dict[int, int]:
        constructed = _last_ends(self._spans_of("layer"))
        # A layer without weights has no A: what precedes its execution is its construction.
        before = (
            constructed if unit == "weight" else constructed | _last_ends(self._by_kind["apply"])
        )
        starts = _first_starts(self._spans_of(unit))
        return {layer: max(0, start - before[layer]) for layer, start in starts.items()}

    def _usage(self) -> int:
        constructed = _last_ends(self._spans_of("layer"))
        applied = _first_starts(self._by_kind["apply"])
        return sum(start - constructed[layer] for layer, start in applied.items())


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(start, end) for _, _, start, end in spans]


def _first_starts(spans: Iterable[Span]) -> dict[int, int]:
    starts: dict[int, int] = {}
    for layer, _, start, _ in spans:
        if layer not in starts or start < starts[layer]:
            starts[layer] = start
    return starts


def _last_ends(spans: Iterable[Span]) -> dict[int, int]:
    ends: dict[int, int] = {}
    for layer, _, _, end in spans:
        if layer not in ends or end > ends[layer]:
            ends[layer] = end
    return ends


def union_ns(intervals: Iterable[Interval]) -> int:
    """The length of the union of intervals, overlaps counted once."""
    total = 0
    reach: int | None = None
    for start, end in sorted(intervals):
        if reach is None or start > reach:
            total += end - start
            reach = end
        elif end > reach:
            total += end - reach
            reach = end
    return total


def without(interval: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """What is left of an interval when the holes are cut out."""
    parts: list[Interval] = []
    start, end = interval
    for hole_start, hole_end in sorted(holes):
        if hole_start > start:
            parts.append((start, min(hole_start, end)))
        start = max(start, hole_end)
    if start < end:
        parts.append((start, end))
    return [(first, last) for first, last in parts if first < last]


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6
