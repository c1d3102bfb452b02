"""Giving memory back to the system between requests."""

import ctypes
import mmap
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 128 << 20
"""What may stay with the allocator between requests that follow one another, for activations: if all
were given back each time, ResNet-50's next request would take 4 ms more in page faults."""

_M_ARENA_MAX: Final = -8
_STATM: Final = Path("/proc/self/statm")
_libc: Final = ctypes.CDLL(None)


def anonymous_bytes() -> int:
    """This process's resident memory that no file backs."""
    _, resident, shared, *_ = _STATM.read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def share_one_arena() -> None:
    """All threads allocate from one heap; to be called before there are others.

    glibc gives each thread a heap of its own and never gives back the end of one that is not the first,
    so what the layer and weight units freed of a whole model would stay with the process.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Gives to the system what is free in the allocator."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class Trimmer:
    """Gives back to the system what requests left free in the allocator.

    That is all of it once the handler rests, and before that what is over KEPT_BYTES: a model that was
    initialized or copied, not mapped.
    """

    def __init__(self) -> None:
        self._before = anonymous_bytes()

    def after_request(self) -> None:
        if anonymous_bytes() > self._before + KEPT_BYTES:
            give_back()

    def at_rest(self) -> None:
        give_back()
