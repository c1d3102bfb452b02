"""The priority-aware scheduler: cases worked out by hand, and what holds in every order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from handler.scheduler import Decision, DurationRecords, Durations, PriorityAwareScheduler

NOTHING = Decision()


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def recorded(**durations_ns: int) -> Durations:
    """Durations with D_W of the layers w0, w1, ... as given and of those between them 0."""
    by_layer = {int(name[1:]): duration for name, duration in durations_ns.items()}
    durations = Durations([0] * (max(by_layer) + 1))
    for layer, duration in by_layer.items():
        durations._retrieval[layer] = duration
    return durations


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_papers_example(clock: Clock) -> None:
    """Section III-E: W2, W4 and W5 are issued in turn at t0 + a. W2 is expected by (t0 + a) + D_W2; it
    is still processing then, so W4 and W5 are suspended, and they go on when it has completed."""
    t0, a, d_w2 = 1000, 3, 200
    scheduler = PriorityAwareScheduler([2, 4, 5], recorded(w2=d_w2, w4=500, w5=900), clock)

    clock.now_ns = t0 + a
    assert scheduler.issued(2) == NOTHING
    assert scheduler.issued(4) == NOTHING
    assert scheduler.issued(5) == NOTHING
    clock.now_ns = t0 + a + d_w2
    assert scheduler.review() == NOTHING, "W2 is not late before its expected completion has passed"
    clock.now_ns = t0 + a + d_w2 + 1
    decision = scheduler.review()
    assert sorted(decision.suspend) == [4, 5]
    assert decision.resume == ()
    assert scheduler.review() == NOTHING, "they are suspended once"
    assert scheduler.suspended == {4, 5}
    clock.now_ns += 50
    decision = scheduler.finished(2)
    assert sorted(decision.resume) == [4, 5]
    assert decision.suspend == ()
    assert scheduler.suspended == frozenset()


def test_the_papers_example_when_w2_is_in_time(clock: Clock) -> None:
    scheduler = PriorityAwareScheduler([2, 4, 5], recorded(w2=200, w4=500, w5=900), clock)
    for layer in (2, 4, 5):
        scheduler.issued(layer)

    clock.now_ns = 200
    assert scheduler.finished(2) == NOTHING
    clock.now_ns = 100_000
    assert scheduler.review() == NOTHING, "W2 is finished: until A2 has run, no other is needed"


def test_the_next_needed_layer_is_judged_as_soon_as_the_one_before_is_applied(
    clock: Clock,
) -> None:
    scheduler = PriorityAwareScheduler(
        [0, 1, 2, 3], recorded(w0=100, w1=100, w2=1000, w3=1000), clock
    )
    for layer in range(4):
        scheduler.issued(layer)
    clock.now_ns = 90
    scheduler.finished(0)
    clock.now_ns = 150
    assert scheduler.needed == 0

    decision = scheduler.applied(0)

    assert scheduler.needed == 1
    assert sorted(decision.suspend) == [2, 3], "W1 was expected by 100"


def test_layers_applied_out_of_order_are_never_needed(clock: Clock) -> None:
    scheduler = PriorityAwareScheduler([0, 1, 2, 3], recorded(w3=0), clock)
    for layer in range(4):
        scheduler.issued(layer)
    for layer in (2, 1):
        scheduler.finished(layer)
        scheduler.applied(layer)
    assert scheduler.needed == 0

    scheduler.finished(0)
    scheduler.applied(0)

    assert scheduler.needed == 3
    scheduler.finished(3)
    scheduler.applied(3)
    assert [scheduler.needed] == [None]
    assert scheduler.review() == NOTHING


def test_a_retrieval_that_is_issued_while_the_needed_one_is_late_is_suspended_at_once(
    clock: Clock,
) -> None:
    scheduler = PriorityAwareScheduler([0, 1, 2], recorded(w0=100, w1=100, w2=100), clock)
    scheduler.issued(0)
    clock.now_ns = 101

    assert scheduler.issued(1) == Decision(suspend=(1,))
    assert scheduler.issued(2) == Decision(suspend=(2,))
    assert sorted(scheduler.finished(0).resume) == [1, 2]


def test_a_suspended_retrieval_that_finishes_with_its_chunk_is_not_resumed(clock: Clock) -> None:
    """Suspension takes effect at the next chunk; the chunk under way may have been the last."""
    scheduler = PriorityAwareScheduler([0, 1, 2], recorded(w0=100, w1=100, w2=100), clock)
    for layer in range(3):
        scheduler.issued(layer)
    clock.now_ns = 101
    assert sorted(scheduler.review().suspend) == [1, 2]

    assert scheduler.finished(2) == NOTHING
    assert scheduler.finished(0) == Decision(resume=(1,))


def test_what_was_resumed_is_suspended_again_for_the_next_late_layer(clock: Clock) -> None:
    scheduler = PriorityAwareScheduler([0, 1, 2], recorded(w0=100, w1=200, w2=300), clock)
    for layer in range(3):
        scheduler.issued(layer)
    clock.now_ns = 101
    assert sorted(scheduler.review().suspend) == [1, 2]
    clock.now_ns = 150
    assert sorted(scheduler.finished(0).resume) == [1, 2]
    assert scheduler.applied(0) == NOTHING
    clock.now_ns = 201
    assert scheduler.review() == Decision(suspend=(2,)), "W1 was expected by 200"


def test_before_the_needed_retrieval_is_issued_nothing_is_held(clock: Clock) -> None:
    scheduler = PriorityAwareScheduler([0, 1], recorded(w0=0, w1=0), clock)
    scheduler.issued(1)
    clock.now_ns = 10**12

    assert scheduler.review() == NOTHING
    assert scheduler.needed == 0


def test_layers_without_weights_are_no_concern_of_it(clock: Clock) -> None:
    scheduler = PriorityAwareScheduler([3, 7], recorded(w3=10, w7=10), clock)
    assert scheduler.needed == 3
    scheduler.issued(3)
    scheduler.finished(3)
    scheduler.applied(3)
    assert scheduler.needed == 7


def test_a_model_without_weights_needs_nothing(clock: Clock) -> None:
    scheduler = PriorityAwareScheduler([], Durations([0, 0]), clock)
    assert scheduler.needed is None
    assert scheduler.review() == NOTHING


class Requests(RuleBasedStateMachine):
    """One request after another event, in any order that a request's events can have.

    Retrievals are issued in any order, `slots` of them at once; one that is suspended makes no
    progress beyond the chunk that is under way; layers are applied in any order.
    """

    @initialize(
        durations=st.lists(st.integers(0, 100), min_size=1, max_size=8),
        slots=st.integers(1, 4),
    )
    def arrive(self, durations: list[int], slots: int) -> None:
        self.clock = Clock()
        self.slots = slots
        self.durations = durations
        self.layers = list(range(len(durations)))
        self.scheduler = PriorityAwareScheduler(self.layers, Durations(durations), self.clock)
        self.issued_ns: dict[int, int] = {}
        self.unissued = set(self.layers)
        self.running: set[int] = set()
        self.held: set[int] = set()
        self.in_chunk: set[int] = set()
        self.finished: set[int] = set()
        self.applied: set[int] = set()

    @property
    def needed(self) -> int | None:
        return min(set(self.layers) - self.applied, default=None)

    def follow(self, decision: Decision) -> None:
        for layer in decision.suspend:
            assert layer in self.running, "only what runs can be suspended"
            assert self.needed is not None
            assert layer > self.needed
            assert self.needed not in self.finished
            self.running.remove(layer)
            self.held.add(layer)
        for layer in decision.resume:
            assert layer in self.held, "only what is held can be resumed"
            self.held.remove(layer)
            self.running.add(layer)
        if self.is_late:
            assert self.running <= {
                layer for layer in self.layers if layer <= (self.needed or 0)
            }, "every later retrieval is suspended"

    @property
    def is_late(self) -> bool:
        needed = self.needed
        if needed is None or needed in self.finished or needed not in self.issued_ns:
            return False
        return self.clock.now_ns > self.issued_ns[needed] + self.durations[needed]

    @precondition(lambda self: self.unissued and len(self.running | self.held) < self.slots)
    @rule(data=st.data())
    def issue(self, data: st.DataObject) -> None:
        layer = data.draw(st.sampled_from(sorted(self.unissued)))
        self.unissued.remove(layer)
        self.running.add(layer)
        self.in_chunk.add(layer)
        self.issued_ns[layer] = self.clock.now_ns
        self.follow(self.scheduler.issued(layer))

    @precondition(lambda self: self.in_chunk)
    @rule(data=st.data(), last=st.booleans())
    def end_chunk(self, data: st.DataObject, last: bool) -> None:
        """A chunk that is under way ends, of a held retrieval too, which then starts none."""
        layer = data.draw(st.sampled_from(sorted(self.in_chunk)))
        if last:
            self.end(layer)
            return
        self.follow(self.scheduler.review())
        if layer in self.held:
            self.in_chunk.remove(layer)

    def end(self, layer: int) -> None:
        self.in_chunk.discard(layer)
        self.running.discard(layer)
        self.held.discard(layer)
        self.finished.add(layer)
        self.follow(self.scheduler.finished(layer))
        self.in_chunk |= self.running

    @precondition(lambda self: self.finished - self.applied)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        layer = data.draw(st.sampled_from(sorted(self.finished - self.applied)))
        self.applied.add(layer)
        self.follow(self.scheduler.applied(layer))
        self.in_chunk |= self.running

    @rule(passed=st.integers(1, 150))
    def wait(self, passed: int) -> None:
        self.clock.now_ns += passed
        self.follow(self.scheduler.review())

    @invariant()
    def the_needed_retrieval_is_never_suspended(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.scheduler.needed == self.needed
            assert self.needed not in self.held
            assert self.held == self.scheduler.suspended

    @invariant()
    def nothing_is_suspended_once_the_needed_retrieval_has_finished(self) -> None:
        if hasattr(self, "scheduler") and (self.needed is None or self.needed in self.finished):
            assert not self.held

    def teardown(self) -> None:
        """Whatever happened: if only what is not held goes on, every layer is still applied."""
        if not hasattr(self, "scheduler"):
            return
        while self.needed is not None:
            if self.finished - self.applied:
                layer = max(self.finished - self.applied)
                self.applied.add(layer)
                self.follow(self.scheduler.applied(layer))
            elif self.running:
                self.end(max(self.running))
            else:
                assert self.unissued, f"deadlock: {sorted(self.held)} are held for ever"
                assert len(self.held) < self.slots, "deadlock: every slot is held"
                layer = min(self.unissued)
                self.unissued.remove(layer)
                self.running.add(layer)
                self.issued_ns[layer] = self.clock.now_ns
                self.follow(self.scheduler.issued(layer))
            self.clock.now_ns += 1000
        assert not self.held
        assert not self.running


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


class Counted(int):
    """A layer index that counts what is done with it."""

    operations = 0

    def __hash__(self) -> int:
        Counted.operations += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.operations += 1
        return super().__eq__(other)

    def __gt__(self, other: int) -> bool:
        Counted.operations += 1
        return super().__gt__(other)

    def __lt__(self, other: int) -> bool:
        Counted.operations += 1
        return super().__lt__(other)


def _operations(layers: int, in_flight: int) -> tuple[int, int, int]:
    """Operations on layer indices that suspending, reviewing and resuming all in flight take."""
    clock = Clock()
    indices = [Counted(index) for index in range(layers)]
    scheduler = PriorityAwareScheduler(indices, Durations([10] * layers), clock)
    for index in indices[:in_flight]:
        scheduler.issued(index)
    clock.now_ns = 11

    def counted(decide: object) -> tuple[Decision, int]:
        Counted.operations = 0
        assert callable(decide)
        decision = decide()
        return decision, Counted.operations

    suspending, suspend_cost = counted(scheduler.review)
    assert len(suspending.suspend) == in_flight - 1
    _, review_cost = counted(scheduler.review)
    resuming, resume_cost = counted(lambda: scheduler.finished(indices[0]))
    assert len(resuming.resume) == in_flight - 1
    return suspend_cost, review_cost, resume_cost


@pytest.mark.parametrize("in_flight", [2, 16, 128, 1024])
def test_a_decision_costs_a_few_operations_per_retrieval_in_flight(in_flight: int) -> None:
    suspending, reviewing, resuming = _operations(1024, in_flight)

    assert suspending <= 8 * in_flight
    assert resuming <= 8 * in_flight
    assert reviewing <= 16, "nothing new is in flight"


def test_a_decision_costs_nothing_for_layers_that_are_not_in_flight() -> None:
    assert _operations(10_000, 2) == _operations(4, 2)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), st.data())
def test_the_order_in_which_layers_are_named_does_not_matter(
    layers: list[int], data: st.DataObject
) -> None:
    clock = Clock()
    scheduler = PriorityAwareScheduler(
        data.draw(st.permutations(layers)), Durations([1] * 6), clock
    )
    assert scheduler.needed == min(layers)


class TestDurations:
    def test_the_first_estimate_follows_from_the_bytes(self) -> None:
        durations = Durations([1_000_000, 4_000_000, 0])
        assert durations.retrieval_ns(1) == 4 * durations.retrieval_ns(0)
        assert durations.retrieval_ns(2) == 0
        assert 100_000 < durations.retrieval_ns(0) < 10_000_000, "0.1 to 10 GB/s"
        assert durations.construction_ns(0) > 0

    def test_they_adapt_to_what_is_recorded(self) -> None:
        durations = Durations([1_000_000, 1_000_000])
        other = durations.retrieval_ns(1)
        before = durations.retrieval_ns(0)
        for _ in range(30):
            durations.retrieved(0, 40_000_000)
            assert before < durations.retrieval_ns(0) <= 40_000_000
            before = durations.retrieval_ns(0)
        assert before == pytest.approx(40_000_000, rel=0.01)
        for _ in range(30):
            durations.retrieved(0, 500)
        assert durations.retrieval_ns(0) < 0.01 * 40_000_000
        assert durations.retrieval_ns(1) == other, "each layer has its own"

    def test_one_outlier_does_not_rule(self) -> None:
        durations = Durations([0])
        for _ in range(50):
            durations.retrieved(0, 1000)
        durations.retrieved(0, 100_000)
        assert durations.retrieval_ns(0) < 50_000

    def test_construction_adapts_likewise(self) -> None:
        durations = Durations([0])
        for _ in range(30):
            durations.constructed(0, 7_000_000)
        assert durations.construction_ns(0) == pytest.approx(7_000_000, rel=0.01)

    def test_a_layer_that_has_become_slow_is_no_longer_called_late(self, clock: Clock) -> None:
        durations = Durations([100, 100])
        for _ in range(30):
            durations.retrieved(0, 10_000)
        scheduler = PriorityAwareScheduler([0, 1], durations, clock)
        scheduler.issued(0)
        scheduler.issued(1)
        clock.now_ns = 9_000
        assert scheduler.review() == NOTHING
        clock.now_ns = 10_001
        assert scheduler.review() == Decision(suspend=(1,))


class TestDurationRecords:
    def test_a_models_durations_are_kept_from_request_to_request(self) -> None:
        records = DurationRecords()
        records.of("resnet50/1", [1, 2]).retrieved(1, 999)
        assert records.of("resnet50/1", [1, 2]).retrieval_ns(1) > 2
        assert records.of("resnet50/2", [1, 2]).retrieval_ns(1) == 2

    def test_only_those_of_the_models_served_lately_are_kept(self) -> None:
        records = DurationRecords(most=2)
        first, second = records.of("a", [1]), records.of("b", [1])
        assert records.of("a", [1]) is first
        records.of("c", [1])
        assert records.of("a", [1]) is first
        assert records.of("b", [1]) is not second, "the one not asked for longest has gone"
