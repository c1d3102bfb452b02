"""The units with layers that the test makes fail, wait and tell what they do."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from handler import page_faults
from handler.pipeline import Cancelled, ForwardFailed, Pipeline, Run, Step
from handler.plan import Plans
from handler.retrieval import WeightFile
from handler.scheduler import Durations
from handler.steps import LayerStep, OpenFiles, steps
from handler.strategies import STRATEGIES, Strategy
from handler.timeline import Timeline
from models.store import Store

DEADLINE_S: Final = 20
LAYERS: Final = 5
WEIGHTED: Final = (0, 2, 4)
CHUNKS: Final = 3
STEPS: Final = ("construct", "initialize", "retrieval", "chunk", "apply", "execute")
UNIT_OF: Final = {
    "construct": "layer",
    "initialize": "layer",
    "retrieval": "weight",
    "chunk": "retrieval",
    "apply": "weight",
    "execute": "compute",
}

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda s: s.name)
each_decoupled = pytest.mark.parametrize(
    "strategy", [s for s in STRATEGIES.values() if s.decoupled], ids=lambda s: s.name
)


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.001)


class Stage:
    """What all layers of a test's request have in common: a log, and what happens at which step."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.at: dict[tuple[str, int], Callable[[], None]] = {}
        self.expected_in_memory: list[bool] = []

    def reach(self, step: str, layer: int) -> None:
        self.log.append((step, layer))
        act = self.at.get((step, layer))
        if act is not None:
            act()


class FakeRetrieval:
    is_mapped = True

    def __init__(self, stage: Stage, layer: int) -> None:
        self.bytes = 1
        self.layer = layer
        self._stage = stage
        self._left = CHUNKS

    def step(self) -> bool:
        self._stage.reach("chunk", self.layer)
        self._left -= 1
        return self._left > 0


class FakeStep:
    """A layer that appends its index to the value, and checks what must have been done before."""

    def __init__(self, stage: Stage, layer: int) -> None:
        self.weighted = layer in WEIGHTED
        self._stage = stage
        self._layer = layer
        self._constructed = False
        self._applied = not self.weighted

    def construct(self) -> None:
        self._stage.reach("construct", self._layer)
        self._constructed = True

    def initialize(self) -> None:
        self._stage.reach("initialize", self._layer)

    def held_bytes(self) -> int:
        return 1

    def retrieval(self, *, in_memory: bool = False) -> FakeRetrieval:
        self._stage.expected_in_memory.append(in_memory)
        self._stage.reach("retrieval", self._layer)
        return FakeRetrieval(self._stage, self._layer)

    def apply(self, retrieval: FakeRetrieval) -> None:
        assert self._constructed
        assert retrieval.layer == self._layer
        self._stage.reach("apply", self._layer)
        self._applied = True

    def execute(self, value: list[int]) -> list[int]:
        assert self._applied
        self._stage.reach("execute", self._layer)
        return [*value, self._layer]

    def release(self) -> None:
        self._stage.log.append(("release", self._layer))


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    pipeline = Pipeline(retrievals=2)
    yield pipeline
    pipeline.close()


def timeline_of(strategy: Strategy, layers: int = LAYERS) -> Timeline:
    return Timeline(
        [str(layer) for layer in range(layers)], strategy.decoupled, time.monotonic_ns()
    )


@contextmanager
def begun(
    pipeline: Pipeline,
    layers: Sequence[Step],
    strategy: Strategy,
    timeline: Timeline | None = None,
    durations: Durations | None = None,
) -> Iterator[Run]:
    timeline = timeline or timeline_of(strategy, len(layers))
    # Recorded durations so long that no file is ever late: what is delayed here is delayed for good.
    durations = durations or Durations([10**15] * len(layers))
    run = pipeline.begin(layers, strategy, durations, timeline)
    try:
        yield run
    finally:
        run.leave()


def layers_of(stage: Stage) -> list[FakeStep]:
    return [FakeStep(stage, layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("ahead_bytes", [None, 1])
def test_a_layer_is_let_go_once_executed_where_memory_is_small(ahead_bytes: int | None) -> None:
    pipeline = Pipeline(retrievals=2, ahead_bytes=ahead_bytes)
    stage = Stage()
    try:
        with begun(pipeline, layers_of(stage), STRATEGIES["cicada"]) as run:
            assert run.execute([]) == [0, 1, 2, 3, 4]
    finally:
        pipeline.close()
    released = [layer for step, layer in stage.log if step == "release"]
    assert released == ([] if ahead_bytes is None else [0, 1, 2, 3, 4])
    for layer in released:
        assert stage.log.index(("release", layer)) > stage.log.index(("execute", layer))


@each_strategy
def test_every_layer_goes_through_its_steps_in_order(
    pipeline: Pipeline, strategy: Strategy
) -> None:
    stage, timeline = Stage(), timeline_of(strategy)
    with begun(pipeline, layers_of(stage), strategy, timeline) as run:
        assert run.execute([]) == [0, 1, 2, 3, 4]

    weighted = [(kind, layer) for layer in WEIGHTED for kind in ("retrieve", "apply")]
    every = [(kind, layer) for layer in range(LAYERS) for kind in ("construct", "execute")]
    initialized = [("initialize", layer) for layer in range(LAYERS)] if strategy.initialize else []
    assert sorted((span.kind, span.layer) for span in timeline.spans) == sorted(
        weighted + every + initialized
    )
    assert timeline.placeholder_bytes == LAYERS
    figures = timeline.figures()
    assert 0 < figures.utilization <= figures.occupancy <= 1


def test_traditional_does_all_of_one_step_before_any_of_the_next(pipeline: Pipeline) -> None:
    stage = Stage()
    with begun(pipeline, layers_of(stage), STRATEGIES["traditional"]) as run:
        run.execute([])

    order = [step for step, _ in stage.log]
    assert order == (
        ["construct", "initialize"] * LAYERS
        + ["retrieval", *["chunk"] * CHUNKS] * len(WEIGHTED)
        + ["apply"] * len(WEIGHTED)
        + ["execute"] * LAYERS
    )


@pytest.mark.parametrize("in_memory", [False, True])
def test_retrievals_are_told_what_the_last_request_found(
    pipeline: Pipeline, *, in_memory: bool
) -> None:
    stage = Stage()
    durations = durations_of(in_memory=in_memory)
    with begun(pipeline, layers_of(stage), STRATEGIES["cicada"], durations=durations) as run:
        run.execute([])
    assert stage.expected_in_memory == [in_memory] * len(WEIGHTED)


class Injected(Exception):
    pass


def durations_of(*, in_memory: bool) -> Durations:
    """As the last request left them, which found the weights in memory or did not."""
    durations = Durations([10**15] * LAYERS)
    durations.in_memory = in_memory
    return durations


def attempt(
    pipeline: Pipeline,
    layers: Sequence[Step],
    strategy: Strategy,
    durations: Durations | None = None,
) -> tuple[list[int] | None, BaseException | None]:
    try:
        with begun(pipeline, layers, strategy, durations=durations) as run:
            return run.execute([]), None
    except ForwardFailed as failure:
        failure.error.with_traceback(None)
        return None, failure.with_traceback(None)
    except Injected as error:
        return None, error.with_traceback(None)


@each_decoupled
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_run_that_retrieved_nothing_says_nothing_of_the_page_cache(
    pipeline: Pipeline, strategy: Strategy, *, in_memory: bool
) -> None:
    stage = Stage()

    def fail() -> None:
        raise Injected

    for layer in WEIGHTED:
        stage.at["chunk", layer] = fail
    durations = durations_of(in_memory=in_memory)
    assert isinstance(attempt(pipeline, layers_of(stage), strategy, durations)[1], Injected)
    assert durations.in_memory == in_memory


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What is let go must go without the cycle collector: a mapping that waits for it lingers."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("layer", [0, 2, 4], ids=["first", "middle", "last"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("in_memory", [False, True], ids=["", "from memory"])
@each_strategy
def test_an_error_at_any_step_reaches_the_caller_once_and_leaves_nothing(
    pipeline: Pipeline, strategy: Strategy, step: str, layer: int, *, in_memory: bool
) -> None:
    threads = threading.active_count()
    stage = Stage()
    injected = Injected(step)
    raised = []

    def fail() -> None:
        raised.append(step)
        raise injected

    stage.at[step, layer] = fail
    broken = layers_of(stage)
    alive = [weakref.ref(one) for one in broken]

    value, error = attempt(pipeline, broken, strategy, durations_of(in_memory=in_memory))

    if step == "initialize" and not strategy.initialize:
        assert (value, error, raised) == ([0, 1, 2, 3, 4], None, [])
    else:
        assert value is None
        if step == "execute":
            assert isinstance(error, ForwardFailed)
            error = error.error
        assert error is injected
        assert raised == [step]
        assert ("execute", LAYERS - 1) not in stage.log or (step, layer) == ("execute", LAYERS - 1)
    assert threading.active_count() == threads
    del broken
    eventually(lambda: not any(ref() for ref in alive), "the failed request's layers are let go")

    assert attempt(pipeline, layers_of(Stage()), strategy) == ([0, 1, 2, 3, 4], None)


@each_decoupled
def test_of_several_errors_the_caller_gets_one(pipeline: Pipeline, strategy: Strategy) -> None:
    stage, together = Stage(), threading.Barrier(3)
    errors = {step: Injected(step) for step in ("construct", "chunk", "other chunk")}

    def fail(step: str) -> Callable[[], None]:
        def act() -> None:
            together.wait(DEADLINE_S)
            raise errors[step]

        return act

    stage.at["construct", 1] = fail("construct")
    stage.at["chunk", 0] = fail("chunk")
    stage.at["chunk", 2] = fail("other chunk")

    value, error = attempt(pipeline, layers_of(stage), strategy)

    assert value is None
    assert error in errors.values()
    assert attempt(pipeline, layers_of(Stage()), strategy) == ([0, 1, 2, 3, 4], None)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("step", ["construct", "chunk", "apply", "execute"])
@pytest.mark.parametrize("in_memory", [False, True], ids=["", "from memory"])
@each_strategy
def test_a_cancelled_request_stops_at_the_next_layer(
    strategy: Strategy, step: str, layer: int, *, in_memory: bool
) -> None:
    stage = Stage()
    known: Future[Run] = Future()
    stage.at[step, layer] = lambda: known.result(DEADLINE_S).cancel()
    pipeline = Pipeline(retrievals=1)
    try:
        durations = durations_of(in_memory=in_memory)
        with begun(pipeline, layers_of(stage), strategy, durations=durations) as run:
            known.set_result(run)
            with pytest.raises(Cancelled):
                run.execute([])
    finally:
        pipeline.close()

    after = stage.log[stage.log.index((step, layer)) + 1 :]
    by_unit = {unit: [at for at in after if UNIT_OF[at[0]] == unit] for unit in UNIT_OF.values()}
    own = [at for at in by_unit[UNIT_OF[step]] if at != ("initialize", layer)]
    assert own == [], "the unit itself begins nothing more"
    for others in by_unit.values():
        layers = {index for _, index in others}
        assert len(layers) <= 1, "the others end with the layer that they are at"


@each_strategy
def test_a_request_may_be_cancelled_before_its_execution_begins(
    pipeline: Pipeline, strategy: Strategy
) -> None:
    stage = Stage()
    with begun(pipeline, layers_of(stage), strategy) as run:
        run.cancel()
        with pytest.raises(Cancelled):
            run.execute([])
    assert ("execute", 0) not in stage.log


@each_strategy
def test_a_cancellation_after_the_end_is_without_effect(
    pipeline: Pipeline, strategy: Strategy
) -> None:
    with begun(pipeline, layers_of(Stage()), strategy) as run:
        assert run.execute([]) == [0, 1, 2, 3, 4]
        run.cancel()
    run.cancel()
    assert attempt(pipeline, layers_of(Stage()), strategy) == ([0, 1, 2, 3, 4], None)


def test_a_cancellation_may_meet_the_requests_end() -> None:
    """The thread that hears of the caller's going cancels while the compute unit leaves the run."""
    pipeline = Pipeline(retrievals=1)
    with ThreadPoolExecutor(1) as canceller:
        for _ in range(300):
            run = pipeline.begin(
                layers_of(Stage()),
                STRATEGIES["cicada"],
                Durations([10**15] * LAYERS),
                timeline_of(STRATEGIES["cicada"]),
            )
            cancelled = canceller.submit(run.cancel)
            run.leave()
            cancelled.result(DEADLINE_S)
    pipeline.close()


def native_ids() -> list[int]:
    return [
        thread.native_id
        for thread in threading.enumerate()
        if thread.native_id is not None
        and thread.name.startswith(("layer", "weight", "retrieve-", "compute"))
    ]


def wake_ups(ids: list[int]) -> dict[int, tuple[str, ...]]:
    """How often each thread has given up and lost the processor, and so has run at all."""
    return {
        thread: tuple(
            line
            for line in Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
            if "ctxt_switches" in line
        )
        for thread in ids
    }


def settled(ids: list[int]) -> dict[int, tuple[str, ...]]:
    """The counts once every one of these threads sleeps."""

    def sleeping() -> bool:
        return all(
            "State:\tS" in Path(f"/proc/self/task/{thread}/status").read_text() for thread in ids
        )

    eventually(sleeping, "the threads sleep")
    before = wake_ups(ids)
    while (now := wake_ups(ids)) != before or not sleeping():
        before = now
    return before


IDLE_S: Final = 0.3
"""Long enough for any polling interval to show; a loaded machine makes it no less true."""


def test_idle_units_never_wake_up(pipeline: Pipeline) -> None:
    attempt(pipeline, layers_of(Stage()), STRATEGIES["cicada"])
    ids = native_ids()
    assert len(ids) >= 4
    before = settled(ids)

    threading.Event().wait(IDLE_S)

    assert wake_ups(ids) == before


@pytest.mark.parametrize("strategy", ["pisel", "mini", "preload", "cicada"])
def test_units_that_wait_for_a_file_never_wake_up(pipeline: Pipeline, strategy: str) -> None:
    stage, file = Stage(), threading.Event()
    waiting = threading.Event()

    def delay() -> None:
        waiting.set()
        assert file.wait(2 * DEADLINE_S)  # a wait with a limit sleeps through all the same

    stage.at["chunk", 0] = delay
    with (
        begun(pipeline, layers_of(stage), STRATEGIES[strategy]) as run,
        ThreadPoolExecutor(1, thread_name_prefix="compute") as compute,
    ):
        answer = compute.submit(run.execute, [])
        assert waiting.wait(DEADLINE_S)
        ids = native_ids()
        before = settled(ids)

        threading.Event().wait(IDLE_S)

        assert wake_ups(ids) == before
        assert not answer.done()
        file.set()
        assert answer.result(DEADLINE_S) == [0, 1, 2, 3, 4]


@each_decoupled
def test_later_layers_are_applied_while_a_file_is_delayed(
    pipeline: Pipeline, strategy: Strategy
) -> None:
    stage, timeline, others = Stage(), timeline_of(strategy), threading.Event()
    stage.at["chunk", 0] = lambda: _wait(others)
    stage.at["apply", 4] = others.set  # layer 0's file waits until the last layer's A
    with begun(pipeline, layers_of(stage), strategy, timeline) as run:
        assert run.execute([]) == [0, 1, 2, 3, 4]

    applied = [layer for step, layer in stage.log if step == "apply"]
    assert applied == [2, 4, 0]
    assert [span.layer for span in timeline.spans if span.kind == "execute"] == [0, 1, 2, 3, 4]


@each_decoupled
def test_weights_that_the_last_request_found_in_memory_are_mapped_by_the_weight_unit(
    pipeline: Pipeline, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_faults, "storage_reads", lambda: 0)
    durations = durations_of(in_memory=False)
    used = []
    for _ in range(2):
        stage, names = Stage(), set[str]()
        for layer in WEIGHTED:
            stage.at["chunk", layer] = partial(_note_thread, names)
        assert attempt(pipeline, layers_of(stage), strategy, durations) == ([0, 1, 2, 3, 4], None)
        used.append(names)

    assert durations.in_memory
    assert all(name.startswith("retrieve") for name in used[0])
    assert used[1] == {"weight"}


@each_decoupled
def test_what_is_in_memory_no_longer_is_left_to_the_retrieval_threads(
    pipeline: Pipeline, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(page_faults, "storage_reads", lambda: len(reads))
    durations = durations_of(in_memory=True)
    stage, first, others = Stage(), set[str](), set[str]()

    def from_storage() -> None:
        _note_thread(first)
        reads.append(1)

    stage.at["chunk", WEIGHTED[0]] = from_storage
    for layer in WEIGHTED[1:]:
        stage.at["chunk", layer] = partial(_note_thread, others)

    assert attempt(pipeline, layers_of(stage), strategy, durations) == ([0, 1, 2, 3, 4], None)

    assert first == {"weight"}
    assert others
    assert all(name.startswith("retrieve") for name in others)
    assert not durations.in_memory


@each_decoupled
def test_a_late_file_has_the_later_ones_suspended_and_the_timeline_tells(
    pipeline: Pipeline, strategy: Strategy
) -> None:
    stage, timeline = Stage(), timeline_of(strategy)
    known: Future[Run] = Future()

    def until_the_next_is_held() -> None:
        flight = known.result(DEADLINE_S)._flight
        assert flight is not None
        eventually(lambda: 2 in flight._scheduler.suspended, "the next file is suspended")

    stage.at["chunk", 0] = until_the_next_is_held
    at_once = Durations([0] * LAYERS)  # so each is late as soon as it is issued
    run = pipeline.begin(layers_of(stage), strategy, at_once, timeline)
    known.set_result(run)
    try:
        assert run.execute([]) == [0, 1, 2, 3, 4]
    finally:
        run.leave()

    ends = {span.layer: span.end_ns for span in timeline.spans if span.kind == "retrieve"}
    first = min(held for held in timeline.suspensions if held.layer == 2)
    assert first.start_ns <= ends[0] <= first.end_ns < ends[2]
    assert 0 not in {held.layer for held in timeline.suspensions}


def _note_thread(names: set[str]) -> None:
    names.add(threading.current_thread().name)


def _wait(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


class DelayedStep:
    """A real layer whose file comes only when `there` is set; tells when it is applied."""

    def __init__(
        self, step: LayerStep, there: threading.Event, applied: Callable[[], None]
    ) -> None:
        self._step = step
        self._there = there
        self._applied = applied
        self.weighted = step.weighted
        self.construct = step.construct
        self.initialize = step.initialize
        self.held_bytes = step.held_bytes
        self.execute = step.execute
        self.release = step.release

    def retrieval(self, *, in_memory: bool = False) -> "DelayedFile":
        return DelayedFile(self._step.retrieval(in_memory=in_memory), self._there)

    def apply(self, retrieval: "DelayedFile") -> None:
        self._step.apply(retrieval.file)
        self._applied()


class DelayedFile:
    def __init__(self, file: WeightFile, there: threading.Event) -> None:
        self.file = file
        self._there = there

    @property
    def bytes(self) -> int:
        return self.file.bytes

    @property
    def is_mapped(self) -> bool:
        return self.file.is_mapped

    def step(self) -> bool:
        _wait(self._there)
        return self.file.step()


@pytest.mark.parametrize("weight_format", ["safetensors", "pth"])
@pytest.mark.parametrize("delayed", [0, 4], ids=["first", "middle"])
@each_decoupled
def test_the_answer_of_a_real_model_is_equal_when_a_file_is_delayed(
    pipeline: Pipeline,
    strategy: Strategy,
    delayed: int,
    weight_format: str,
    store: Store,
    image: Tensor,
    expected: Tensor,
) -> None:
    model = store.open(f"resnet18-{weight_format}")
    plan = Plans().of(model)
    files = OpenFiles(model, plan)
    now, others_are_applied = threading.Event(), threading.Event()
    now.set()
    real = steps(plan, files, strategy)
    weighted = [index for index, step in enumerate(real) if step.weighted]
    assert delayed in weighted
    order: list[int] = []

    def note(index: int) -> Callable[[], None]:
        def applied() -> None:
            order.append(index)
            if set(order) == set(weighted) - {delayed}:
                others_are_applied.set()

        return applied

    layers = [
        DelayedStep(step, others_are_applied if index == delayed else now, note(index))
        for index, step in enumerate(real)
    ]
    try:
        with begun(pipeline, layers, strategy) as run, torch.inference_mode():
            logits: Any = run.execute(image)
    finally:
        files.close()

    assert order[-1] == delayed
    assert len(order) == len(weighted)
    assert torch.equal(logits, expected)
