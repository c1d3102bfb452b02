"""The requests from which latency, placeholders, units, utilization and timelines follow.

Models come in the order in which the trace asks for them; each time, every setup and strategy is asked in turn,
and the resident floor, beginning with another one each time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any, Final

from rich.progress import Progress

from bench import page_cache
from bench.paper import services, stores
from bench.paper.choices import Choices, Run
from bench.paper.journal import Journal
from bench.paper.services import Service
from bench.paper.stores import Floor
from bench.replay import assignment
from bench.replay.trace import Arrival
from bench.settling import settle
from handler.strategies import STRATEGIES
from handler.timeline import KINDS, Kind, Span, Timeline, union_ns

_MS: Final = 1e6


def planned(choices: Choices, arrivals: Sequence[Arrival]) -> list[tuple[str, str]]:
    """Name and model of every step: each model `rounds` times, in the trace's order.

    Models that the trace's hour asks for less often come at its end.
    """
    counts: Counter[str] = Counter()
    steps = []
    for model in [*_asked_for(choices, arrivals), *_remaining(choices)]:
        if counts[model] < choices.rounds:
            counts[model] += 1
            steps.append((f"{model}, round {counts[model]}", model))
    return steps


def _asked_for(choices: Choices, arrivals: Sequence[Arrival]) -> Iterator[str]:
    for arrival in arrivals:
        yield assignment.model_of(arrival.function, choices.models, choices.seed)


def _remaining(choices: Choices) -> Iterator[str]:
    for _, model in product(range(choices.rounds), choices.models):
        yield model


def measure(run: Run, arrivals: Sequence[Arrival], journal: Journal, progress: Progress) -> None:
    steps = planned(run.choices, arrivals)
    pending = [step for step in steps if step[0] not in journal]
    task = progress.add_task(
        "requests: start", total=len(steps), completed=len(steps) - len(pending)
    )
    if pending:
        with ExitStack() as stack:
            _measure(run, pending, journal, stack, progress, task)
    progress.remove_task(task)


def _measure(
    run: Run,
    pending: Sequence[tuple[str, str]],
    journal: Journal,
    stack: ExitStack,
    progress: Progress,
    task: Any,
) -> None:
    models = list(dict.fromkeys(model for _, model in pending))
    floor = stores.floor(run, models, stack)
    started = services.start(run, stack)
    progress.update(task, description="requests: warm up")
    services.warm_up(started, models)
    for step, model in pending:
        progress.update(task, description=f"requests: {step}")
        data = _round(run, step, model, floor, started, len(journal))
        journal.add(step, data)
        progress.advance(task)


def _round(
    run: Run, step: str, model: str, floor: Floor, started: Sequence[Service], number: int
) -> dict[str, Any]:
    contenders: list[Service | Floor] = [floor, *started]
    first = number % len(contenders)
    resident_ms = 0.0
    told = []
    for contender in [*contenders[first:], *contenders[:first]]:
        settle()
        if isinstance(contender, Floor):
            resident_ms = contender.run(model)
        else:
            told.append(_request(run, step, model, contender))
    return {"model": model, "resident_ms": resident_ms, "requests": told}


def _request(run: Run, step: str, model: str, service: Service) -> dict[str, Any]:
    request_id = step.replace(", ", "-").replace(" ", "-")
    cached = page_cache.read_in(stores.prepared(run, service.setup, model).path)
    client_ms = service.ask(model, request_id)
    shown = service.shown(request_id)
    timeline = timeline_of(shown)
    return {
        "setup": service.setup.name,
        "strategy": service.strategy,
        "cached_share": cached,
        "client_ms": client_ms,
        "total_ms": shown["total_ms"],
        "queue_ms": shown["queue_ms"],
        "figures": shown["figures"],
        "active_ms": union_ns((s.start_ns, s.end_ns) for s in timeline.spans) / _MS,
        "exposed_ms": exposed(timeline),
        "layers": layers(timeline),
        "suspensions": len(timeline.suspensions),
        "spans": _compact(timeline) if model in run.choices.timeline_models else None,
    }


def timeline_of(shown: Mapping[str, Any]) -> Timeline:
    """The timeline of a request as the service shows it, its zero the request's arrival at the proxy."""
    timeline = Timeline(
        layers=shown["layers"],
        decoupled=STRATEGIES[shown["strategy"]].decoupled,
        arrival_ns=0,
    )
    for span in shown["spans"]:
        start, end = round(span["start_ms"] * _MS), round(span["end_ms"] * _MS)
        timeline.record(span["layer"], span["kind"], start, end)
    return timeline


def exposed(timeline: Timeline) -> dict[Kind, float]:
    """How long nothing but this kind ran, milliseconds: the most that doing away with it could save."""
    occupied = union_ns((span.start_ns, span.end_ns) for span in timeline.spans)
    return {
        kind: (
            occupied - union_ns((s.start_ns, s.end_ns) for s in timeline.spans if s.kind != kind)
        )
        / _MS
        for kind in KINDS
    }


def layers(timeline: Timeline) -> list[dict[str, Any]]:
    """What each layer took, by kind of span, and how long weight and compute unit waited for it."""
    waits = {unit: timeline.waits(unit) for unit in ("weight", "compute")}
    rows = []
    for index, name in enumerate(timeline.layers):
        spans = [span for span in timeline.spans if span.layer == index]
        rows.append(
            {
                "layer": name,
                **{f"{kind}_ms": _length(spans, kind) for kind in KINDS},
                **{f"{unit}_wait_ms": waits[unit].get(index, 0) / _MS for unit in waits},
            }
        )
    return rows


def _length(spans: Sequence[Span], kind: Kind) -> float:
    return sum(span.end_ns - span.start_ns for span in spans if span.kind == kind) / _MS


def _compact(timeline: Timeline) -> list[tuple[int, str, float, float]]:
    return [
        (span.layer, span.kind, span.start_ns / _MS, span.end_ns / _MS) for span in timeline.spans
    ]
