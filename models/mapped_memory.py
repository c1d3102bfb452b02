"""Gives the pages of a mapped file back while it is read, so that a large file takes little memory."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")
_MADV_DONTNEED: Final = 4
_FIELDS_BEFORE_PATH: Final = 5

_madvise: Final = ctypes.CDLL(None).madvise


def release(path: Path) -> None:
    """Lets go of the pages that mappings of this file hold; they come back from the file when read again.

    What was written to a private mapping is lost: this is for files that are only read.
    """
    for start, size in _mappings(str(path.resolve())):
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def _mappings(path: str) -> Iterator[tuple[int, int]]:
    try:
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux: pages stay until the process ends
        return
    for line in lines:  # proc(5): address perms offset dev inode pathname
        fields = line.split(maxsplit=_FIELDS_BEFORE_PATH)
        if len(fields) > _FIELDS_BEFORE_PATH and fields[-1] == path:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            yield start, end - start
