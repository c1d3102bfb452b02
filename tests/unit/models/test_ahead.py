"""What was made ahead is given once."""

import contextlib
import itertools

from models.ahead import Ahead


def test_what_was_made_ahead_is_given_once_and_then_made_when_asked_for() -> None:
    numbers = itertools.count()

    def make() -> int:
        return next(numbers)

    ahead = Ahead[int]()
    assert ahead.take(make) == 0
    for _ in range(2):
        ahead.prepare(make)
    assert [ahead.take(make) for _ in range(2)] == [1, 2]


def test_what_could_not_be_made_ahead_is_made_when_asked_for() -> None:
    ahead = Ahead[int]()

    def fail() -> int:
        raise MemoryError

    with contextlib.suppress(MemoryError):
        ahead.prepare(fail)
    assert ahead.take(lambda: 1) == 1
