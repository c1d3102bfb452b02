"""How many requests at once a memory limit carries, per strategy and setup: the paper claims more, unmeasured.

As many handler processes as can be are put into one control group with the limit, and all work on a request at
once. So many are carried as all answer, twice over, without the kernel killing one. The handlers' own memory
(Python, torch) counts, as it does in a container; the proxy and its admission are left out.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import psutil
from rich.progress import Progress

from bench import control_groups, plots
from bench.control_groups import Group, NotAllowed
from bench.latency import ServedVariant, random_input
from bench.memory import MemorySampler, anonymous_bytes
from bench.paper import stores
from bench.paper.choices import SETUPS, Run, Setup
from bench.paper.journal import Journal
from bench.paper.material import Material
from bench.paper.part import Part, Plot, Sheet, Shown, number
from bench.paper.published import STRATEGIES
from bench.worker import Worker, starters

MOST: Final = 40
"""More are not tried."""
_REPEATS: Final = 2
_ANSWER_LIMIT_S: Final = 60.0
_MB: Final = 1e6
_GB: Final = 1e9


def measure(run: Run, journal: Journal, progress: Progress) -> None:
    cells = [
        (f"{model}, {setup.name}, {strategy}", model, setup, strategy)
        for model in run.choices.density_models
        for setup in SETUPS
        for strategy in STRATEGIES
    ]
    task = progress.add_task("density", total=len(cells))
    for step, model, setup, strategy in cells:
        progress.update(task, description=f"density: {step}")
        if step not in journal:
            journal.add(step, _cell(run, model, setup, strategy))
        progress.advance(task)
    progress.remove_task(task)


def _cell(run: Run, model: str, setup: Setup, strategy: str) -> dict[str, Any]:
    told: dict[str, Any] = {"model": model, "setup": setup.name, "strategy": strategy}
    limit = run.choices.memory_limit
    alone = _alone(run, model, setup, strategy)
    told |= {"limit_bytes": limit, **alone}
    try:
        found = _most(run, model, setup, strategy, limit // alone["peak_anonymous_bytes"])
    except NotAllowed as error:
        return {**told, "carried": None, "why": str(error), "how": "not measured"}
    return {**told, **found}


def _alone(run: Run, model: str, setup: Setup, strategy: str) -> dict[str, int]:
    """One handler's private memory at rest and at its highest in a request: where to begin to search."""
    root = stores.store(run, setup).root
    with Worker.handler(root, 1) as worker:
        variant = ServedVariant(strategy, None, None, worker, model, strategy)
        rest = anonymous_bytes(psutil.Process(worker.pid))
        with MemorySampler(worker.pid) as sampler:
            variant.run(random_input())
        peak = max(sampler.peak, rest)
    return {"rest_anonymous_bytes": rest, "peak_anonymous_bytes": peak}


def _most(run: Run, model: str, setup: Setup, strategy: str, guess: int) -> dict[str, Any]:
    """The largest number that is carried while one more is not."""
    count = min(max(guess, 1), MOST)
    tried: dict[int, bool] = {}
    how = ""
    while 1 <= count <= MOST and count not in tried:
        with ExitStack() as stack:
            group = stack.enter_context(control_groups.memory_limited(run.choices.memory_limit))
            crowd = stack.enter_context(_Crowd(run, model, setup, strategy, group))
            how = group.setting
            count = _climb(crowd, count, tried)
        if tried.get(count - 1):
            break
        count -= max(1, count // 4)
    carried = max((number for number, right in tried.items() if right), default=0)
    return {"carried": carried, "at_least": carried == MOST, "how": how, "why": None}


def _climb(crowd: "_Crowd", count: int, tried: dict[int, bool]) -> int:
    """Tries ever more from `count` on, and returns the first that was not carried."""
    while count <= MOST and tried.get(count) is not False:
        tried[count] = crowd.carries(count)
        if not tried[count]:
            break
        count += 1
    return count


@dataclass(slots=True)
class _Crowd:
    """Handlers in one group; a context manager that ends them."""

    run: Run
    model: str
    setup: Setup
    strategy: str
    group: Group
    workers: list[Worker] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: starters(MOST))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for worker in self.workers:
            worker.close()
        self._pool.shutdown()

    def carries(self, count: int) -> bool:
        """Whether so many requests at once are all answered."""
        missing = count - len(self.workers)
        starting = [self._pool.submit(self._start, count) for _ in range(missing)]
        self.workers.extend(one.result() for one in starting if one.exception() is None)
        if len(self.workers) < count:
            return False
        asked = [self._pool.submit(self._ask, worker) for worker in self.workers]
        done, late = wait(asked, _ANSWER_LIMIT_S)
        if late:
            self._kill()
        return not late and not any(one.exception() for one in done)

    def _kill(self) -> None:
        for worker in self.workers:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(worker.pid).kill()

    def _start(self, count: int) -> Worker:
        arguments = [
            *("--group", str(self.group.folder), "--"),
            *("--weights", str(stores.store(self.run, self.setup).root)),
            *("--threads", "1"),
            *("--memory-limit", str(self.run.choices.memory_limit // count)),
        ]
        return Worker("bench.paper.entry", arguments)

    def _ask(self, worker: Worker) -> None:
        variant = ServedVariant(self.strategy, None, None, worker, self.model, self.strategy)
        for _ in range(_REPEATS):
            variant.run(random_input())


def part(material: Material, described: str) -> Part:
    rows = material.density
    limit = material.run.choices.memory_limit / _GB
    sentences = [
        (
            f"Handler processes in one control group with {limit:g} GB, each with one request at the same "
            "time, one thread each; the largest number of which all answered twice while with one more the "
            "kernel killed one (or they took over a minute). What Python and torch take counts, as it does "
            "in a container; the proxy and its admission are left out. The paper claims more requests at "
            "once and does not measure it."
        )
    ]
    reasons = dict.fromkeys(row["why"] for row in rows if row["why"])
    sentences.extend(f"Not measured: {reason}." for reason in reasons)
    settings = ", ".join(dict.fromkeys(row["how"] for row in rows))
    return Part(
        title="Density: requests at once within a memory limit",
        sentences=[*sentences, f"The limit as set: {settings}."],
        tables=[_table(rows)],
        plots=[
            Plot("density", "Requests carried at once.", partial(_draw, rows, described)),
        ],
        sheets=[Sheet("density", rows)],
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Shown:
    shown = []
    for key in dict.fromkeys((row["model"], row["setup"]) for row in rows):
        mine = {row["strategy"]: row for row in rows if (row["model"], row["setup"]) == key}
        one = mine["cicada"]
        shown.append(
            [
                ", ".join(key),
                *(_count(mine[strategy]) for strategy in STRATEGIES),
                number(one["rest_anonymous_bytes"] / _MB),
                number(one["peak_anonymous_bytes"] / _MB),
            ]
        )
    header = [
        *("model, setup", *STRATEGIES),
        *("a handler at rest, private MB", "its highest under cicada, MB"),
    ]
    return Shown("Requests at once.", header, shown)


def _count(row: Mapping[str, Any]) -> str:
    if row["carried"] is None:
        return "not measured"
    return f"{row['carried']} or more" if row["at_least"] else str(row["carried"])


def _draw(rows: Sequence[Mapping[str, Any]], described: str, stem: Path) -> None:
    keys = list(dict.fromkeys((row["model"], row["setup"]) for row in rows))
    width = 0.8 / len(STRATEGIES)
    with plots.figure(stem, 7, 2.8, described) as (_, axes):
        for index, strategy in enumerate(STRATEGIES):
            found = [row["carried"] or 0 for row in rows if row["strategy"] == strategy]
            places = [position + (index - 2) * width for position in range(len(keys))]
            bars = axes.bar(places, found, width, color=plots.COLOURS[index], label=strategy)
            axes.bar_label(bars, fontsize=7)
        axes.set_xticks(range(len(keys)), [", ".join(key) for key in keys])
        axes.set_ylabel("requests at once")
        axes.legend(ncols=5, fontsize=8)
