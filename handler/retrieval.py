"""Bringing a layer's weight file into memory, chunk by chunk, and what it then holds as tensors."""

import contextlib
import ctypes
import errno
import io
import math
import mmap
import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES: Final = 4 << 20
_MADV_POPULATE_READ: Final = 22
_UNPICKLING_ERRORS: Final = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    AttributeError,
    AssertionError,
    struct.error,
)
"""What torch.load raises for bytes that are not what was saved (found by damaging files at random)."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where a tensor lies in a mapped file: its type, shape and strides, in elements of that type."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class WeightFile(Protocol):
    """A layer's weight file on its way into memory."""

    @property
    def bytes(self) -> int:
        """The file's size."""

    def step(self) -> bool:
        """Brings the next chunk in; True when more are to come."""

    def take(self) -> Mapping[str, Tensor]:
        """The tensors by key, once `step` has returned False; nothing of them is kept here."""


class MappedFile:
    """A file mapped privately, copy on write; retrieval populates the mapping, nothing is copied.

    The pages are the file's: all processes on the host share them and the kernel may reclaim them. The
    mapping lives as long as a tensor on it.

    descriptor: an open file of `size` bytes; it may be closed once the first step is done.
    """

    __slots__ = ("_address", "_descriptor", "_mapping", "_populated", "_size", "_views")

    def __init__(self, descriptor: int, size: int, views: Sequence[TensorView]) -> None:
        self._descriptor = descriptor
        self._size = size
        self._views = views
        self._mapping: mmap.mmap | None = None
        self._address = 0
        self._populated = 0

    @property
    def bytes(self) -> int:
        return self._size

    def step(self) -> bool:
        if self._mapping is None:
            found = os.fstat(self._descriptor).st_size
            if found < self._size:
                raise _cut_short(found, self._size)
            self._mapping = mmap.mmap(
                self._descriptor, self._size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            _prefer_huge_pages(self._mapping)
        length = min(CHUNK_BYTES, self._size - self._populated)
        if _libc.madvise(self._address + self._populated, length, _MADV_POPULATE_READ) != 0:
            self._touch(length, ctypes.get_errno())
        self._populated += length
        return self._populated < self._size

    def _touch(self, length: int, error: int) -> None:
        """Reads a byte of each page: for kernels before 5.14, which do not know the advice."""
        if error == errno.EFAULT:  # the advice's word for what a read would be killed for
            raise _cut_short(os.fstat(self._descriptor).st_size, self._size)
        if error != errno.EINVAL:
            raise OSError(error, os.strerror(error))
        content = np.frombuffer(self._mapping, np.uint8, length, self._populated)  # type: ignore[arg-type]
        content[:: mmap.PAGESIZE].max()  # numpy lets go of the GIL, indexing the mapping would not

    def take(self) -> Mapping[str, Tensor]:
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            raise RuntimeError("taken before it was retrieved")
        whole: dict[torch.dtype, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for view in self._views:
            base = whole.get(view.dtype)
            if base is None:
                count = self._size // view.dtype.itemsize
                base = torch.frombuffer(mapping, dtype=view.dtype, count=count)
                whole[view.dtype] = base
            tensors[view.key] = torch.as_strided(base, view.shape, view.strides, view.offset)
        return tensors


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    """What is read from disk for this mapping goes into the page cache 2 MiB a page, where it can.

    Populating 392 MB takes 2 ms then, not 22, and execution misses the TLB less often.
    """
    with contextlib.suppress(OSError):  # a kernel without huge pages does as well as it can
        mapping.madvise(mmap.MADV_HUGEPAGE)


class ReadFile:
    """A `pth` file read into private memory and unpickled without code, as in the paper.

    descriptor: an open file of `size` bytes, until the last step.
    """

    __slots__ = ("_descriptor", "_file", "_position", "_size", "_tensors")

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._position = 0
        self._file: io.BytesIO | None = None
        self._tensors: Mapping[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        return self._size

    def step(self) -> bool:
        if self._file is None:
            self._file = io.BytesIO()
            self._file.seek(self._size - 1)
            self._file.write(b"\0")
        with self._file.getbuffer() as whole:
            end = min(self._position + CHUNK_BYTES, self._size)
            count = os.preadv(self._descriptor, [whole[self._position : end]], self._position)
        if count == 0:
            raise _cut_short(self._position, self._size)
        self._position += count
        if self._position < self._size:
            return True
        self._tensors = _unpickled(self._file)
        self._file = None
        return False

    def take(self) -> Mapping[str, Tensor]:
        tensors, self._tensors = self._tensors, {}
        return tensors


def _unpickled(file: io.BytesIO) -> Mapping[str, Tensor]:
    file.seek(0)
    try:
        tensors: object = torch.load(file, weights_only=True)
    except _UNPICKLING_ERRORS as error:
        what = f"no sound file of tensors ({type(error).__name__})"
        raise OSError(errno.EBADMSG, what) from error
    if not isinstance(tensors, dict):
        raise OSError(errno.EBADMSG, f"holds a {type(tensors).__name__}, expected tensors by name")
    return tensors


def _cut_short(found: int, expected: int) -> OSError:
    return OSError(errno.EIO, f"ends after {found} of {expected} bytes")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))
