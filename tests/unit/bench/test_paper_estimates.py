"""Medians and their bootstrap intervals."""

import numpy as np
import pytest

from bench.paper import estimates


def test_a_median_lies_in_its_interval_and_is_the_values_own() -> None:
    found = estimates.median([5.0, 1.0, 3.0, 2.0, 100.0])
    assert (found.n, found.median) == (5, 3.0)
    assert 1.0 <= found.low <= 3.0 <= found.high <= 100.0


def test_values_that_are_alike_leave_no_doubt() -> None:
    found = estimates.median([7.0] * 9)
    assert (found.low, found.median, found.high) == (7.0, 7.0, 7.0)
    assert estimates.median([7.0]).high == 7.0


def test_intervals_hold_the_true_median_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        found = estimates.median(list(generator.normal(10.0, 2.0, 30)))
        held += found.low <= 10.0 <= found.high
    assert 0.88 <= held / 200 <= 0.99


def test_a_reduction_is_of_the_medians() -> None:
    found = estimates.reduction([100.0, 110.0, 90.0], [40.0, 55.0, 30.0])
    assert found.median == pytest.approx(0.6)
    assert found.low <= 0.6 <= found.high
    assert estimates.reduction([100.0], [150.0]).median == pytest.approx(-0.5)


def test_rounds_are_drawn_together() -> None:
    """A machine that slows both in one round alike leaves their ratio: the interval is a point."""
    base = [100.0, 300.0, 200.0, 150.0]
    found = estimates.reduction(base, [value / 4 for value in base])
    assert (found.low, found.median, found.high) == pytest.approx((0.75, 0.75, 0.75))


def test_a_mean_over_models_weighs_each_model_alike() -> None:
    slow = ([1000.0, 1000.0], [500.0, 500.0])
    quick = ([10.0, 10.0], [9.0, 9.0])
    found = estimates.mean_reduction([slow, quick])
    assert found.median == pytest.approx((0.5 + 0.1) / 2)
    assert (found.low, found.high) == pytest.approx((0.3, 0.3))
