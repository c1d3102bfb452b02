"""Medians, and how sure they are: bootstrap confidence intervals of 95 %."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 2000
_SEED: Final = 0
_LEVELS: Final = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median of n values, and between which values it lies with 95 % confidence."""

    n: int
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"


def median(values: Sequence[float]) -> Estimate:
    """The percentile bootstrap: the medians of resamples drawn with replacement."""
    drawn = np.median(_resamples(np.asarray(values, dtype=float)), axis=1)
    low, high = (float(bound) for bound in np.percentile(drawn, _LEVELS))
    return Estimate(len(values), statistics.median(values), low, high)


def reduction(base: Sequence[float], other: Sequence[float]) -> Estimate:
    """By how much the median of `other` is less than that of `base`, as a part of it; negative: more.

    The values are of the same rounds, which are drawn together.
    """
    both = np.stack([np.asarray(base, dtype=float), np.asarray(other, dtype=float)], axis=1)
    drawn = np.median(_resamples(both), axis=1)
    low, high = (float(bound) for bound in np.percentile(1 - drawn[:, 1] / drawn[:, 0], _LEVELS))
    found = 1 - statistics.median(other) / statistics.median(base)
    return Estimate(len(base), found, low, high)


def mean_reduction(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    """The mean over models of `reduction`, each model's rounds drawn for itself."""
    drawn = []
    for number, (base, other) in enumerate(pairs):
        both = np.stack([np.asarray(base, dtype=float), np.asarray(other, dtype=float)], axis=1)
        medians = np.median(_resamples(both, number), axis=1)
        drawn.append(1 - medians[:, 1] / medians[:, 0])
    low, high = (float(bound) for bound in np.percentile(np.mean(drawn, axis=0), _LEVELS))
    found = statistics.mean(
        1 - statistics.median(other) / statistics.median(base) for base, other in pairs
    )
    return Estimate(min(len(base) for base, _ in pairs), found, low, high)


def _resamples(values: NDArray[np.float64], number: int = 0) -> NDArray[np.float64]:
    """As many rows as RESAMPLES, each of as many of the values as there are."""
    generator = np.random.default_rng([_SEED, number])
    chosen = generator.integers(0, len(values), (RESAMPLES, len(values)))
    drawn: NDArray[np.float64] = values[chosen]
    return drawn
