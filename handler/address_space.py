"""Addresses that are reserved before a file is mapped there, so that tensors on them can be made before."""

import ctypes
import mmap
import os
from typing import Final

import torch
from torch import Tensor

LARGE_PAGE: Final = 2 << 20
_MAP_FIXED: Final = 0x10
"""Of Linux, on every processor that torch runs on; Python has no name for it."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_abandoned: Final[list[mmap.mmap]] = []
"""Where mapping a file failed, the kernel may have left a hole, and something else may be there by now: it is not to be
unmapped. Running out of addresses does not come to this: they are reserved."""


class AddressSpace:
    """Addresses for a file of `size` bytes; they take no memory until one is mapped there.

    They begin at a large page, where the file has one, and are given back when neither this object nor a
    tensor on them is left, and with them what is mapped there. A kernel that promises no more memory than
    it has counts them, as it does the file's private mapping. Raises OSError where there are none.
    """

    __slots__ = ("_reserved", "_start", "address", "size")

    def __init__(self, size: int) -> None:
        spare = LARGE_PAGE if size >= LARGE_PAGE else 0
        self._reserved = mmap.mmap(
            -1,
            size + spare,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            mmap.PROT_READ | mmap.PROT_WRITE,
        )
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._reserved))
        self._start = -first % LARGE_PAGE if spare else 0
        self.address = first + self._start
        self.size = size

    def map(self, descriptor: int) -> None:
        """Maps the file here, privately, copy on write; its pages large where the kernel can.

        What is read from disk then goes into the page cache 2 MiB a page: populating 392 MB takes 2 ms, not
        22, and execution misses the TLB less often. Raises OSError.
        """
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = _libc.mmap(self.address, self.size, protection, flags, descriptor, 0)
        if mapped == _MAP_FAILED:
            error = _last_error()
            _abandoned.append(self._reserved)
            raise error
        # A kernel without large pages does as well as it can.
        _libc.madvise(self.address, self.size, mmap.MADV_HUGEPAGE)

    def advise(self, start: int, end: int, advice: int) -> None:
        """madvise(2) for these bytes of the file; `start` is a page's. Raises OSError."""
        if _libc.madvise(self.address + start, end - start, advice) != 0:
            raise _last_error()

    def content(self) -> memoryview:
        return memoryview(self._reserved)[self._start : self._start + self.size]

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All of it, shape [size / itemsize]."""
        count = self.size // dtype.itemsize
        return torch.frombuffer(self._reserved, dtype=dtype, count=count, offset=self._start)


def _last_error() -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))
