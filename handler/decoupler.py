"""WeightDecoupler (paper, section III-D): asynchronous retrieval that can be held at every chunk."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from handler import page_faults
from handler.scheduler import Decision, Durations, PriorityAwareScheduler
from handler.timeline import Suspension, Timeline, now_ns
from handler.unit import Task, UnitThread

_STORAGE_NS: Final = 5_000_000
"""A chunk that takes longer has come from storage, even where the kernel counts no read: 4 MiB of the page cache
are mapped in 0.01 to 0.25 ms."""


class Retrieval(Protocol):
    """One layer's weight file on its way into memory."""

    @property
    def bytes(self) -> int: ...

    @property
    def is_mapped(self) -> bool:
        """Whether what lies in the page cache is only mapped, not copied."""

    def step(self) -> bool:
        """Brings the next chunk in; True when more are to come. Releases the GIL while it waits."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Whom a flight tells; both may be called from any retrieval thread."""

    retrieved: Callable[[int], None]
    failed: Callable[[BaseException], None]


class Flight:
    """The retrievals of one request: issued in the layers' order, several at a time.

    ahead_bytes: how much may be retrieved and not yet executed; None for no bound. The lowest layer
    that is not executed is always let through, so that the bound cannot stop the request.
    """

    def __init__(
        self,
        retrievals: Mapping[int, Retrieval],
        durations: Durations,
        timeline: Timeline,
        listener: Listener,
        ahead_bytes: int | None,
    ) -> None:
        self._retrievals = retrievals
        self._durations = durations
        self._timeline = timeline
        self._listener = listener
        self._ahead_bytes = ahead_bytes
        self._waiting = deque(sorted(retrievals))
        self._ahead = 0
        self._stopped = False
        self._in_memory = all(retrieval.is_mapped for retrieval in retrievals.values())
        self._held: set[int] = set()
        self._executed: set[int] = set()
        self._retrieved = 0
        self._changed = threading.Condition()
        self._scheduler = PriorityAwareScheduler(retrievals, durations, now_ns)

    def applied(self, layer: int) -> None:
        """The layer's A has run: another layer is needed now."""
        if self._retrieved == len(self._retrievals):
            return  # nothing is on its way that could be held back
        with self._changed:
            self._decide(self._scheduler.applied(layer))

    @property
    def bounded(self) -> bool:
        """Whether retrieval waits for execution: `executed` must be told then."""
        return self._ahead_bytes is not None

    def executed(self, layer: int) -> None:
        """The layer's weights have been let go, or are no longer waited for; saying it again does nothing."""
        if layer not in self._retrievals or layer in self._executed:
            return
        with self._changed:
            self._executed.add(layer)
            self._ahead -= self._retrievals[layer].bytes
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends every retrieval at its next chunk; those that were not started never start."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def retrieved(self) -> int:
        """How many layers have been retrieved."""
        return self._retrieved

    @property
    def in_memory(self) -> bool:
        """Whether nothing so far has come from storage, or been copied."""
        return self._in_memory

    def work(self) -> None:
        """Retrieves layer after layer until none is left; runs on every retrieval thread."""
        while self.work_on_one():
            pass

    def work_on_one(self) -> bool:
        """Retrieves the next layer; False when none was left, or after a failure."""
        try:
            layer = self._take()
            if layer is None:
                return False
            if self._retrieve(layer):
                self._listener.retrieved(layer)
        except BaseException as error:  # noqa: BLE001 - the unit boundary: it reaches the caller
            self._listener.failed(error)
            return False
        return True

    def _take(self) -> int | None:
        with self._changed:
            while not self._stopped and self._waiting:
                size = self._retrievals[self._waiting[0]].bytes
                if (
                    self._ahead_bytes is None
                    or not self._ahead
                    or self._ahead + size <= self._ahead_bytes
                ):
                    layer = self._waiting.popleft()
                    self._ahead += size
                    self._decide(self._scheduler.issued(layer))
                    return layer
                self._changed.wait()
            return None

    def _retrieve(self, layer: int) -> bool:
        retrieval = self._retrievals[layer]
        start = begun = now_ns()
        held, reads = 0, page_faults.storage_reads()
        while True:
            more = retrieval.step()
            end = now_ns()
            if end - begun > _STORAGE_NS or page_faults.storage_reads() > reads:
                self._in_memory = False
            if not more:
                break
            held += self._pause(layer)
            if self._stopped:
                return False
            begun = now_ns()
        self._timeline.record(layer, "retrieve", start, end)
        with self._changed:
            self._retrieved += 1
            self._durations.retrieved(layer, end - start - held)
            self._decide(self._scheduler.finished(layer))
        return True

    def _pause(self, layer: int) -> int:
        """At a chunk's end: waits while the scheduler holds this layer back; nanoseconds held."""
        with self._changed:
            self._decide(self._scheduler.review())
            if layer not in self._held:
                return 0
            start = now_ns()
            while layer in self._held and not self._stopped:
                self._changed.wait()
            end = now_ns()
        self._timeline.suspensions.append(Suspension(layer, start, end))
        return end - start

    def _decide(self, decision: Decision) -> None:
        self._held.update(decision.suspend)
        if decision.resume:
            self._held.difference_update(decision.resume)
            self._changed.notify_all()


class WeightDecoupler:
    """The retrieval threads; they live as long as the handler.

    threads: how many files are retrieved at once.
    """

    def __init__(self, threads: int, *, on_start: Callable[[], None]) -> None:
        self._threads = [UnitThread(f"retrieve-{n}", on_start=on_start) for n in range(threads)]

    def begin(self, flight: Flight) -> list[Task]:
        """Starts a flight on every thread; each task ends when its thread has left the flight."""
        return [thread.submit(flight.work) for thread in self._threads]

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
