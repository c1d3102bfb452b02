"""Memory for the bodies of all requests under way: the queue bounds how many wait, this bounds what they hold."""

from typing import Final

from runtime.errors import BodiesFull
from runtime.requests import Record
from runtime.settings import Settings

_SHARE: Final = 4
"""A quarter of the container's memory, unless CICADA_BODIES_BYTES says otherwise."""
_BODIES_AT_LEAST: Final = 2


class Uploads:
    """Keeps account of what the bodies of requests take, from their first byte to the request's end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    def hold(self, record: Record, size: int) -> None:
        """More of a request's body has come. Raises BodiesFull."""
        if self._held + size > self._limit:
            raise BodiesFull(
                f"the bodies of the requests under way have reached {self._limit} bytes, "
                "the most that CICADA_BODIES_BYTES allows"
            )
        self._held += size
        record.body_bytes += size

    def release(self, record: Record) -> None:
        """The request has ended."""
        self._held -= record.body_bytes
        record.body_bytes = 0


def limit(settings: Settings, memory_bytes: int | None) -> int:
    """In bytes; the container's memory is None where it is not known."""
    if settings.bodies_bytes is not None:
        return settings.bodies_bytes
    return max((memory_bytes or 0) // _SHARE, _BODIES_AT_LEAST * settings.max_body_bytes)
