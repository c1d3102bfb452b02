"""The synthetic hour: it has what is published of the paper's hour, in the trace's schema."""

from collections import Counter
from pathlib import Path

import pytest

from bench.replay import assignment, synthetic, trace
from bench.replay.synthetic import Shape
from bench.replay.trace import Window

WINDOW = Window(day=14, hour=3, minutes=60)


def arrivals(folder: Path, shape: Shape) -> list[trace.Arrival]:
    path = folder / "hour.csv"
    synthetic.write(path, shape, WINDOW)
    return trace.arrivals(trace.read(path), WINDOW)


@pytest.mark.parametrize("seed", range(5))
def test_the_hour_has_the_papers_invocations_and_the_chosen_bursts(
    tmp_path: Path, seed: int
) -> None:
    found = arrivals(tmp_path, Shape(seed=seed))
    assert len(found) == 2426
    counts = trace.per_minute(found, 60)
    assert trace.index_of_dispersion(counts) == pytest.approx(10, rel=0.05)
    assert counts == synthetic.counts(Shape(seed=seed))


def test_few_functions_have_most_invocations(tmp_path: Path) -> None:
    counts = sorted(
        Counter(arrival.function for arrival in arrivals(tmp_path, Shape())).values(), reverse=True
    )
    assert sum(counts[: len(counts) // 10]) > len(counts) // 10 * counts[len(counts) // 2] * 10
    assert sum(counts[: len(counts) // 5]) > 0.6 * sum(counts)
    even = Counter(one.function for one in arrivals(tmp_path, Shape(exponent=0.0)))
    assert max(even.values()) < counts[0] / 4


def test_an_hour_is_made_by_its_seed_alone(tmp_path: Path) -> None:
    first = arrivals(tmp_path, Shape(seed=3))
    assert arrivals(tmp_path, Shape(seed=3)) == first
    assert arrivals(tmp_path, Shape(seed=4)) != first


@pytest.mark.parametrize("dispersion", [1.0, 4.0, 30.0])
def test_other_bursts_may_be_asked_for(dispersion: float) -> None:
    counts = synthetic.counts(Shape(dispersion=dispersion))
    assert trace.index_of_dispersion(counts) == pytest.approx(dispersion, rel=0.05)
    assert sum(counts) == 2426


def test_bursts_that_no_hour_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no hour of 2426 invocations"):
        synthetic.counts(Shape(dispersion=50_000))


def test_a_function_keeps_its_model_whatever_else_is_in_the_window() -> None:
    models = ["resnet50", "vgg16", "vit_b_16"]
    functions = [f"app/{number}" for number in range(300)]
    chosen = {function: assignment.model_of(function, models, 0) for function in functions}
    assert all(80 <= count <= 120 for count in Counter(chosen.values()).values())
    other = {function: assignment.model_of(function, models, 1) for function in functions}
    assert other != chosen
    assert assignment.model_of("app/7", models, 0) == chosen["app/7"]
