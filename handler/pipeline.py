"""The three units of a request and how they meet: construct (L), retrieve (W), apply (A), execute (E)."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, Protocol

import torch

from handler.decoupler import Flight, Listener, Retrieval, WeightDecoupler
from handler.openmp import stay_single_threaded
from handler.scheduler import Durations
from handler.strategies import Strategy
from handler.timeline import Timeline, now_ns
from handler.unit import Task, UnitThread


class Step(Protocol):
    """A layer of one request, as the units see it."""

    @property
    def weighted(self) -> bool:
        """Whether it has a weight file; without one there is no W and no A."""

    def construct(self) -> None: ...

    def initialize(self) -> None: ...

    def held_bytes(self) -> int:
        """Bytes of memory that its parameters have."""

    def retrieval(self, *, in_memory: bool = False) -> Retrieval:
        """Its weight file, not yet retrieved; whether it is expected in the page cache."""

    def apply(self, retrieval: Any) -> None: ...

    def execute(self, value: Any) -> Any: ...

    def release(self) -> None:
        """Lets go of its modules and weights."""


class Forward(Protocol):
    """How the compute unit runs the layers."""

    @property
    def until(self) -> Sequence[int | None]:
        """Per layer, the one in whose execution it is used for the last time; None: no one knows."""

    def __call__(self, enter: Callable[[int], Sequence[int]], value: Any) -> Any:
        """The output. `enter` is to be called whenever a layer is come to: it waits for its weights, and
        returns the layers that were let go."""

    def leave(self) -> None:
        """Lets go of what it holds of the layers; it is called no more."""


class InTurn:
    """Each layer takes the output of the one before."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.until: Sequence[int | None] = range(len(steps))

    def __call__(self, enter: Callable[[int], Sequence[int]], value: Any) -> Any:
        for index, step in enumerate(self._steps):
            enter(index)
            value = step.execute(value)
        return value

    def leave(self) -> None:
        self._steps = ()


class Cancelled(Exception):
    """The caller has gone."""


class ForwardFailed(Exception):
    """The forward itself raised, not a unit that it waited for."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class _Stopped(BaseException):
    """Another unit has failed, or has no more to do; no forward may take it for an error of its own."""


_STOP: Final = -1


_MAPPING_NS: Final = 5_000_000
"""For so long the weight unit maps what is in memory before it applies any: from the first layer's A on, the compute
unit has all processors, where the rest of the mapping takes longer."""


class Pipeline:
    """The layer, weight and retrieval threads of a handler; the compute unit is its caller's thread.

    retrievals: how many weight files are retrieved at once.
    ahead_bytes: how far retrieval may run ahead of execution; None for no bound.
    """

    def __init__(self, *, retrievals: int, ahead_bytes: int | None = None) -> None:
        self._layer = UnitThread("layer", on_start=stay_single_threaded)
        self._weight = UnitThread("weight", on_start=stay_single_threaded)
        self._decoupler = WeightDecoupler(retrievals, on_start=stay_single_threaded)
        self._ahead_bytes = ahead_bytes

    def begin(
        self,
        steps: Sequence[Step],
        strategy: Strategy,
        durations: Durations,
        timeline: Timeline,
        forward: Forward | None = None,
    ) -> "Run":
        """Starts construction and retrieval at once, where the strategy's units run side by side."""
        run = Run(steps, strategy, durations, timeline, forward or InTurn(steps))
        if strategy.decoupled:
            run.depart(self._decoupler, self._ahead_bytes)
        if strategy.pipelined:
            # The weight unit first: it has more to do until the first layer can be applied.
            run.tasks.append(self._weight.submit(run.apply_all))
            run.tasks.append(self._layer.submit(run.construct_all))
        return run

    def close(self) -> None:
        self._layer.close()
        self._weight.close()
        self._decoupler.close()


class Run:
    """One request's way through the units.

    An error in any unit stops the others at their next layer or chunk and is raised once, by `execute`; the
    forward's as ForwardFailed.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        strategy: Strategy,
        durations: Durations,
        timeline: Timeline,
        forward: Forward,
    ) -> None:
        self.tasks: list[Task] = []
        self._steps = steps
        self._forward: Forward | None = forward
        self._strategy = strategy
        self._durations = durations
        self._timeline = timeline
        self._retrievals: dict[int, Retrieval] = {}
        self._flight: Flight | None = None
        self._decoupler: WeightDecoupler | None = None
        self._to_apply: SimpleQueue[int] = SimpleQueue()
        self._to_execute: SimpleQueue[int] = SimpleQueue()
        self._ready: set[int] = set()
        self._entered: set[int] = set()
        self._executing: int | None = None
        self._entered_ns = 0
        self._failing = threading.Lock()
        self._error: BaseException | None = None

    def depart(self, decoupler: WeightDecoupler, ahead_bytes: int | None) -> None:
        """Opens every layer's retrieval, and starts them on the decoupler's threads.

        Where the last request found all weights in memory, the weight unit maps them itself, until one has to
        be waited for: more threads are but in each other's way, and in the compute unit's (ResNet-50: 1.10
        of resident, not 1.15).
        """
        self._retrievals = {
            index: step.retrieval(in_memory=self._durations.in_memory)
            for index, step in enumerate(self._steps)
            if step.weighted
        }
        listener = Listener(self._to_apply.put, self.fail)
        self._flight = Flight(
            self._retrievals, self._durations, self._timeline, listener, ahead_bytes
        )
        self._decoupler = decoupler
        if not self._durations.in_memory or self._flight.bounded:
            self._retrieve_on_threads()

    def _retrieve_on_threads(self) -> None:
        decoupler, self._decoupler = self._decoupler, None
        if decoupler is not None and self._flight is not None:
            self.tasks.extend(decoupler.begin(self._flight))

    def cancel(self) -> None:
        """Stops every unit at its next layer; `execute` raises Cancelled. Any thread may call it."""
        self.fail(Cancelled())

    def fail(self, error: BaseException) -> None:
        """Stops every unit because of an error; of several the first counts."""
        with self._failing:
            if self._error is not None:
                return
            self._error = error
        self._to_apply.put(_STOP)
        self._to_execute.put(_STOP)
        flight = self._flight  # read once: a cancellation may meet the request's end
        if flight is not None:
            flight.stop()

    def execute(self, value: Any) -> Any:
        """The compute unit: runs the layers on the input, each as soon as its weights are applied."""
        try:
            if not self._strategy.pipelined:
                self._load_in_turn()
            return self._execute_all(value)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the unit boundary: it is raised below
            self.fail(error)
        if self._error is None:
            raise RuntimeError("a unit stopped without an error")
        raise self._error

    def leave(self) -> None:
        """Stops what still runs, waits until every unit has left, then lets go of layers, mappings and errors."""
        self.fail(_Stopped())
        for task in self.tasks:
            task.join()
        if self._flight is not None and self._flight.retrieved:
            self._durations.in_memory = self._flight.in_memory
        self._steps = ()
        if self._forward is not None:
            self._forward.leave()
            self._forward = None
        self._retrievals.clear()
        self._flight = None
        self._error = None

    def construct_all(self) -> None:
        """The layer unit."""
        self._unit(self._construct_layers)

    def apply_all(self) -> None:
        """The weight unit."""
        self._unit(
            self._apply_as_they_come if self._strategy.decoupled else self._retrieve_and_apply
        )

    def _unit(self, work: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                work()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the unit boundary: it reaches the caller
            self.fail(error)

    def _construct_layers(self) -> None:
        for index in range(len(self._steps)):
            self._construct(index)
            self._to_apply.put(index)

    def _apply_as_they_come(self) -> None:
        """A of a layer when its L and W, which arrive here in any order, are both done."""
        half_ready: set[int] = set()
        mapping_until = now_ns() + _MAPPING_NS
        for _ in range(len(self._steps) + len(self._retrievals)):
            while self._decoupler is not None and (
                self._to_apply.empty() or now_ns() < mapping_until
            ):
                self._map_one()
            index = self._next(self._to_apply)
            if self._steps[index].weighted and index not in half_ready:
                half_ready.add(index)
                continue
            self._apply(index)
            self._to_execute.put(index)

    def _map_one(self) -> None:
        """Retrieves the next layer's weights here, as long as they are in memory."""
        if self._flight is None or not self._flight.in_memory:
            self._retrieve_on_threads()
        elif not self._flight.work_on_one():
            self._decoupler = None

    def _retrieve_and_apply(self) -> None:
        for _ in range(len(self._steps)):
            index = self._next(self._to_apply)
            self._retrieve(index)
            self._apply(index)
            self._to_execute.put(index)

    def _load_in_turn(self) -> None:
        for stage in (self._construct, self._retrieve, self._apply):
            for index in range(len(self._steps)):
                stage(index)
        for index in range(len(self._steps)):
            self._to_execute.put(index)

    def _execute_all(self, value: Any) -> Any:
        if self._forward is None:
            raise RuntimeError("the run has been left")
        try:
            value = self._forward(self._enter, value)
        except (Exception, SystemExit) as error:
            raise ForwardFailed(error) from error
        self._leave_layer()
        if len(self._entered) < len(self._steps):
            self.fail(_Stopped())  # the forward came to no other layer: none is worth its loading
        return value

    def _enter(self, index: int) -> Sequence[int]:
        """The forward comes to a layer, for the first time or again; returns those that were let go."""
        if index in self._entered:
            return ()
        gone = self._leave_layer()
        if self._flight is not None and self._flight.bounded:
            for skipped in set(range(index)) - self._entered:
                self._flight.executed(skipped)
        while index not in self._ready:
            self._ready.add(self._next(self._to_execute))
        self._check()
        self._entered.add(index)
        self._executing = index
        self._entered_ns = now_ns()
        return gone

    def _leave_layer(self) -> Sequence[int]:
        """The layer's execution ends where the next one's begins."""
        index = self._executing
        if index is None:
            return ()
        self._timeline.record(index, "execute", self._entered_ns, now_ns())
        self._executing = None
        if self._flight is None or not self._flight.bounded or self._forward is None:
            return ()
        # Taking mappings down costs milliseconds: elsewhere it waits until the answer was sent.
        self._flight.executed(index)
        gone = [layer for layer in self._entered if self._forward.until[layer] == index]
        for layer in gone:
            self._steps[layer].release()
        return gone

    def _construct(self, index: int) -> None:
        self._check()
        step = self._steps[index]
        start = now_ns()
        step.construct()
        end = now_ns()
        self._timeline.record(index, "construct", start, end)
        if self._strategy.initialize:
            step.initialize()
            initialized = now_ns()
            self._timeline.record(index, "initialize", end, initialized)
            end = initialized
        self._durations.constructed(index, end - start)
        self._timeline.placeholder_bytes += step.held_bytes()

    def _retrieve(self, index: int) -> None:
        self._check()
        if not self._steps[index].weighted:
            return
        start = now_ns()
        retrieval = self._retrievals[index] = self._steps[index].retrieval()
        while retrieval.step():
            self._check()
        end = now_ns()
        self._timeline.record(index, "retrieve", start, end)
        self._durations.retrieved(index, end - start)

    def _apply(self, index: int) -> None:
        self._check()
        if not self._steps[index].weighted:
            return
        start = now_ns()
        self._steps[index].apply(self._retrievals[index])
        self._timeline.record(index, "apply", start, now_ns())
        if self._flight is not None:
            self._flight.applied(index)

    def _check(self) -> None:
        if self._error is not None:
            raise _Stopped

    def _next(self, queue: SimpleQueue[int]) -> int:
        index = queue.get()
        if index == _STOP:
            raise _Stopped
        return index
