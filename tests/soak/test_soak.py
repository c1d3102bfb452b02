"""The soak of `make soak`, a minute long."""

from pathlib import Path

import pytest

from bench import soak
from bench.soak import Held, Report

SECONDS = 60.0


@pytest.mark.timeout(240)
def test_a_minute_of_load_and_killed_handlers_loses_only_what_the_kills_explain(
    tmp_path: Path,
) -> None:
    report = soak.soak(SECONDS, tmp_path)
    told = "\n".join(soak.lines(report))
    assert list(report.faults()) == [], told
    assert report.killed >= 4, told
    assert report.refused, told
    assert report.left, told


def sound() -> Report:
    held = Held(memory_bytes=1 << 20, threads=4, descriptors=20)
    return Report(seconds=1.0, right=9, killed=2, lost=2, before=held, after=held)


def test_a_report_without_a_fault_has_none() -> None:
    assert list(sound().faults()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"right": 0}, "no request was answered"),
        ({"wrong": 1}, "1 answers were wrong"),
        ({"crossed": 1}, "1 answers were crossed"),
        ({"lost": 3}, "3 requests were lost, 2 handlers killed"),
        ({"after": Held(1 << 20, 5, 20)}, "threads grew from 4 to 5"),
        ({"after": Held(1 << 20, 4, 21)}, "descriptors grew from 20 to 21"),
        ({"after": Held(1 << 30, 4, 20)}, "memory grew from 1048576 to 1073741824 bytes"),
        ({"after": None}, "the proxy was not measured"),
    ],
)
def test_each_fault_of_a_report_is_told(change: dict[str, object], fault: str) -> None:
    report = sound()
    for name, value in change.items():
        setattr(report, name, value)
    assert list(report.faults()) == [fault]
