"""Traces in the schema of the Azure Functions invocation trace 2021, read row by row.

The trace: https://github.com/Azure/AzurePublicDataset/blob/master/AzureFunctionsInvocationTrace2021.md. Its rows
are `app,func,end_timestamp,duration`, seconds since the trace's start; an invocation arrived at its end less its
duration. Rows need not stand in the order of arrivals.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from models.errors import ModelError

HEADER: Final = ("app", "func", "end_timestamp", "duration")
MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400
_SUFFIXES: Final = (".csv", ".txt", ".gz")


class TraceError(ModelError):
    """A file that is no trace, or a window in which nothing happens."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One row."""

    app: str
    func: str
    end_s: float
    duration_s: float

    @property
    def arrival_s(self) -> float:
        return self.end_s - self.duration_s


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace; days count from 1, as the paper's day 14 does."""

    day: int
    hour: int
    minutes: int

    @property
    def start_s(self) -> int:
        return (self.day - 1) * _DAY_S + self.hour * _HOUR_S

    @property
    def seconds(self) -> int:
        return self.minutes * MINUTE_S

    def __str__(self) -> str:
        return f"day {self.day}, from {self.hour:02d}:00, {self.minutes} min"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An invocation within a window: seconds from the window's start, and which function it was of."""

    offset_s: float
    function: str


def read(path: Path) -> Iterator[Invocation]:
    """The rows of a .csv or .txt file, plain or compressed (.gz). Raises TraceError, OSError."""
    if path.suffix not in _SUFFIXES:
        raise TraceError(f"{path}: a trace is a file named {', '.join(_SUFFIXES)}; unpack archives")
    with _open(path) as file:
        reader = csv.reader(file)
        try:
            yield from _rows(path, reader)
        except (csv.Error, UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}, line {reader.line_num + 1}: {error}") from error


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    else:
        with path.open(encoding="utf-8", newline="") as file:
            yield file


def _rows(path: Path, reader: Iterator[list[str]]) -> Iterator[Invocation]:
    header = next(reader, None)
    if header is None or tuple(header) != HEADER:
        found = "nothing" if header is None else repr(",".join(header)[:200])
        raise TraceError(f"{path}: its header is {found}, expected {','.join(HEADER)!r}")
    for number, row in enumerate(reader, start=2):
        yield _invocation(f"{path}, row {number}", row)


def _invocation(where: str, row: list[str]) -> Invocation:
    if len(row) != len(HEADER):
        raise TraceError(f"{where}: {len(row)} values, expected {len(HEADER)}")
    app, func, end, duration = row
    if not app or not func:
        raise TraceError(f"{where}: {'app' if not app else 'func'} is empty")
    return Invocation(
        app, func, _seconds(where, "end_timestamp", end), _seconds(where, "duration", duration)
    )


def _seconds(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise TraceError(f"{where}: {name} is {text[:40]!r}, expected seconds, 0 or more")
    return value


def arrivals(invocations: Iterable[Invocation], window: Window) -> list[Arrival]:
    """The window's arrivals, in order; only these are kept in memory. Raises TraceError if there are none."""
    found = []
    seen = 0
    first, last = math.inf, -math.inf
    for invocation in invocations:
        seen += 1
        arrival_s = invocation.arrival_s
        first, last = min(first, arrival_s), max(last, arrival_s)
        offset_s = arrival_s - window.start_s
        if 0 <= offset_s < window.seconds:
            found.append(Arrival(offset_s, f"{invocation.app}/{invocation.func}"))
    if not seen:
        raise TraceError("the trace has no invocation")
    if not found:
        raise TraceError(
            f"no invocation arrives in {window}: the trace's {seen} arrive "
            f"from day {_day(first)} to day {_day(last)}"
        )
    return sorted(found, key=lambda arrival: arrival.offset_s)


def _day(seconds: float) -> str:
    return f"{seconds / _DAY_S + 1:.2f}"


def per_minute(found: Iterable[Arrival], minutes: int) -> list[int]:
    counts = [0] * minutes
    for arrival in found:
        counts[int(arrival.offset_s // MINUTE_S)] += 1
    return counts


def index_of_dispersion(counts: list[int]) -> float:
    """Variance over mean of the counts: 1 for arrivals at random (Poisson), more for bursts."""
    mean = sum(counts) / len(counts)
    return sum((count - mean) ** 2 for count in counts) / len(counts) / mean if mean else math.nan
