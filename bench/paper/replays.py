"""The trace's minutes against a service of each strategy, in an open loop."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from rich.progress import Progress

from bench import payload, plots
from bench.http import Served
from bench.paper import stores
from bench.paper.choices import OURS, Run
from bench.paper.journal import Journal
from bench.paper.material import Material
from bench.paper.part import Part, Plot, Sheet, Shown, number, percent
from bench.paper.published import STRATEGIES
from bench.replay import command, report, synthetic
from bench.replay import plots as replay_plots
from bench.replay.assignment import model_of
from bench.replay.cost import cost
from bench.replay.driver import Replay
from bench.replay.trace import MINUTE_S, Arrival, per_minute

_QUEUE: Final = 256
_TIMEOUT_S: Final = 600.0


def measure(run: Run, arrivals: Sequence[Arrival], journal: Journal, progress: Progress) -> None:
    choices = run.choices
    minutes = min(choices.replay_minutes, choices.window.minutes)
    found = [arrival for arrival in arrivals if arrival.offset_s < minutes * MINUTE_S]
    for strategy in choices.replay_strategies:
        if strategy in journal:
            continue
        calls = command.planned(found, choices.models, choices.seed, choices.replay_speedup)
        task = progress.add_task(f"replay: {strategy}", total=len(calls))
        with Served(stores.store(run, OURS).root, _QUEUE, choices.threads) as served:
            _warm_up(served.url, choices.models)
            replay = Replay(
                url=served.url,
                requests={
                    model: payload.request("binary", model, stores.SIDE, None)
                    for model in choices.models
                },
                headers={"Cicada-Strategy": strategy},
                in_flight=_QUEUE,
                timeout_s=_TIMEOUT_S,
            )
            replay.run(calls, partial(progress.advance, task))
        journal.add(strategy, _told(strategy, replay, minutes))
        progress.remove_task(task)


def _warm_up(url: str, models: Sequence[str]) -> None:
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for model in models:
            sent = payload.request("binary", model, stores.SIDE, None)
            client.post(sent.path, headers=sent.headers, content=sent.body).raise_for_status()


def _told(strategy: str, replay: Replay, minutes: int) -> Mapping[str, Any]:
    found = cost(replay.outcomes, replay.memory, minutes * MINUTE_S)
    return {
        "strategy": strategy,
        "minutes": [asdict(minute) for minute in report.minutes(replay.outcomes, minutes)],
        "seconds": replay.seconds,
        "outcomes": [asdict(one) for one in sorted(replay.outcomes, key=lambda one: one.number)],
        "cost": None if found is None else asdict(found),
    }


def part(material: Material, described: str) -> Part:
    choices = material.run.choices
    found = report.arrivals(
        material.arrivals,
        [model_of(one.function, choices.models, choices.seed) for one in material.arrivals],
        choices.window.minutes,
    )
    hour = report.minutes((), choices.window.minutes)
    counts = per_minute(material.arrivals, choices.window.minutes)
    bars = [replace(row, invocations=count) for row, count in zip(hour, counts, strict=True)]
    played = list(_overview(material))
    return Part(
        title="Trace (Fig. 8) and replay",
        sentences=list(_sentences(material, found)),
        tables=[_table(played)],
        plots=[
            Plot(
                "fig8_invocations_per_minute",
                f"Invocations per minute: {material.trace_name}, {choices.window}.",
                partial(
                    replay_plots.invocations_per_minute,
                    rows=bars,
                    title=material.trace_name,
                    described=described,
                ),
            ),
            Plot(
                "replay_latencies",
                "Latency from when an invocation was due to its answer: what part was answered within "
                "how long. Logarithmic scale.",
                partial(_draw, material.replays, described),
            ),
        ],
        sheets=[
            Sheet("trace_minutes", [asdict(row) for row in bars], "does not matter"),
            Sheet("replay", played),
            Sheet("replay_minutes", list(_minutes(material))),
            Sheet("replay_invocations", list(_invocations(material))),
        ],
    )


def _sentences(material: Material, found: report.Arrivals) -> Iterator[str]:
    choices = material.run.choices
    yield (
        f"The window is {choices.window} of {material.trace_name}: {found.invocations} invocations of "
        f"{found.functions} functions, which the seed {choices.seed} assigned to {len(choices.models)} "
        f"models; index of dispersion {found.index_of_dispersion:.1f}, busiest minute "
        f"{found.busiest_minute}, the most-invoked tenth of the functions has "
        f"{percent(found.top_tenth_share)} of the invocations."
    )
    if choices.trace is None:
        yield (
            "It is synthetic: Azure's trace cannot be shipped. As published are its schema and the "
            f"{synthetic.PAPER_INVOCATIONS} invocations; chosen is the index of dispersion, "
            f"{choices.shape.dispersion:g}. {synthetic.WHY_DISPERSION} Functions have Zipf's popularity "
            f"with the exponent {choices.shape.exponent:g}."
        )
    minutes = min(choices.replay_minutes, choices.window.minutes)
    yield (
        f"Its first {minutes} min were replayed at {choices.replay_speedup:g} times their speed against "
        "a service of its own for each strategy, with one handler and our setup, in an open loop: an "
        "invocation is sent when it is due, however slow the service is. Cost is that of the weights: "
        "their bytes times the time for which requests used them, against the same models resident for "
        "the window. Mapped weights that requests share are counted for each of them."
    )


def _overview(material: Material) -> Iterator[dict[str, Any]]:
    for one in material.replays:
        answered = [row for row in one["outcomes"] if row["error"] is None]
        latencies = [row["latency_ms"] for row in answered]
        p50, p95, p99 = report.percentiles(latencies, (50, 95, 99))
        found = one["cost"] or {}
        yield {
            "strategy": one["strategy"],
            "invocations": len(one["outcomes"]),
            "errors": len(one["outcomes"]) - len(answered),
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "seconds": one["seconds"],
            "served_gb_s": found.get("served_gb_s"),
            "resident_gb_s": found.get("resident_gb_s"),
            "saved": found.get("saved"),
        }


def _minutes(material: Material) -> Iterator[dict[str, Any]]:
    for one in material.replays:
        for minute in one["minutes"]:
            yield {"strategy": one["strategy"], **minute}


def _invocations(material: Material) -> Iterator[dict[str, Any]]:
    for one in material.replays:
        yield from one["outcomes"]


def _table(rows: Sequence[Mapping[str, Any]]) -> Shown:
    shown = [
        [
            row["strategy"],
            str(row["invocations"]),
            str(row["errors"]),
            *(_optional(row[name]) for name in ("p50_ms", "p95_ms", "p99_ms")),
            _optional(row["served_gb_s"]),
            _optional(row["resident_gb_s"]),
            "" if row["saved"] is None else percent(row["saved"]),
        ]
        for row in rows
    ]
    header = [
        *("strategy", "invocations", "errors", "p50, ms", "p95, ms", "p99, ms"),
        *("weights while used, GB-s", "resident, GB-s", "saved"),
    ]
    return Shown("The replay.", header, shown)


def _optional(value: float | None) -> str:
    return "" if value is None else number(value)


def _draw(replays: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    with plots.figure(stem, 7, 3, described) as (_, axes):
        for one in replays:
            index = STRATEGIES.index(one["strategy"])
            latencies = sorted(row["latency_ms"] for row in one["outcomes"] if row["error"] is None)
            axes.step(
                latencies,
                [(place + 1) / len(one["outcomes"]) for place in range(len(latencies))],
                where="post",
                color=plots.COLOURS[index],
                ls=plots.DASHES[index],
                label=one["strategy"],
            )
        axes.set_xscale("log")
        axes.set_xlabel("ms")
        axes.set_ylabel("part of the invocations")
        axes.set_ylim(0, 1)
        axes.legend()
