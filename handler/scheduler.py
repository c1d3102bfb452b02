"""The priority-aware scheduler (paper, section III-E and Algorithm 1): pure logic, no threads, no clock of its own."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

_INITIAL_BYTES_PER_NS: Final = 1.0
"""1 GB/s: what a retrieval is expected to reach before any was recorded."""
_INITIAL_CONSTRUCTION_NS: Final = 50_000
_SHORT_NS: Final = 1_000_000
_ADAPTATION: Final = 0.25
"""Weight of the newest duration in the recorded mean."""


class Durations:
    """Recorded durations D_L and D_W of one model's layers, nanoseconds, adapting request by request.

    Algorithm 1 decides by D_W alone; D_L is recorded with it, as the paper has it.

    in_memory: whether the last request found every weight in the page cache, and had but to map it.
    decoding_ns: how long it took to decode the last input of each kind.
    """

    __slots__ = ("_construction", "_retrieval", "decoding_ns", "in_memory")

    def __init__(self, layer_bytes: Iterable[int]) -> None:
        self.in_memory = False
        self.decoding_ns: dict[str, int] = {}
        self._retrieval: list[float] = [size / _INITIAL_BYTES_PER_NS for size in layer_bytes]
        self._construction: list[float] = [_INITIAL_CONSTRUCTION_NS] * len(self._retrieval)

    def retrieval_ns(self, layer: int) -> float:
        return self._retrieval[layer]

    def construction_ns(self, layer: int) -> float:
        return self._construction[layer]

    def decodes_first(self, kind: str) -> bool:
        """Whether an input of this kind is better decoded before loading begins.

        So it is where loading waits for no storage and decoding is short: side by side, the units but
        take the interpreter from each other.
        """
        return self.in_memory and self.decoding_ns.get(kind, _SHORT_NS) < _SHORT_NS

    def retrieved(self, layer: int, duration_ns: int) -> None:
        self._retrieval[layer] += _ADAPTATION * (duration_ns - self._retrieval[layer])

    def constructed(self, layer: int, duration_ns: int) -> None:
        self._construction[layer] += _ADAPTATION * (duration_ns - self._construction[layer])


class DurationRecords:
    """The durations of the models served lately, by a key that names the version."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._records: OrderedDict[str, Durations] = OrderedDict()

    def of(self, key: str, layer_bytes: Iterable[int]) -> Durations:
        durations = self._records.get(key)
        if durations is None:
            durations = self._records[key] = Durations(layer_bytes)
        self._records.move_to_end(key)
        if len(self._records) > self._most:
            self._records.popitem(last=False)
        return durations


@dataclass(frozen=True, slots=True)
class Decision:
    """Retrievals to hold at their next chunk, and held ones to let go on."""

    suspend: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()


_NOTHING: Final = Decision()


class PriorityAwareScheduler:
    """Holds later retrievals back while the needed one is late.

    The needed layer is the lowest whose weights have not been applied. Its retrieval is late when it
    is unfinished after its issue plus its recorded duration; then every running retrieval of a later
    layer is suspended, and all go on when it has finished. Not earlier than that: with quick
    construction the needed layer is nearly always unfinished, and retrieval would become serial.

    Every event method returns the decision that follows from it; `review` is the event that time has
    passed. The cost is O(n) in the retrievals in flight. Calls must not overlap (the caller locks).
    """

    __slots__ = (
        "_applied",
        "_clock",
        "_durations",
        "_finished",
        "_issued",
        "_order",
        "_position",
        "_running",
        "_suspended",
    )

    def __init__(
        self, layers: Iterable[int], durations: Durations, clock: Callable[[], int]
    ) -> None:
        self._order = sorted(layers)
        self._durations = durations
        self._clock = clock
        self._position = 0
        self._issued: dict[int, int] = {}
        self._finished: set[int] = set()
        self._applied: set[int] = set()
        self._running: set[int] = set()
        self._suspended: set[int] = set()

    @property
    def needed(self) -> int | None:
        """The lowest layer whose A has not run; None when all have."""
        return self._order[self._position] if self._position < len(self._order) else None

    @property
    def suspended(self) -> frozenset[int]:
        return frozenset(self._suspended)

    def issued(self, layer: int) -> Decision:
        """The layer's retrieval starts."""
        self._issued[layer] = self._clock()
        self._running.add(layer)
        return self.review()

    def finished(self, layer: int) -> Decision:
        """The layer's bytes are in memory."""
        self._running.discard(layer)
        self._suspended.discard(layer)
        self._finished.add(layer)
        return self.review()

    def applied(self, layer: int) -> Decision:
        """The layer's A has run."""
        self._applied.add(layer)
        while self.needed in self._applied:
            self._position += 1
        return self.review()

    def review(self) -> Decision:
        """What is right at this moment."""
        needed = self.needed
        if needed is None or needed in self._finished:
            return self._resume_all()
        if needed not in self._issued or self._clock() <= self._expected(needed):
            return _NOTHING
        later = tuple(layer for layer in self._running if layer > needed)
        self._running.difference_update(later)
        self._suspended.update(later)
        return Decision(suspend=later) if later else _NOTHING

    def _expected(self, layer: int) -> float:
        return self._issued[layer] + self._durations.retrieval_ns(layer)

    def _resume_all(self) -> Decision:
        if not self._suspended:
            return _NOTHING
        resumed = tuple(self._suspended)
        self._running.update(resumed)
        self._suspended.clear()
        return Decision(resume=resumed)
