"""Bringing a layer's weight file into memory, chunk by chunk, and what it then holds as tensors."""

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

from handler.address_space import LARGE_PAGE, AddressSpace
from handler.page_faults import map_cached
from handler.timeline import now_ns
from models import blocked
from models.ahead import Ahead
from models.blocked import BlockedView
from models.manifest import BlockedLayout
from models.mapped_memory import MADV_POPULATE_READ
from models.weight_files import in_stored_order

CHUNK_BYTES: Final = 4 << 20
_EXPECTED_CHUNK_BYTES: Final = 16 << 20
"""The first chunk of what is expected in memory: 2 ms if it lies there in small pages."""
_LONGEST_CHUNK_BYTES: Final = 32 << 20
_AT_ONCE_NS: Final = 1_000_000
"""What takes less was in memory: then the next chunk is twice as long. Each costs 0.01 ms besides."""
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


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where a tensor lies in a mapped file; `offset` counts elements of its type.

    channels_last: a convolution's weight that lies in the order outputs, rows, columns, inputs.
    blocked: one that lies in oneDNN's layout.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    channels_last: bool = False
    blocked: BlockedLayout | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return in_stored_order(self.shape) if self.channels_last else self.shape


_Strided = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""A tensor's key, shape, strides and offset, in elements."""


@dataclass(frozen=True, slots=True)
class PlacedTensors:
    """A file's tensors by key, on addresses at which it is yet to be mapped; they keep these alive."""

    space: AddressSpace
    tensors: Mapping[str, Tensor]


class FileLayout:
    """Where the tensors of a mapped file lie, made ready for cutting them out of it quickly.

    The tensors of the first one's type, as a rule all but the batch counters, are cut out by one call
    for the whole file: a fifth of the time of a view for each. Raises ValueError for a blocked layout that
    is none.
    """

    __slots__ = (
        "_ahead",
        "_blocked",
        "_channels_last",
        "_others",
        "_pieces",
        "_size",
        "_sizes",
        "_type",
    )

    def __init__(self, views: Sequence[TensorView], size: int) -> None:
        self._ahead = Ahead[PlacedTensors]()
        self._size = size
        self._type = views[0].dtype if views else torch.float32
        self._blocked = tuple(
            BlockedView(view.key, view.shape, view.blocked, view.offset * view.dtype.itemsize)
            for view in views
            if view.blocked is not None
        )
        views = [view for view in views if view.blocked is None]
        others: dict[torch.dtype, list[_Strided]] = {}
        for view in views:
            if view.dtype != self._type:
                strides = contiguous_strides(view.stored_shape)
                strided = (view.key, view.stored_shape, strides, view.offset)
                others.setdefault(view.dtype, []).append(strided)
        self._others = tuple(others.items())
        self._channels_last = tuple(view.key for view in views if view.channels_last)
        self._sizes: list[int] = []
        self._pieces: list[tuple[int, str, tuple[int, ...] | None]] = []
        position = 0
        for view in sorted(views, key=lambda view: view.offset):
            if view.dtype != self._type:
                continue
            if view.offset > position:
                self._sizes.append(view.offset - position)
            elements = math.prod(view.shape)
            shape = None if len(view.shape) == 1 else view.stored_shape
            self._pieces.append((len(self._sizes), view.key, shape))
            self._sizes.append(elements)
            position = view.offset + elements
        self._sizes.append(size // self._type.itemsize - position)

    def place_ahead(self) -> None:
        """Does the work of the next `place` now. Raises OSError."""
        self._ahead.prepare(self._placed)

    def give_up(self) -> None:
        """Gives back what was placed ahead."""
        self._ahead.discard()

    def place(self) -> PlacedTensors:
        """Tensors and addresses that nobody else has. Raises OSError where there are no addresses."""
        return self._ahead.take(self._placed)

    def _placed(self) -> PlacedTensors:
        space = AddressSpace(self._size)
        with torch.inference_mode():  # whichever thread it is, and at rest as within a request
            return PlacedTensors(space, self._tensors(space))

    def _tensors(self, space: AddressSpace) -> dict[str, Tensor]:
        memory = space.tensor(self._type)
        parts = memory.split_with_sizes(self._sizes)
        tensors = {
            key: parts[number] if shape is None else parts[number].view(shape)
            for number, key, shape in self._pieces
        }
        for dtype, strided in self._others:
            whole = space.tensor(dtype)
            for key, shape, strides, offset in strided:
                tensors[key] = whole.as_strided(shape, strides, offset)
        if self._blocked:
            tensors |= blocked.tensors(self._blocked, memory)
        for key in self._channels_last:
            tensors[key] = tensors[key].permute(0, 3, 1, 2)
        return tensors


class WeightFile(Protocol):
    """A layer's weight file on its way into memory."""

    @property
    def bytes(self) -> int:
        """The file's size."""

    @property
    def is_mapped(self) -> bool:
        """Whether what lies in the page cache is only mapped, not copied."""

    def step(self) -> bool:
        """Brings the next chunk in; True when more are to come."""

    def take(self) -> Mapping[str, Tensor]:
        """The tensors by key, once `step` has returned False; nothing of them is kept here."""


class MappedFile:
    """A file mapped privately, copy on write; retrieval populates the mapping, nothing is copied.

    The pages are the file's: all processes on the host share them and the kernel may reclaim them. The
    mapping lives as long as a tensor on it.

    descriptor: an open file of `size` bytes; it may be closed once the first step is done.
    in_memory: it is expected in the page cache; then the first chunk is a long one.
    """

    __slots__ = (
        "_chunk_bytes",
        "_descriptor",
        "_device",
        "_layout",
        "_placed",
        "_populated",
        "_size",
    )

    is_mapped = True

    def __init__(
        self, descriptor: int, size: int, layout: FileLayout, *, in_memory: bool = False
    ) -> None:
        self._descriptor = descriptor
        self._size = size
        self._layout = layout
        self._placed: PlacedTensors | None = None
        self._chunk_bytes = _EXPECTED_CHUNK_BYTES if in_memory else CHUNK_BYTES
        self._device = 0
        self._populated = 0

    @property
    def bytes(self) -> int:
        return self._size

    def step(self) -> bool:
        placed = self._placed
        if placed is None:
            placed = self._placed = self._mapped()
        space = placed.space
        start, end = self._populated, min(self._populated + self._chunk_bytes, self._size)
        begun = now_ns()
        small = self._small_pages(space, start, end)
        if start < small:
            self._populate(space, start, small)
        if small < end and not map_cached(space, small, end, self._device):
            self._populate(space, small, end)
        self._populated = end
        if now_ns() - begun < _AT_ONCE_NS:
            self._chunk_bytes = min(2 * self._chunk_bytes, _LONGEST_CHUNK_BYTES)
        else:
            self._chunk_bytes = CHUNK_BYTES
        return end < self._size

    def _mapped(self) -> PlacedTensors:
        status = os.fstat(self._descriptor)
        if status.st_size < self._size:
            raise _cut_short(status.st_size, self._size)
        self._device = status.st_dev
        placed = self._layout.place()
        placed.space.map(self._descriptor)
        return placed

    def _small_pages(self, space: AddressSpace, start: int, end: int) -> int:
        """From where on no large page fits before the file's end."""
        if end < self._size:
            return end
        return max(start, (space.address + end) // LARGE_PAGE * LARGE_PAGE - space.address)

    def _populate(self, space: AddressSpace, start: int, end: int) -> None:
        try:
            space.advise(start, end, MADV_POPULATE_READ)
        except OSError as error:
            self._touch(space, start, end, error)

    def _touch(self, space: AddressSpace, start: int, end: int, error: OSError) -> None:
        """Reads a byte of each page: for kernels before 5.14, which do not know the advice."""
        if error.errno == errno.EFAULT:  # the advice's word for what a read would be killed for
            raise _cut_short(os.fstat(self._descriptor).st_size, self._size) from error
        if error.errno != errno.EINVAL:
            raise error
        content = np.frombuffer(space.content()[start:end], np.uint8)
        content[:: mmap.PAGESIZE].max()  # numpy lets go of the GIL, indexing the mapping would not

    def take(self) -> Mapping[str, Tensor]:
        placed, self._placed = self._placed, None
        if placed is None:
            raise RuntimeError("taken before it was retrieved")
        return placed.tensors


class ReadFile:
    """A `pth` file read into private memory and unpickled without code, as in the paper.

    descriptor: an open file of `size` bytes, until the last step.
    """

    __slots__ = ("_descriptor", "_file", "_position", "_size", "_tensors")

    is_mapped = False

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
