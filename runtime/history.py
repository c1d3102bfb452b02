"""The last ten minutes in steps of five seconds: how many requests, how long they took, what was in use."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from runtime.requests import Record

STEP_S: Final = 5
KEPT_STEPS: Final = 120
_GROWTH: Final = 1.02


class Sketch:
    """A distribution of durations from which percentiles are read, right to 1 %.

    Counts per logarithmic bin (as in DDSketch, Masson et al., VLDB 2019): a few hundred bins reach from a
    microsecond to an hour, however many requests there were, and sketches add up.
    """

    def __init__(self, parts: Iterable["Sketch"] = ()) -> None:
        self.bins: Counter[int] = Counter()
        for part in parts:
            self.bins.update(part.bins)

    def add(self, milliseconds: float) -> None:
        self.bins[math.ceil(math.log(max(milliseconds, 1e-3), _GROWTH))] += 1

    def percentile(self, percent: float) -> float | None:
        """The nearest rank's, in milliseconds; None of nothing."""
        remaining = math.ceil(self.bins.total() * percent / 100)
        for place in sorted(self.bins):
            remaining -= self.bins[place]
            if remaining <= 0:
                return 2 * _GROWTH**place / (_GROWTH + 1)
        return None


@dataclass(slots=True)
class Use:
    """What was in use at one moment; `memory_bytes` is None where the kernel does not tell."""

    waiting: int
    working: int
    memory_bytes: int | None


@dataclass(slots=True)
class Step:
    """What ended in these seconds, and the last that was seen in use.

    answered: with a result; refused: by a fault of the caller's, or for want of room (4xx); failed: 5xx.
    """

    number: int
    answered: int = 0
    refused: int = 0
    failed: int = 0
    totals: Sketch = field(default_factory=Sketch)
    use: Use | None = None

    @property
    def start_s(self) -> float:
        """On the monotonic clock."""
        return float(self.number * STEP_S)


class History:
    """Fed with requests as they end and with samples; steps in which neither came are not kept."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)

    def observe(self, record: Record) -> None:
        step = self._current()
        if record.status == 200:
            step.answered += 1
            step.totals.add(record.total_ms or 0.0)
        elif (record.status or 500) < 500:
            step.refused += 1
        else:
            step.failed += 1

    def sample(self, use: Use) -> None:
        self._current().use = use

    def steps(self, seconds: float = STEP_S * KEPT_STEPS) -> Iterator[Step]:
        """Those that lie within the last so many seconds, the oldest first; the last one is not over yet."""
        first = time.monotonic() - seconds
        return (step for step in self._steps if step.start_s + STEP_S > first)

    def _current(self) -> Step:
        number = math.floor(time.monotonic() / STEP_S)
        if not self._steps or self._steps[-1].number != number:
            self._steps.append(Step(number))
        return self._steps[-1]
