"""A replay's plots: invocations per minute (the paper's Fig. 8) and latencies over time."""

from collections.abc import Sequence
from pathlib import Path

from bench import plots
from bench.replay.report import Minute


def write(folder: Path, rows: Sequence[Minute], title: str, described: str) -> None:
    """`invocations_per_minute` and `latency_over_time`, as SVG and PNG."""
    invocations_per_minute(folder / "invocations_per_minute", rows, title, described)
    latency_over_time(folder / "latency_over_time", rows, title, described)


def invocations_per_minute(stem: Path, rows: Sequence[Minute], title: str, described: str) -> None:
    with plots.figure(stem, 7, 2.6, described) as (_, axes):
        axes.bar(
            [row.minute for row in rows], [row.invocations for row in rows], color=plots.COLOURS[0]
        )
        axes.set_title(title)
        axes.set_xlabel("minute")
        axes.set_ylabel("invocations")


def latency_over_time(stem: Path, rows: Sequence[Minute], title: str, described: str) -> None:
    with plots.figure(stem, 7, 2.8, described) as (_, axes):
        minutes = [row.minute for row in rows]
        percentiles = {
            "p50": [row.p50_ms for row in rows],
            "p95": [row.p95_ms for row in rows],
            "p99": [row.p99_ms for row in rows],
        }
        markers = ("o", "s", "^")
        for (name, values), marker, colour in zip(
            percentiles.items(), markers, plots.COLOURS, strict=False
        ):
            shown = [float("nan") if value is None else value for value in values]
            axes.plot(minutes, shown, marker=marker, ms=3, lw=1, color=colour, label=name)
        axes.set_title(title)
        axes.set_xlabel("minute of arrival")
        axes.set_ylabel("latency, ms")
        axes.set_ylim(bottom=0)
        axes.legend(ncols=3)
