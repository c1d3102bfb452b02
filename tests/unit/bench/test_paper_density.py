"""The search for how many requests are carried at once, with crowds that carry what the test says."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from bench import control_groups
from bench.control_groups import Group
from bench.paper import density
from bench.paper.choices import OURS, Run


class Crowd:
    """Carries up to `most`; every attempt is noted, a new crowd as 0."""

    most = 0
    attempts: list[int]

    def __init__(self, *_: object) -> None:
        self.attempts.append(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def carries(self, count: int) -> bool:
        self.attempts.append(count)
        return count <= self.most


@contextmanager
def group(_limit: int) -> Iterator[Group]:
    yield Group(Path("group"), "memory.max = 1")


class Chosen:
    memory_limit = 1


@pytest.mark.parametrize("most", [0, 1, 2, 5, 12, 39, 40, 60])
@pytest.mark.parametrize("guess", [0, 1, 4, 13, 100])
def test_the_most_that_are_carried_are_found_from_any_guess(
    monkeypatch: pytest.MonkeyPatch, most: int, guess: int
) -> None:
    monkeypatch.setattr(control_groups, "memory_limited", group)
    monkeypatch.setattr(density, "_Crowd", Crowd)
    monkeypatch.setattr(Crowd, "most", most)
    attempts: list[int] = []
    monkeypatch.setattr(Crowd, "attempts", attempts, raising=False)
    run: Any = Run(Chosen(), Path(), Path(), None)  # type: ignore[arg-type]
    found = density._most(run, "resnet50", OURS, "cicada", guess)
    assert found["carried"] == min(most, density.MOST)
    assert found["at_least"] == (most >= density.MOST)
    assert found["how"] == "memory.max = 1"
    assert max(attempts) <= density.MOST
    tried = [count for count in attempts if count]
    assert len(tried) == len(set(tried)), "no number is tried twice"
