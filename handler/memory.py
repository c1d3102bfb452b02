"""Giving memory back to the system between requests."""

import ctypes
import mmap
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 128 << 20
"""What may stay with the allocator between requests that follow one another, for activations: if all
were given back each time, ResNet-50's next request would take 4 ms more in page faults."""

_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
_M_TRIM_THRESHOLD: Final = -1
_MOST_HEAP_BLOCK_BYTES: Final = 32 << 20
"""Larger blocks are mapped and unmapped one by one; glibc allows no more."""
_STATM: Final = Path("/proc/self/statm")
_libc: Final = ctypes.CDLL(None)


def anonymous_bytes() -> int:
    """This process's resident memory that no file backs."""
    _, resident, shared, *_ = _STATM.read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def configure_allocator() -> None:
    """Sets up glibc's allocator for a handler; to be called before there are other threads.

    One heap for all threads: glibc gives each one of its own and never gives back the end of one that
    is not the first, so what the units freed of a whole model would stay with the process. And no
    giving back in the midst of a request: by itself glibc returns the end of the heap, and faults it in
    again, several times in each of a VGG's requests (10 to 20 ms).
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)
        _libc.mallopt(_M_MMAP_THRESHOLD, _MOST_HEAP_BLOCK_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back() -> None:
    """Gives to the system what is free in the allocator."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class Trimmer:
    """Gives back to the system what requests left free in the allocator.

    That is all of it once the handler rests, and before that what is over KEPT_BYTES: a model
    that was initialized or copied, not mapped.
    """

    def __init__(self) -> None:
        self._before = anonymous_bytes()

    def after_request(self) -> None:
        if anonymous_bytes() > self._before + KEPT_BYTES:
            give_back()

    def at_rest(self) -> None:
        give_back()
