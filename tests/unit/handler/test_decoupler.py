"""Asynchronous retrieval with retrievals that the test moves chunk by chunk, and on a throttled disk."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler import decoupler, page_faults
from handler.decoupler import Flight, Listener, WeightDecoupler
from handler.scheduler import Durations
from handler.timeline import Suspension, Timeline
from handler.unit import Task

DEADLINE_S: Final = 20


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.001)


class Chunked:
    """A retrieval whose every chunk the test lets through."""

    is_mapped = True

    def __init__(self, chunks: int = 1, size: int = 1) -> None:
        self.bytes = size
        self.steps = 0
        self._chunks = chunks
        self._entered = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)

    def step(self) -> bool:
        self.steps += 1
        self._entered.release()
        assert self._permits.acquire(timeout=DEADLINE_S)
        return self.steps < self._chunks

    def let(self, chunks: int = 1) -> None:
        self._permits.release(chunks)

    def wait_entered(self) -> None:
        assert self._entered.acquire(timeout=DEADLINE_S)


class Quick:
    """A retrieval that is there at once."""

    is_mapped = True

    def __init__(self, size: int = 1) -> None:
        self.bytes = size

    def step(self) -> bool:
        return False


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.retrieved: SimpleQueue[int] = SimpleQueue()
        self.failed: SimpleQueue[BaseException] = SimpleQueue()
        self.listener = Listener(self.retrieved.put, self.failed.put)

    def next(self) -> int:
        return self.retrieved.get(timeout=DEADLINE_S)

    def rest(self) -> list[int]:
        found = []
        while True:
            try:
                found.append(self.retrieved.get_nowait())
            except Empty:
                return found


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(decoupler, "now_ns", clock)
    return clock


@contextmanager
def threads(count: int) -> Iterator[WeightDecoupler]:
    weight_decoupler = WeightDecoupler(count, on_start=lambda: None)
    try:
        yield weight_decoupler
    finally:
        weight_decoupler.close()


def timeline_of(layers: int) -> Timeline:
    return Timeline([str(layer) for layer in range(layers)], decoupled=True, arrival_ns=0)


def never_late(layers: int) -> Durations:
    """Recorded durations so long that the scheduler never has a reason to suspend."""
    return Durations([10**15] * layers)


def join(tasks: list[Task]) -> None:
    for task in tasks:
        task.join()


def test_several_files_are_retrieved_at_once() -> None:
    together = threading.Barrier(3)

    class Meeting(Quick):
        def step(self) -> bool:
            together.wait(DEADLINE_S)  # passes only if three retrievals are in here at one time
            return False

    heard = Heard()
    flight = Flight(
        {layer: Meeting() for layer in range(3)},
        never_late(3),
        timeline_of(3),
        heard.listener,
        None,
    )
    with threads(3) as weight_decoupler:
        join(weight_decoupler.begin(flight))

    assert sorted(heard.rest()) == [0, 1, 2]


def test_files_are_issued_in_the_layers_order() -> None:
    begun: list[int] = []

    class Noting(Quick):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.layer = layer

        def step(self) -> bool:
            begun.append(self.layer)
            return False

    flight = Flight(
        {layer: Noting(layer) for layer in (7, 2, 5, 3)},
        never_late(8),
        timeline_of(8),
        Heard().listener,
        None,
    )
    with threads(1) as weight_decoupler:
        join(weight_decoupler.begin(flight))

    assert begun == [2, 3, 5, 7]


def test_a_retrieval_is_told_and_recorded_after_its_last_chunk(clock: Clock) -> None:
    heard, timeline, retrieval = Heard(), timeline_of(1), Chunked(chunks=3)
    flight = Flight({0: retrieval}, never_late(1), timeline, heard.listener, None)
    clock.now_ns = 5
    with threads(1) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        retrieval.wait_entered()
        clock.now_ns = 25
        retrieval.let(2)
        retrieval.wait_entered()
        retrieval.wait_entered()
        assert heard.retrieved.empty()
        assert timeline.spans == []
        clock.now_ns = 40
        retrieval.let()
        join(tasks)

    assert heard.rest() == [0]
    assert [(s.layer, s.kind, s.start_ns, s.end_ns) for s in timeline.spans] == [
        (0, "retrieve", 5, 40)
    ]
    assert retrieval.steps == 3


def test_later_files_arrive_while_an_earlier_one_is_delayed() -> None:
    heard, delayed = Heard(), Chunked()
    flight = Flight(
        {0: delayed, 1: Quick(), 2: Quick()}, never_late(3), timeline_of(3), heard.listener, None
    )
    with threads(2) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        assert [heard.next(), heard.next()] == [1, 2]
        delayed.let()
        assert heard.next() == 0
        join(tasks)


def test_stopping_ends_retrievals_at_their_next_chunk_and_starts_no_other() -> None:
    heard, timeline = Heard(), timeline_of(3)
    running, other, unstarted = Chunked(chunks=3), Chunked(chunks=3), Chunked(chunks=3)
    flight = Flight(
        {0: running, 1: other, 2: unstarted}, never_late(3), timeline, heard.listener, None
    )
    with threads(2) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        running.wait_entered()
        other.wait_entered()
        flight.stop()
        running.let(3)
        other.let(3)
        join(tasks)

    assert (running.steps, other.steps, unstarted.steps) == (1, 1, 0)
    assert heard.rest() == []
    assert timeline.spans == []


def test_a_late_needed_file_suspends_the_later_ones_and_the_timeline_tells(clock: Clock) -> None:
    heard, timeline = Heard(), timeline_of(2)
    durations = Durations([100, 100])
    needed, later = Chunked(chunks=2), Chunked(chunks=3)
    flight = Flight({0: needed, 1: later}, durations, timeline, heard.listener, None)
    with threads(2) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        needed.wait_entered()
        later.wait_entered()

        clock.now_ns = 101  # W0 was expected by 100
        later.let(3)
        eventually(lambda: flight._scheduler.suspended == {1}, "the later file is suspended")
        assert later.steps == 1, "suspended at its next chunk, permits or not"
        clock.now_ns = 150
        needed.let(2)
        assert heard.next() == 0
        later.wait_entered()
        later.wait_entered()
        assert heard.next() == 1
        join(tasks)

    assert timeline.suspensions == [Suspension(1, 101, 150)]
    assert flight._scheduler.suspended == frozenset()
    assert 100 < durations.retrieval_ns(0) < 150
    assert durations.retrieval_ns(1) < 101 + 0.25 * 2, "what it was held does not count as its own"


def test_stopping_releases_what_is_suspended(clock: Clock) -> None:
    timeline, heard = timeline_of(2), Heard()
    needed, later = Chunked(chunks=2), Chunked(chunks=2)
    flight = Flight({0: needed, 1: later}, Durations([100, 100]), timeline, heard.listener, None)
    with threads(2) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        needed.wait_entered()
        later.wait_entered()
        clock.now_ns = 101
        later.let()
        eventually(lambda: 1 in flight._scheduler.suspended, "the later file is suspended")
        flight.stop()
        needed.let()
        join(tasks)

    assert (needed.steps, later.steps) == (1, 1)
    assert heard.rest() == []


def test_an_error_reaches_the_listener_once() -> None:
    broken = OSError("the disk is gone")

    class Broken(Quick):
        def step(self) -> bool:
            raise broken

    heard = Heard()
    flight = Flight({0: Quick(), 1: Broken()}, never_late(2), timeline_of(2), heard.listener, None)
    with threads(2) as weight_decoupler:
        join(weight_decoupler.begin(flight))
        assert heard.failed.get(timeout=DEADLINE_S) is broken
        assert heard.failed.empty()
        assert heard.rest() == [0]

        again = Heard()  # the threads serve the next request
        following = Flight({0: Quick()}, never_late(1), timeline_of(1), again.listener, None)
        join(weight_decoupler.begin(following))
        assert again.rest() == [0]


def test_retrieval_runs_ahead_of_execution_as_far_as_the_bound_lets_it() -> None:
    heard = Heard()
    files = {layer: Chunked(size=4) for layer in range(4)}
    flight = Flight(files, never_late(4), timeline_of(4), heard.listener, ahead_bytes=10)
    with threads(3) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        files[0].let()
        files[1].let()
        assert sorted([heard.next(), heard.next()]) == [0, 1]
        eventually(lambda: len(flight._changed._waiters) == 3, "every thread waits")  # type: ignore[attr-defined]
        assert (files[2].steps, files[3].steps) == (0, 0), "a third file would make it 12 bytes"
        flight.executed(0)
        files[2].wait_entered()
        eventually(lambda: len(flight._changed._waiters) == 2, "the others wait")  # type: ignore[attr-defined]
        assert files[3].steps == 0
        flight.executed(1)
        files[2].let()
        files[3].let()
        join(tasks)

    assert sorted(heard.rest()) == [2, 3]


def test_a_file_larger_than_the_bound_is_let_through_alone() -> None:
    heard = Heard()
    files = {layer: Quick(size=100) for layer in range(3)}
    flight = Flight(files, never_late(3), timeline_of(3), heard.listener, ahead_bytes=10)
    with threads(2) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        for layer in range(3):
            assert heard.next() == layer
            assert heard.retrieved.empty()
            flight.executed(layer)
        join(tasks)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    bound=st.integers(0, 40),
    count=st.integers(1, 3),
)
def test_whatever_the_sizes_the_bound_holds_and_the_request_comes_to_its_end(
    sizes: list[int], bound: int, count: int
) -> None:
    lock = threading.Lock()
    ahead: set[int] = set()

    class Counting(Quick):
        def __init__(self, layer: int) -> None:
            super().__init__(sizes[layer])
            self.layer = layer

        def step(self) -> bool:
            with lock:
                ahead.add(self.layer)
                held = sum(sizes[layer] for layer in ahead)
                assert held <= max(bound, 1) or len(ahead) == 1
            return False

    heard = Heard()
    retrievals = {layer: Counting(layer) for layer in range(len(sizes))}
    flight = Flight(
        retrievals,
        Durations(sizes),
        timeline_of(len(sizes)),
        heard.listener,
        ahead_bytes=bound,
    )
    with threads(count) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        there: set[int] = set()
        for layer in range(len(sizes)):
            while layer not in there:
                there.add(heard.next())
            flight.applied(layer)
            with lock:
                ahead.discard(layer)
            flight.executed(layer)
        join(tasks)

    assert heard.failed.empty()


class ThrottledDisk:
    """A disk of one chunk per millisecond, shared in turn by the retrievals that ask it.

    Time on it is virtual: it passes by the chunks that are served, so a loaded machine changes nothing.
    A chunk is served when every retrieval that is not suspended has asked for one.

    disorder_ns: as long as that, it serves layer 0 only when no other asks (paper, Fig. 7(d): a response
        may be delayed relative to those of later requests).
    """

    CHUNK_NS: Final = 1_000_000

    def __init__(self, clock: Clock, at_once: int, disorder_ns: int) -> None:
        self._clock = clock
        self._at_once = at_once
        self._disorder_ns = disorder_ns
        self._asking: deque[int] = deque()
        self._changed = threading.Condition()

    def chunk(self, layer: int) -> None:
        """Waits until a chunk of the layer has been read."""
        with self._changed:
            self._asking.append(layer)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: layer not in self._asking, DEADLINE_S)

    def serve(self, flight: Flight, chunks: int) -> None:
        """Serves so many chunks."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._asking) == self._at_once, DEADLINE_S)
            for _ in range(chunks):
                self._wait_for_all(flight)
                self._clock.now_ns += self.CHUNK_NS
                self._asking.remove(self._next())
                self._changed.notify_all()

    def _wait_for_all(self, flight: Flight) -> None:
        deadline = time.monotonic() + DEADLINE_S
        scheduler = flight._scheduler
        while True:
            active = set(scheduler._issued) - scheduler._finished - scheduler.suspended
            if self._asking and active <= set(self._asking):
                return
            assert time.monotonic() < deadline
            self._changed.wait(0.001)

    def _next(self) -> int:
        if self._clock.now_ns <= self._disorder_ns:
            return next((layer for layer in self._asking if layer != 0), 0)
        return self._asking[0]


class Throttled:
    is_mapped = True

    def __init__(self, disk: ThrottledDisk, layer: int, chunks: int) -> None:
        self.bytes = chunks
        self._disk = disk
        self._layer = layer
        self._left = chunks

    def step(self) -> bool:
        self._disk.chunk(self._layer)
        self._left -= 1
        return self._left > 0


CHUNKS: Final = (8, 16, 16, 16, 12)
AT_ONCE: Final = 4


def on_throttled_disk(clock: Clock, durations: Durations) -> Timeline:
    """Retrieves layers of CHUNKS, each applied at once, from a disk that delays the first."""
    clock.now_ns = 0
    disk = ThrottledDisk(clock, AT_ONCE, disorder_ns=12 * ThrottledDisk.CHUNK_NS)
    timeline = timeline_of(len(CHUNKS))
    failures: list[BaseException] = []

    def apply(layer: int) -> None:
        flight.applied(layer)

    flight = Flight(
        {layer: Throttled(disk, layer, chunks) for layer, chunks in enumerate(CHUNKS)},
        durations,
        timeline,
        Listener(apply, failures.append),
        None,
    )
    with threads(AT_ONCE) as weight_decoupler:
        tasks = weight_decoupler.begin(flight)
        disk.serve(flight, sum(CHUNKS))
        join(tasks)
    assert failures == []
    assert len(timeline.spans) == len(CHUNKS)
    return timeline


def end_ms(timeline: Timeline, layer: int) -> float:
    return next(span.end_ns for span in timeline.spans if span.layer == layer) / 1e6


def test_on_throttled_storage_the_needed_layer_comes_earlier_with_the_scheduler(
    clock: Clock,
) -> None:
    """Each layer's recorded duration is what it takes alone. Without the scheduler W0 shares the disk
    with three others to its end; with it, it has the disk to itself once it is late."""
    alone = Durations([chunks * ThrottledDisk.CHUNK_NS for chunks in CHUNKS])
    without = on_throttled_disk(clock, never_late(len(CHUNKS)))
    scheduled = on_throttled_disk(clock, alone)

    # Without: passed over for 12 ms, then 8 rounds of 4. With: late after 8 ms, the chunks then asked for
    # (3 of others) are still served, then its own 8.
    assert end_ms(without, 0) >= 12 + 7 * AT_ONCE
    assert end_ms(scheduled, 0) <= 8 + AT_ONCE + 8 + 1
    assert without.suspensions == []

    suspended = {suspension.layer for suspension in scheduled.suspensions}
    assert {1, 2, 3} <= suspended
    needed_end = end_ms(scheduled, 0) * 1e6
    first = [held for held in scheduled.suspensions if held.start_ns < needed_end]
    assert {held.layer for held in first} == {1, 2, 3}
    assert all(held.end_ns >= needed_end for held in first), (
        "held until the needed one has finished"
    )
    assert all(0 < held.start_ns < held.end_ns for held in scheduled.suspensions)

    # Bandwidth is shifted, not lost: the disk was never idle, so all are there at the same time.
    last = [max(end_ms(run, layer) for layer in range(5)) for run in (without, scheduled)]
    assert last == [sum(CHUNKS), sum(CHUNKS)]
    order = sorted(range(5), key=lambda layer: end_ms(scheduled, layer))
    assert order[0] == 0


def test_a_retrieval_may_run_on_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "storage_reads", lambda: 0)
    heard = Heard()
    files = {layer: Quick() for layer in range(3)}
    flight = Flight(files, never_late(3), timeline_of(3), heard.listener, None)

    assert [flight.work_on_one() for _ in range(4)] == [True, True, True, False]
    assert flight.in_memory
    assert heard.rest() == [0, 1, 2]


@pytest.mark.parametrize("how", ["read", "slow", "copied"])
def test_it_is_told_once_weights_had_to_be_read_waited_for_or_copied(
    how: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(page_faults, "storage_reads", lambda: len(reads))

    class Waiting(Quick):
        is_mapped = how != "copied"

        def step(self) -> bool:
            if how == "read":
                reads.append(1)
            if how == "slow":
                clock.now_ns += decoupler._STORAGE_NS + 1
            return False

    heard = Heard()
    flight = Flight(
        {0: Quick(), 1: Waiting(), 2: Quick()}, never_late(3), timeline_of(3), heard.listener, None
    )

    in_memory = [flight.in_memory]
    while flight.work_on_one():
        in_memory.append(flight.in_memory)
    assert in_memory == ([False] * 4 if how == "copied" else [True, True, False, False])
    assert heard.rest() == [0, 1, 2]
