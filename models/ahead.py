"""What the next request will want, made while none is there."""

from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Keeps one thing that was made before it is wanted; `make` makes it. Not for takers side by side."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: Made | None = None

    def prepare(self, make: Callable[[], Made]) -> None:
        """Does the work of the next `take` now."""
        if self._made is None:
            self._made = make()

    def discard(self) -> Made | None:
        """What was made ahead, if anything was; it is kept no more."""
        made, self._made = self._made, None
        return made

    def take(self, make: Callable[[], Made]) -> Made:
        """One that nobody else has."""
        made = self.discard()
        return make() if made is None else made
