"""Page faults on mapped files: whether they waited for storage, and how few of them map what is in memory.

A fault on a mapped file brings in its whole window, as far as that is in the page cache. To populate a mapping by
advice takes three times as long, as the kernel then still looks at every page.
"""

import functools
import mmap
import os
import resource
from pathlib import Path
from typing import Final

from handler.address_space import AddressSpace

WINDOW_BYTES: Final = 64 << 10
"""Of addresses, aligned: Linux's default for `fault_around_bytes`, which only root sees."""
_PAGEMAP: Final = Path("/proc/self/pagemap")
_ENTRY_BYTES: Final = 8
_PRESENT: Final = bytes(range(0x80, 0x100))
"""What the highest byte of a page's entry is when it is mapped (proc_pid_pagemap(5))."""
_known: Final[set[int]] = set()
"""Devices on whose files a fault has been seen to bring in the whole window."""


def storage_reads() -> int:
    """How often this thread has read from a block device, or waited for one, as far as the kernel tells."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock


def map_cached(space: AddressSpace, start: int, end: int, device: int) -> bool:
    """Maps the pages from `start` to `end` by a fault in each window; False if that may not be all of them.

    The GIL is let go of meanwhile. A fault beyond the file's end, where it was cut, is no signal.

    start, end: bytes of the file; `start` is a page's.
    device: on which the file is.
    """
    address = space.address
    first_end = start + WINDOW_BYTES - (address + start) % WINDOW_BYTES
    content = space.content()
    # The last byte of each: from where in its window a mapping begins does not matter then.
    touched = [content[at - 1 : at] for at in (*range(first_end, end, WINDOW_BYTES), end)]
    before = storage_reads()
    try:
        written = os.pwritev(_sink(), touched, 0)
    except OSError:
        return False
    if written < len(touched) or storage_reads() > before:
        return False
    if device not in _known and _are_mapped(address + start, address + end):
        _known.add(device)
    return device in _known


@functools.cache
def _sink() -> int:
    """Where bytes are written to that are to be read by the kernel."""
    return os.memfd_create("page faults")


def _are_mapped(start: int, end: int) -> bool:
    pages = (end - 1) // mmap.PAGESIZE - start // mmap.PAGESIZE + 1
    try:
        with _PAGEMAP.open("rb", buffering=0) as entries:
            found = os.pread(
                entries.fileno(), pages * _ENTRY_BYTES, start // mmap.PAGESIZE * _ENTRY_BYTES
            )
    except OSError:
        return False
    highest = found[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
    return len(highest) == pages and not highest.translate(None, _PRESENT)
