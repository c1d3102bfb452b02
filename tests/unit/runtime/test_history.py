import math
import random
from collections.abc import Callable

import pytest

from runtime.history import KEPT_STEPS, STEP_S, History, Sketch, Use
from runtime.requests import Record


def nearest_rank(values: list[float], percent: float) -> float:
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


@pytest.mark.parametrize("percent", [1, 50, 95, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 100, 5000])
def test_a_percentile_is_the_nearest_ranks_to_one_in_a_hundred(percent: float, count: int) -> None:
    chance = random.Random(count)
    values = [chance.lognormvariate(4, 1.5) for _ in range(count)]
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    assert sketch.percentile(percent) == pytest.approx(nearest_rank(values, percent), rel=0.01)


def test_sketches_add_up() -> None:
    values = [random.Random(0).uniform(1, 1000) for _ in range(300)]
    parts = [Sketch() for _ in range(3)]
    whole = Sketch()
    for index, value in enumerate(values):
        parts[index % 3].add(value)
        whole.add(value)
    for percent in (5, 50, 99):
        assert Sketch(parts).percentile(percent) == whole.percentile(percent)


def test_of_nothing_there_is_no_percentile_and_of_no_time_there_is() -> None:
    assert Sketch().percentile(50) is None
    sketch = Sketch()
    sketch.add(0.0)
    assert sketch.percentile(50) == pytest.approx(0.001, rel=0.02)


Clock = Callable[[float], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    def set_to(seconds: float) -> None:
        monkeypatch.setattr("runtime.history.time.monotonic", lambda: seconds)

    return set_to


def ended(status: int, total_ms: float = 10.0) -> Record:
    return Record("r", arrived_ns=0, answered_ns=round(total_ms * 1e6), status=status)


def test_requests_are_counted_by_how_they_ended_in_the_step_in_which_they_did(
    set_clock: Clock,
) -> None:
    kept = History()
    set_clock(1000)
    for status in (200, 200, 400, 429, 499, 500, 504):
        kept.observe(ended(status))
    set_clock(1004.9)
    kept.observe(ended(200))
    set_clock(1005)
    kept.observe(ended(503))
    counts = [(step.start_s, step.answered, step.refused, step.failed) for step in kept.steps()]
    assert counts == [(1000, 3, 3, 2), (1005, 0, 0, 1)]


def test_percentiles_are_of_those_that_were_answered(set_clock: Clock) -> None:
    kept = History()
    set_clock(0)
    kept.observe(ended(200, 100))
    kept.observe(ended(400, 1))
    (step,) = kept.steps()
    assert step.totals.percentile(1) == pytest.approx(100, rel=0.01)


def test_the_last_sample_of_a_step_holds(set_clock: Clock) -> None:
    kept = History()
    set_clock(0)
    kept.sample(Use(waiting=1, working=1, memory_bytes=None))
    kept.sample(Use(waiting=2, working=3, memory_bytes=4))
    assert [step.use for step in kept.steps()] == [Use(2, 3, 4)]


def test_no_more_is_kept_than_ten_minutes_and_older_steps_are_not_shown(set_clock: Clock) -> None:
    kept = History()
    for step in range(2 * KEPT_STEPS):
        set_clock(step * STEP_S)
        kept.observe(ended(200))
    assert len(list(kept.steps())) == KEPT_STEPS
    assert sum(step.answered for step in kept.steps(60)) == 60 / STEP_S + 1  # one is not over
    set_clock((2 * KEPT_STEPS + 60) * STEP_S)
    assert len(list(kept.steps())) == KEPT_STEPS - 60
