"""`cicada replay`: a trace, or a synthetic hour in its schema, against a running service."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.progress import Progress

from bench import environment, payload, plots
from bench.payload import Request
from bench.replay import driver, report, synthetic, trace
from bench.replay import plots as replay_plots
from bench.replay.assignment import model_of
from bench.replay.driver import Call, Replay
from bench.replay.report import Arrivals
from bench.replay.synthetic import Shape
from bench.replay.trace import Arrival, Window
from models.errors import ModelError

_ASK_TIMEOUT_S: Final = 10.0
SERVER_CACHE: Final = "whatever the server's page cache holds; not touched"


PAPER: Final = "paper"


class ReplayFailed(ModelError):
    """The service cannot be replayed against, or answered nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    trace: Path | None
    """None: a synthetic hour is made, and kept beside the results."""
    window: Window
    shape: Shape
    """Of the synthetic hour."""
    url: str
    models: Sequence[str]
    any_of_them: bool
    """Whether those that the service lacks are left out; otherwise each must be there."""
    strategy: str | None
    seed: int
    speedup: float
    in_flight: int
    timeout_s: float
    api_key: str | None
    folder: Path


@dataclass(frozen=True, slots=True)
class Source:
    """Where the invocations come from, and how they are named in every file."""

    name: str
    path: Path
    synthetic: Mapping[str, Any] | None


def named(names: str) -> Sequence[str]:
    """What `--models` names."""
    if names != PAPER:
        return names.split(",")
    from models import catalog  # noqa: PLC0415 torchvision: a second, which other names do not need

    return catalog.PAPER


def run(options: Options) -> None:
    """Replays, prints the tables and writes the files. Raises ModelError, OSError."""
    console = Console(stderr=True)
    with httpx.Client(
        base_url=options.url, headers=_key(options), timeout=_ASK_TIMEOUT_S
    ) as client:
        requests = _requests(client, options, console)
    options.folder.mkdir(parents=True, exist_ok=True)
    source = prepare_source(options.trace, options.shape, options.window, options.folder)
    found = trace.arrivals(trace.read(source.path), options.window)
    calls = planned(found, list(requests), options.seed, options.speedup)
    arrived = report.arrivals(found, [call.model for call in calls], options.window.minutes)
    replay = Replay(
        url=options.url,
        requests=requests,
        headers={**_key(options), **_strategy(options)},
        in_flight=options.in_flight,
        timeout_s=options.timeout_s,
    )
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(source.name, total=len(calls))
            replay.run(calls, lambda: progress.advance(task))
    finally:
        if replay.outcomes:
            _tell(options, source, replay, arrived, console)
    if all(outcome.error for outcome in replay.outcomes):
        raise ReplayFailed(
            f"{options.url} answered none of {len(calls)} invocations with 200: "
            f"{options.folder / 'summary.json'} says what they got"
        )


def prepare_source(path: Path | None, shape: Shape, window: Window, folder: Path) -> Source:
    """The file to read; without one of the caller's, a synthetic hour is written. Raises ReplayFailed."""
    if path is not None:
        return Source(path.name, path, None)
    if window.minutes > synthetic.MINUTES:
        raise ReplayFailed(
            f"the synthetic trace is an hour long, and the window has {window.minutes} minutes"
        )
    made = folder / f"synthetic-hour-seed-{shape.seed}.csv"
    try:
        synthetic.write(made, shape, window)
    except ValueError as error:
        raise ReplayFailed(str(error)) from None
    described = {**asdict(shape), "why_this_dispersion": synthetic.WHY_DISPERSION}
    return Source(f"synthetic hour, seed {shape.seed}", made, described)


def planned(
    found: Sequence[Arrival], models: Sequence[str], seed: int, speedup: float
) -> list[Call]:
    """The calls that the arrivals become, their functions assigned to the models."""
    return driver.calls(
        [(one.offset_s, one.function, model_of(one.function, models, seed)) for one in found],
        speedup,
    )


def _key(options: Options) -> Mapping[str, str]:
    return {} if options.api_key is None else {"X-API-Key": options.api_key}


def _strategy(options: Options) -> Mapping[str, str]:
    return {} if options.strategy is None else {"Cicada-Strategy": options.strategy}


def _requests(client: httpx.Client, options: Options, console: Console) -> dict[str, Request]:
    """What is sent for each of the models that the service has. Raises ReplayFailed."""
    requests: dict[str, Request] = {}
    missing: list[str] = []
    for model in dict.fromkeys(options.models):
        side = _side(client, model)
        if side is None:
            missing.append(model)
        else:
            requests[model] = payload.request("binary", model, side, None)
    if missing and (not options.any_of_them or not requests):
        raise ReplayFailed(f"{options.url} does not serve {', '.join(missing)}")
    if missing:
        console.print(f"Not served, and left out: {', '.join(missing)}.", highlight=False)
    return requests


def _side(client: httpx.Client, model: str) -> int | None:
    """The side of the model's input in pixels; None for a model that the service does not have."""
    try:
        answer = client.get(f"/v2/models/{quote(model, safe='')}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ReplayFailed(f"{client.base_url} does not answer: {error}") from None
    if answer.status_code == 404:
        return None
    if not answer.is_success:
        raise ReplayFailed(f"{client.base_url} answers {answer.status_code}: {answer.text[:200]}")
    try:
        return int(answer.json()["inputs"][0]["shape"][-1])
    except (ValueError, LookupError, TypeError):
        raise ReplayFailed(f"{client.base_url} does not say what {model} takes") from None


def _tell(
    options: Options, source: Source, replay: Replay, arrived: Arrivals, console: Console
) -> None:
    described: dict[str, Any] = {
        "environment": environment.describe(
            len(os.sched_getaffinity(0)), " ".join(["cicada", *sys.argv[1:]])
        ),
        "cache": SERVER_CACHE,
        "trace": source.name,
        "synthetic": source.synthetic,
        "window": str(options.window),
        "url": options.url,
        "strategy": options.strategy or "the service's own",
        "speedup": options.speedup,
        "assignment_seed": options.seed,
        "in_flight": options.in_flight,
    }
    told = report.summary(described, replay, arrived, options.window.seconds)
    rows = report.minutes(replay.outcomes, options.window.minutes)
    report.write(options.folder, told, replay.outcomes, rows)
    for table in report.tables(told):
        Console().print(table)
    try:
        plots.require()
    except plots.PlotsMissing as error:
        console.print(f"No plots: {error}.", highlight=False)
        return
    title = f"{source.name}, {options.window}"
    made_on = json.dumps({**described["environment"], "cache": SERVER_CACHE})
    replay_plots.write(options.folder, rows, title, made_on)
