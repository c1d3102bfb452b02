"""All that a run measured, and questions to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.paper.choices import Run, Setup
from bench.replay.trace import Arrival

Request = Mapping[str, Any]
Figure = Callable[[Request], float]


@dataclass(frozen=True, slots=True)
class Material:
    """The journals' contents, step by step as the sections' modules wrote them."""

    run: Run
    sessions: Sequence[Mapping[str, Any]]
    """Machine, versions, threads and command of each session that took part."""
    arrivals: Sequence[Arrival]
    trace_name: str
    construction: Sequence[Mapping[str, Any]]
    rounds: Sequence[Mapping[str, Any]]
    memory: Sequence[Mapping[str, Any]]
    density: Sequence[Mapping[str, Any]]
    replays: Sequence[Mapping[str, Any]]
    cold: Sequence[Mapping[str, Any]]

    @property
    def models(self) -> Sequence[str]:
        return self.run.choices.models

    def of(self, model: str, setup: Setup, strategy: str) -> Iterator[Request]:
        """The requests of one kind, in the order of the rounds."""
        for one in self.rounds:
            if one["model"] == model:
                yield from (
                    request
                    for request in one["requests"]
                    if request["setup"] == setup.name and request["strategy"] == strategy
                )

    def values(self, model: str, setup: Setup, strategy: str, figure: Figure) -> list[float]:
        return [figure(request) for request in self.of(model, setup, strategy)]

    def resident_ms(self, model: str) -> list[float]:
        return [one["resident_ms"] for one in self.rounds if one["model"] == model]


def client_ms(request: Request) -> float:
    ms: float = request["client_ms"]
    return ms


def figure(*names: str) -> Figure:
    """`figure("work_ms", "layer")`: what the response's figures say."""

    def read(request: Request) -> float:
        value: Any = request["figures"]
        for name in names:
            value = value[name]
        return float(value)

    return read
