"""A made-up hour in the trace's schema, for where the trace itself is not at hand: it cannot be shipped.

Published, and met: 2,426 invocations in the hour; bursty by minute; few functions have most invocations. Not
published, and chosen here: how bursty (the paper shows a plot without numbers), how many functions, and how heavy
the tail. README and every report made from this hour say that it is synthetic.
"""

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.replay.trace import HEADER, MINUTE_S, Invocation, Window, index_of_dispersion

PAPER_INVOCATIONS: Final = 2426
MINUTES: Final = 60
DISPERSION: Final = 10.0
WHY_DISPERSION: Final = (
    "Variance over mean of the invocations per minute. The paper publishes none. Arrivals at random "
    "have 1; with 10, one minute's count deviates by half the mean, so that the busiest minute has two "
    "to three times the mean and the quietest a few invocations."
)
_TOLERANCE: Final = 0.05
_TRIES: Final = 10_000
_FUNCTIONS_PER_APP: Final = 3
_DURATION_LOG_MEAN: Final = -0.38
_DURATION_LOG_DEVIATION: Final = 2.36
"""Of the natural logarithm of seconds: the fit to Azure's functions by Shahrad et al., "Serverless in the Wild"
(USENIX ATC 2020)."""
_LONGEST_S: Final = 600.0
_EDGE_S: Final = 0.001
"""Kept from a minute's edges, so that rounding moves no arrival to another minute."""


@dataclass(frozen=True, slots=True)
class Shape:
    """functions: how many there are, a third as many apps. exponent: of their popularity by rank (Zipf)."""

    seed: int = 0
    invocations: int = PAPER_INVOCATIONS
    dispersion: float = DISPERSION
    functions: int = 200
    exponent: float = 1.1


def counts(shape: Shape) -> list[int]:
    """Invocations of each minute: as many as `shape` says together, as dispersed as it says within 5 %.

    Minutes have rates of a gamma distribution, whose counts are dispersed by 1 + mean / its shape. The
    draws that come near the wanted index are few enough to be found and many enough to differ by seed.
    Raises ValueError for an index that no hour was found to have.
    """
    generator = np.random.default_rng(shape.seed)
    mean = shape.invocations / MINUTES
    for _ in range(_TRIES):
        rates = _rates(generator, mean, shape.dispersion)
        drawn = [int(count) for count in generator.multinomial(shape.invocations, rates)]
        if abs(index_of_dispersion(drawn) / shape.dispersion - 1) <= _TOLERANCE:
            return drawn
    raise ValueError(
        f"no hour of {shape.invocations} invocations with an index of dispersion of "
        f"{shape.dispersion:g} was found in {_TRIES} draws"
    )


def _rates(generator: np.random.Generator, mean: float, dispersion: float) -> NDArray[np.float64]:
    """Each minute's share."""
    if dispersion <= 1:
        return np.full(MINUTES, 1 / MINUTES)
    rates = generator.gamma(mean / (dispersion - 1), size=MINUTES)
    shares: NDArray[np.float64] = rates / rates.sum()
    return shares


def invocations(shape: Shape, window: Window) -> Iterator[Invocation]:
    """The hour's invocations from the window's start on, in the order of their ends, as a log has them."""
    generator = np.random.default_rng([shape.seed, 1])
    popularity = np.arange(1.0, shape.functions + 1.0) ** -shape.exponent
    popularity /= popularity.sum()
    rows = []
    for minute, count in enumerate(counts(shape)):
        within = generator.uniform(_EDGE_S, MINUTE_S - _EDGE_S, count)
        durations = np.minimum(
            generator.lognormal(_DURATION_LOG_MEAN, _DURATION_LOG_DEVIATION, count), _LONGEST_S
        )
        chosen = generator.choice(shape.functions, count, p=popularity)
        for offset, duration, function in zip(within, durations, chosen, strict=True):
            end = window.start_s + minute * MINUTE_S + float(offset) + float(duration)
            app = int(function) // _FUNCTIONS_PER_APP
            rows.append(
                Invocation(
                    _name("app", shape.seed, app),
                    _name("func", shape.seed, int(function)),
                    end,
                    float(duration),
                )
            )
    return iter(sorted(rows, key=lambda row: row.end_s))


def _name(kind: str, seed: int, number: int) -> str:
    """As long as the trace's encrypted names are."""
    return hashlib.sha256(f"synthetic {kind} {seed} {number}".encode()).hexdigest()


def write(path: Path, shape: Shape, window: Window) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for row in invocations(shape, window):
            writer.writerow((row.app, row.func, f"{row.end_s:.6f}", f"{row.duration_s:.6f}"))
