"""Traces in the schema of Azure's of 2021: what is read of them, and what is refused."""

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.replay import trace
from bench.replay.trace import Arrival, Invocation, TraceError, Window

TEXT = "app,func,end_timestamp,duration\na,f,10.5,0.5\na,g,9,3\nb,f,86405.25,1.25\n"
DAY_S = 86400


def written(folder: Path, name: str, text: str = TEXT) -> Path:
    path = folder / name
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.txt", "trace.csv.gz", "trace.txt.gz", "t.gz"])
def test_rows_are_read_from_every_kind_of_file(tmp_path: Path, name: str) -> None:
    assert list(trace.read(written(tmp_path, name))) == [
        Invocation("a", "f", 10.5, 0.5),
        Invocation("a", "g", 9.0, 3.0),
        Invocation("b", "f", 86405.25, 1.25),
    ]


def test_a_file_with_windows_line_ends_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert len(list(trace.read(path))) == 3


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    """What comes before a damaged row is there before it is reached."""
    rows = trace.read(written(tmp_path, "trace.csv", TEXT + "broken\n"))
    assert [row.app for row in itertools.islice(rows, 3)] == ["a", "a", "b"]
    with pytest.raises(TraceError, match="row 5: 1 values, expected 4"):
        next(rows)


def test_an_invocation_arrives_at_its_end_less_its_duration() -> None:
    assert Invocation("a", "f", 10.5, 0.5).arrival_s == 10.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "its header is nothing"),
        ("app,func,duration,end_timestamp\n", "its header is 'app,func,duration,end_timestamp'"),
        ("app func end_timestamp duration\n", "its header is 'app func end_timestamp duration'"),
        (TEXT + "a,f,1\n", "row 5: 3 values, expected 4"),
        (TEXT + "a,f,1,2,3\n", "row 5: 5 values, expected 4"),
        (TEXT + ",f,1,1\n", "row 5: app is empty"),
        (TEXT + "a,,1,1\n", "row 5: func is empty"),
        (TEXT + "a,f,soon,1\n", "row 5: end_timestamp is 'soon'"),
        (TEXT + "a,f,1,-1\n", "row 5: duration is '-1'"),
        (TEXT + "a,f,nan,1\n", "row 5: end_timestamp is 'nan'"),
        (TEXT + "a,f,1,inf\n", "row 5: duration is 'inf'"),
        (TEXT + '"a\x00,f,1,1\n', "trace.csv"),
    ],
)
def test_what_is_no_trace_is_refused_and_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = written(tmp_path, "trace.csv", text)
    with pytest.raises(TraceError, match=sentence) as refused:
        list(trace.read(path))
    assert str(path) in str(refused.value)


def test_an_archive_is_to_be_unpacked_first(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="unpack archives"):
        list(trace.read(written(tmp_path, "trace.rar")))


@pytest.mark.parametrize("keep", [1, 20, 60])
def test_a_compressed_file_that_is_damaged_is_named(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path, "trace.csv.gz")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TraceError, match=str(path)):
        list(trace.read(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(TEXT.encode() + b"\xff,f,1,1\n")
    with pytest.raises(TraceError, match=str(path)):
        list(trace.read(path))


def test_a_window_has_the_arrivals_of_its_day_and_hour_in_their_order() -> None:
    window = Window(day=2, hour=1, minutes=2)
    start = DAY_S + 3600
    rows = [
        Invocation("a", "late", start + 200, 85),  # arrives at 115
        Invocation("a", "before", start + 10, 10.5),
        Invocation("a", "first", start + 30, 30),
        Invocation("a", "after", start + 121, 1),
        Invocation("b", "last", start + 120, 0.001),
    ]
    found = trace.arrivals(rows, window)
    assert [arrival.function for arrival in found] == ["a/first", "a/late", "b/last"]
    assert [arrival.offset_s for arrival in found] == pytest.approx([0, 115, 119.999])
    assert trace.per_minute(found, 2) == [1, 2]


def test_a_window_without_arrivals_says_where_there_are_some() -> None:
    rows = [Invocation("a", "f", DAY_S / 2, 0), Invocation("a", "f", 2 * DAY_S, 0)]
    with pytest.raises(TraceError, match=r"the trace's 2 arrive from day 1\.50 to day 3\.00"):
        trace.arrivals(rows, Window(14, 0, 60))
    with pytest.raises(TraceError, match="the trace has no invocation"):
        trace.arrivals(iter(()), Window(14, 0, 60))


def test_only_the_window_is_kept_of_a_long_trace() -> None:
    def endless() -> Iterator[Invocation]:
        for number in range(200_000):
            yield Invocation("a", "f", float(number), 0.0)

    assert len(trace.arrivals(endless(), Window(1, 10, 1))) == 60


def test_dispersion_is_variance_over_mean() -> None:
    assert trace.index_of_dispersion([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(4 / 5)
    assert trace.per_minute([Arrival(59.9, "f"), Arrival(60.0, "f")], 3) == [1, 1, 0]
