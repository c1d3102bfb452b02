"""Making files cold: taking their pages out of the page cache."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_BLOCK_BYTES: Final = 4 << 20


def evict(folders: Iterable[Path]) -> None:
    """Evicts every file below the folders; they must be written back and not mapped by anyone."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                _evict_file(path)


def _evict_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


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
