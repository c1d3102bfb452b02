"""A replay's files: every invocation, every minute, the summary, the plots; and what is printed."""

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench import environment
from bench.replay.cost import cost
from bench.replay.driver import Outcome, Replay
from bench.replay.trace import Arrival, index_of_dispersion, per_minute


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of the trace; latencies of what arrived in it and was answered, milliseconds."""

    minute: int
    invocations: int
    answered: int
    errors: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The window that was replayed, before anything was sent."""

    invocations: int
    functions: int
    index_of_dispersion: float
    busiest_minute: int
    top_function_share: float
    top_tenth_share: float
    """What part of the invocations the most-invoked tenth of the functions have."""
    per_model: Mapping[str, int]


def arrivals(found: Sequence[Arrival], models: Sequence[str], minutes: int) -> Arrivals:
    """models: of each arrival."""
    counts = per_minute(found, minutes)
    by_function = sorted(Counter(one.function for one in found).values(), reverse=True)
    return Arrivals(
        invocations=len(found),
        functions=len(by_function),
        index_of_dispersion=index_of_dispersion(counts),
        busiest_minute=max(counts),
        top_function_share=by_function[0] / len(found),
        top_tenth_share=sum(by_function[: -(-len(by_function) // 10)]) / len(found),
        per_model=dict(sorted(Counter(models).items())),
    )


def minutes(outcomes: Iterable[Outcome], count: int) -> list[Minute]:
    by_minute: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_minute[outcome.minute].append(outcome)
    return [_minute(number, by_minute[number]) for number in range(count)]


def _minute(number: int, outcomes: Sequence[Outcome]) -> Minute:
    latencies = _latencies(outcomes)
    p50, p95, p99 = percentiles(latencies, (50, 95, 99))
    return Minute(
        minute=number,
        invocations=len(outcomes),
        answered=len(latencies),
        errors=len(outcomes) - len(latencies),
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
    )


def _latencies(outcomes: Iterable[Outcome]) -> list[float]:
    return [
        outcome.latency_ms
        for outcome in outcomes
        if outcome.error is None and outcome.latency_ms is not None
    ]


def percentiles(values: Sequence[float], wanted: Sequence[float]) -> list[float | None]:
    if not values:
        return [None] * len(wanted)
    return [float(value) for value in np.percentile(values, wanted)]


def summary(
    described: Mapping[str, Any], replay: Replay, found: Arrivals, window_s: float
) -> dict[str, Any]:
    """described: what was replayed, and how."""
    latencies = _latencies(replay.outcomes)
    p50, p95, p99, most = percentiles(latencies, (50, 95, 99, 100))
    late = [one.late_ms for one in replay.outcomes if one.late_ms is not None]
    worst_late = percentiles(late, (99,))[0]
    found_cost = cost(replay.outcomes, replay.memory, window_s)
    return {
        **described,
        "arrivals": asdict(found),
        "complete": len(replay.outcomes) == found.invocations,
        "seconds": replay.seconds,
        "answered": len(latencies),
        "errors": dict(Counter(one.error for one in replay.outcomes if one.error is not None)),
        "latency_ms": {"p50": p50, "p95": p95, "p99": p99, "max": most},
        "late_p99_ms": worst_late,
        "models": _per_model(replay.outcomes),
        "cost": None if found_cost is None else asdict(found_cost),
        "container_memory": [asdict(sample) for sample in replay.memory],
    }


def _per_model(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    by_model: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_model[outcome.model].append(outcome)
    rows = []
    for model, theirs in sorted(by_model.items()):
        latencies = _latencies(theirs)
        p50, p95, p99 = percentiles(latencies, (50, 95, 99))
        pipelines = [one.pipeline_ms for one in theirs if one.pipeline_ms is not None]
        rows.append(
            {
                "model": model,
                "invocations": len(theirs),
                "answered": len(latencies),
                "p50_ms": p50,
                "p95_ms": p95,
                "p99_ms": p99,
                "pipeline_p50_ms": percentiles(pipelines, (50,))[0],
            }
        )
    return rows


def write(
    folder: Path, told: Mapping[str, Any], outcomes: Sequence[Outcome], by_minute: Sequence[Minute]
) -> None:
    """`invocations.csv`, `minutes.csv` and `summary.json`."""
    made_on = environment.columns(told["environment"], told["cache"])
    in_order = sorted(outcomes, key=lambda one: one.number)
    _write_rows(folder / "invocations.csv", in_order, Outcome, made_on)
    _write_rows(folder / "minutes.csv", by_minute, Minute, made_on)
    (folder / "summary.json").write_text(json.dumps(told, indent=1) + "\n")


def _write_rows(
    path: Path, rows: Iterable[Any], row_type: type[Any], made_on: Mapping[str, Any]
) -> None:
    """A row of a dataclass each, its fields' names the header."""
    names = [field.name for field in fields(row_type)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names, *made_on], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(row), **made_on} for row in rows)


def tables(told: Mapping[str, Any]) -> list[Table]:
    return [_overview(told), _models(told)]


def _overview(told: Mapping[str, Any]) -> Table:
    table = Table("replay", told["trace"])
    found, latency = told["arrivals"], told["latency_ms"]
    errors = ", ".join(f"{count} {error}" for error, count in told["errors"].items())
    table.add_row("window", f"{told['window']}, at {told['speedup']:g} times its speed")
    table.add_row(
        "invocations",
        f"{found['invocations']} of {found['functions']} functions; index of dispersion "
        f"{found['index_of_dispersion']:.1f}, busiest minute {found['busiest_minute']}",
    )
    table.add_row("answered", f"{told['answered']} in {told['seconds']:.1f} s")
    table.add_row("errors", errors or "none")
    table.add_row(
        "latency, ms",
        ", ".join(f"{name} {_number(latency[name], '.0f')}" for name in ("p50", "p95", "p99")),
    )
    for label, text in _costs(told["cost"]):
        table.add_row(label, text)
    return table


def _costs(found: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    if found is None:
        return
    served, resident = found["served_gb_s"], found["resident_gb_s"]
    saved = f"{found['saved']:.2%} saved"
    yield (
        "weights, GB-seconds",
        f"{served:.2f} while requests ran; {resident:.0f} if resident for the window ({saved})",
    )
    held, beside = found["container_gb_s"], found["container_resident_gb_s"]
    if held is not None:
        yield (
            "container, GB-seconds",
            f"{held:.1f} held during the replay; {beside:.1f} with the models resident",
        )


def _models(told: Mapping[str, Any]) -> Table:
    table = Table(
        *("model", "invocations", "answered", "p50 ms", "p95 ms", "p99 ms", "pipeline p50 ms")
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in told["models"]:
        table.add_row(
            row["model"],
            str(row["invocations"]),
            str(row["answered"]),
            *(
                _number(row[name], ".0f")
                for name in ("p50_ms", "p95_ms", "p99_ms", "pipeline_p50_ms")
            ),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
