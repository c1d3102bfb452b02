"""What is kept of requests: a record each, the last 256 of them, and one's timeline as a trace."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from handler.strategies import STRATEGIES
from handler.timeline import UNITS, Figures, Kind, Span, kinds_of
from runtime.answers import Json
from runtime.descriptions import MISSING
from runtime.errors import NotFound
from runtime.frames import Timeline
from runtime.reporting import ProxyTimes

KEPT: Final = 256


@dataclass(slots=True)
class Record:
    """One request, from its complete headers to its answer; filled in as it goes.

    Times are nanoseconds of the monotonic clock. `inference` is what tells a request that concerns a
    model from all others: only those are kept and counted.
    """

    id: str
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    arrived_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    inference: bool = False
    model: str | None = None
    version: str | None = None
    strategy: str | None = None
    received_ns: int | None = None
    dispatched_ns: int | None = None
    answered_ns: int | None = None
    status: int | None = None
    error: str | None = None
    timeline: Timeline | None = None
    body_bytes: int = 0
    """What the request's body takes at this moment."""
    retrieved_bytes: int = 0

    @property
    def receive_ms(self) -> float | None:
        """Headers complete to body complete."""
        return _milliseconds(self.arrived_ns, self.received_ns)

    @property
    def queue_ms(self) -> float | None:
        """Body complete to dispatch to a handler."""
        return _milliseconds(self.received_ns, self.dispatched_ns)

    @property
    def total_ms(self) -> float | None:
        """Headers complete to answer ready."""
        return _milliseconds(self.arrived_ns, self.answered_ns)

    def proxy_times(self) -> ProxyTimes:
        """Of an answered request."""
        return ProxyTimes(self.receive_ms or 0.0, self.queue_ms or 0.0, self.total_ms or 0.0)

    def summary(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "at": self.arrived_at.isoformat(timespec="milliseconds"),
            "model": self.model,
            "version": self.version,
            "strategy": self.strategy,
            "status": self.status,
            "error": self.error,
            "receive_ms": self.receive_ms,
            "queue_ms": self.queue_ms,
            "pipeline_ms": self.timeline.figures.pipeline_ms if self.timeline else None,
            "total_ms": self.total_ms,
        }

    def whole(self) -> dict[str, Any]:
        """The summary, the figures, and the spans in milliseconds since the request's arrival."""
        timeline = self.timeline
        if timeline is None:
            return {**self.summary(), "figures": None, "layers": [], "spans": [], "suspensions": []}
        spans = [
            {
                "layer": span.layer,
                "name": timeline.layers[span.layer],
                "kind": span.kind,
                "start_ms": _milliseconds(self.arrived_ns, span.start_ns),
                "end_ms": _milliseconds(self.arrived_ns, span.end_ns),
            }
            for span in timeline.spans
        ]
        suspensions = [
            {
                "layer": held.layer,
                "name": timeline.layers[held.layer],
                "start_ms": _milliseconds(self.arrived_ns, held.start_ns),
                "end_ms": _milliseconds(self.arrived_ns, held.end_ns),
            }
            for held in timeline.suspensions
        ]
        return {
            **self.summary(),
            "figures": asdict(timeline.figures),
            "layers": timeline.layers,
            "spans": spans,
            "suspensions": suspensions,
        }


class Records:
    """The last requests by id; of two with one id the later is shown."""

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """The latest first."""
        return reversed(self._records.values())

    def add(self, record: Record) -> None:
        self._records.pop(record.id, None)
        self._records[record.id] = record
        if len(self._records) > self._limit:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record:
        try:
            return self._records[request_id]
        except KeyError:
            sentence = f"no request of that id is among the last {self._limit}"
            raise NotFound(sentence) from None


class Summary(BaseModel):
    """One request, times in milliseconds; null is what it did not come to."""

    id: str
    at: datetime
    model: str | None
    version: str | None
    strategy: str | None
    status: int | None
    error: str | None
    receive_ms: float | None
    queue_ms: float | None
    pipeline_ms: float | None
    total_ms: float | None


class Listed(BaseModel):
    requests: list[Summary]


class ShownSuspension(BaseModel):
    """Milliseconds since the request's arrival."""

    layer: int
    name: str
    start_ms: float
    end_ms: float


class ShownSpan(ShownSuspension):
    kind: Kind


class Shown(Summary):
    figures: Figures | None
    layers: list[str]
    spans: list[ShownSpan]
    suspensions: list[ShownSuspension]


class ChromeTrace(BaseModel):
    """Chrome's "Trace Event Format", the JSON object form."""

    traceEvents: list[dict[str, Any]]  # noqa: N815 the format's name
    displayTimeUnit: Literal["ms"]  # noqa: N815
    otherData: dict[str, Any]  # noqa: N815


router = APIRouter(prefix="/requests", tags=["requests"])


def _records(request: Request) -> Records:
    records: Records = request.app.state.service.records
    return records


@router.get("", response_model=Listed, summary="The last 256 inference requests, the latest first")
async def list_requests(request: Request) -> Json:
    return Json({"requests": [record.summary() for record in _records(request)]})


@router.get(
    "/{request_id}",
    response_model=Shown,
    responses=MISSING,
    summary="One request's times, figures and spans",
)
async def show_request(request: Request, request_id: str) -> Json:
    return Json(_records(request).get(request_id).whole())


@router.get(
    "/{request_id}/trace",
    response_model=ChromeTrace,
    responses=MISSING,
    summary="One request's timeline in Chrome's trace-event form, which Perfetto opens",
)
async def trace_request(request: Request, request_id: str) -> Json:
    return Json(trace(_records(request).get(request_id)))


def trace(record: Record) -> dict[str, Any]:
    """The JSON object form of Chrome's "Trace Event Format": complete events (X) in microseconds."""
    events = _Trace(record)
    events.add_proxy()
    if record.timeline is not None:
        events.add_handler(record.timeline)
    return {
        "traceEvents": [*events.tracks(), *events.events],
        "displayTimeUnit": "ms",
        "otherData": {"id": record.id, "model": record.model, "strategy": record.strategy},
    }


class _Trace:
    """Events on tracks; a track is a thread to the viewer, and events of one track never cross."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._tracks: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []

    def tracks(self) -> Iterator[dict[str, Any]]:
        process = {"ph": "M", "pid": 1, "name": "process_name"}
        yield {**process, "args": {"name": f"cicada {self._record.id}"}}
        for name, number in self._tracks.items():
            track = {"ph": "M", "pid": 1, "tid": number}
            yield {**track, "name": "thread_name", "args": {"name": name}}
            yield {**track, "name": "thread_sort_index", "args": {"sort_index": number}}

    def add_proxy(self) -> None:
        record = self._record
        if record.received_ns is not None:
            self._add("proxy", "receive", "receive", record.arrived_ns, record.received_ns)
            if record.dispatched_ns is not None:
                self._add("proxy", "queue", "queue", record.received_ns, record.dispatched_ns)

    def add_handler(self, timeline: Timeline) -> None:
        self._add("input", "input", "decode", *timeline.decoded_ns)
        for unit in UNITS:
            self._track(unit)
        lanes = _Lanes()
        lane_of: dict[int, str] = {}
        for span in sorted(timeline.spans, key=lambda span: (span.start_ns, -span.end_ns)):
            track = _unit(span, timeline.strategy) or lanes.place(span.start_ns, span.end_ns)
            if span.kind == "retrieve":
                lane_of[span.layer] = track
            name = timeline.layers[span.layer]
            self._add(track, name, span.kind, span.start_ns, span.end_ns, {"layer": span.layer})
        for held in timeline.suspensions:
            track = lane_of.get(held.layer, "retrieval")
            name = f"{timeline.layers[held.layer]} suspended"
            self._add(track, name, "suspended", held.start_ns, held.end_ns, {"layer": held.layer})

    def _track(self, name: str) -> int:
        return self._tracks.setdefault(name, len(self._tracks) + 1)

    def _add(
        self,
        track: str,
        name: str,
        category: str,
        start_ns: int,
        end_ns: int,
        args: dict[str, Any] | None = None,
    ) -> None:
        event = {
            "ph": "X",
            "name": name,
            "cat": category,
            "ts": (start_ns - self._record.arrived_ns) / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "pid": 1,
            "tid": self._track(track),
            "args": {"kind": category, **(args or {})},
        }
        self.events.append(event)


class _Lanes:
    """Tracks for retrievals: several run at once, and spans that cross need tracks of their own."""

    def __init__(self) -> None:
        self._ends: list[int] = []

    def place(self, start_ns: int, end_ns: int) -> str:
        for lane, end in enumerate(self._ends):
            if end <= start_ns:
                self._ends[lane] = end_ns
                return self._name(lane)
        self._ends.append(end_ns)
        return self._name(len(self._ends) - 1)

    @staticmethod
    def _name(lane: int) -> str:
        return "retrieval" if lane == 0 else f"retrieval {lane + 1}"


def _unit(span: Span, strategy: str) -> str | None:
    """The unit on whose thread a span ran; None for a retrieval on no unit's."""
    if not STRATEGIES[strategy].pipelined:
        return "compute"
    decoupled = STRATEGIES[strategy].decoupled
    return next((unit for unit in UNITS if span.kind in kinds_of(unit, decoupled=decoupled)), None)


def _milliseconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e6
