"""Making files cold: taking their pages out of the page cache."""

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from models import mapped_memory

_BLOCK_BYTES: Final = 4 << 20
_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.001
_LOWEST_BIT: Final = bytes(value & 1 for value in range(256))

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def make_cold(folder: Path) -> None:
    """Evicts every file below the folder, right after a byte of each of its pages was read.

    What is read next lands in the memory that was just freed. Memory that has been free for seconds may have
    gone back to a virtual machine's host, which then asks microseconds of whoever touches a page of it
    first: seconds for a ViT-L, that are neither the storage's nor the pipeline's. Raises OSError as `evict`.
    """
    for path in _files(folder):
        mapped_memory.recache(path)
        if path.stat().st_size:
            np.memmap(path, np.uint8, "r")[:: mmap.PAGESIZE].max()
    evict([folder])


def evict(folders: Iterable[Path]) -> None:
    """Evicts every file below the folders, waiting until nobody has it mapped any more.

    The kernel passes over what is mapped, and a handler lets go of its mappings after its answer was
    sent. Raises OSError for a file that stays in the page cache.
    """
    for folder in folders:
        for path in _files(folder):
            _evict_file(path)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _evict_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        deadline = time.monotonic() + _LIMIT_S
        while _is_cached(descriptor):
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "stays in the page cache", str(path))
            time.sleep(_PAUSE_S)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_share(folder: Path) -> float:
    """What part of the pages of all files in a folder is in the page cache; 1 for none at all."""
    cached = total = 0
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            pages = _pages(descriptor)
        finally:
            os.close(descriptor)
        cached += sum(pages)
        total += len(pages)
    return cached / total if total else 1.0


def read_in(folder: Path) -> float:
    """Reads a folder's files that are not wholly in the page cache; what part of them then is."""
    if cached_share(folder) < 1:
        read_anew(folder)
    return cached_share(folder)


def read_anew(folder: Path) -> None:
    """Reads a folder's files as preparation does: the host may have taken parts of large pages back since."""
    for path in folder.iterdir():
        mapped_memory.recache(path)


def _is_cached(descriptor: int) -> bool:
    """Whether any page of an open file is in the page cache."""
    return any(_pages(descriptor))


def _pages(descriptor: int) -> bytes:
    """1 for each page of an open file that is in the page cache, 0 for others (mincore(2))."""
    size = os.fstat(descriptor).st_size
    if not size:
        return b""
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    protection = mmap.PROT_READ | mmap.PROT_WRITE  # ctypes wants a buffer that can be written
    with mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, protection) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if _libc.mincore(address, size, pages) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    # The lowest bit alone is defined.
    return bytes(pages).translate(_LOWEST_BIT)


def read_direct(paths: Iterable[Path]) -> int:
    """Reads files past the page cache, one after another, in large blocks; bytes read."""
    total = 0
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                while count := os.readv(descriptor, [buffer]):
                    total += count
            finally:
                os.close(descriptor)
    return total
