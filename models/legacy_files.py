"""torch.save's format of before torch 1.6, mapped from the file as torch.load maps the one since.

Such a file is a row of pickles: a number that tells the format, its version, the writer's sizes of types,
the object, the keys of its storages. Then comes each storage, a count of elements and the elements,
little-endian all. Where a storage lies depends on the types of those before it, which only the object
tells: it is unpickled once to learn them, and once more with the storages in their places.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import _weights_only_unpickler
from torch._utils import _sparse_tensors_to_validate
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION
from torch.storage import TypedStorage, UntypedStorage

_COUNT_BYTES: Final = 8
_ENCODING: Final = "utf-8"
"""torch.load's for strings that Python 2 pickled."""


class Damaged(Exception):
    """What is wrong with the file, in words that follow its name and a colon."""


def load(path: Path) -> Any:
    """What torch.load(weights_only=True) makes of the file, but mapped, wherever its tensors were.

    A tensor may lie at any address, also at one that its type does not allow: see models/alignment.py.
    Raises Damaged, OSError, and what the unpickler raises.
    """
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
        for expected in (MAGIC_NUMBER, PROTOCOL_VERSION):
            if (found := _pickled(file)) != expected:
                raise Damaged(f"it is damaged: it begins with {found!r}, expected {expected}")
        _pickled(file)  # the sizes of types, which torch does not heed either
        start = file.tell()
        said = _Storages(mapped, {})
        _pickled(file, said)
        places = _places(file, _pickled(file), said.by_key)
        file.seek(start)
        return _pickled(file, _Storages(mapped, places))


def _pickled(file: BinaryIO, storages: "_Storages | None" = None) -> Any:
    unpickler = _weights_only_unpickler.Unpickler(file, encoding=_ENCODING)
    if storages is not None:
        unpickler.persistent_load = storages.load  # type: ignore[method-assign]
    try:
        return unpickler.load()  # type: ignore[no-untyped-call]
    finally:
        # No sparse tensor is a weight, and the next torch.load would look at what is left here.
        _sparse_tensors_to_validate.clear()


@dataclass(frozen=True, slots=True)
class _Storage:
    content: UntypedStorage
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return self.content.nbytes() // self.dtype.itemsize

    def part(self, start: int, count: int) -> "_Storage":
        size = self.dtype.itemsize
        return _Storage(self.content[start * size : (start + count) * size], self.dtype)

    def typed(self) -> TypedStorage:
        """What the functions that a pickle names take."""
        return TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self.content, dtype=self.dtype, _internal=True
        )


class _Storages:
    """The storages that the object's pickle refers to, as parts of the mapped file.

    places: where each begins; one whose place is not yet known is taken from the file's start.
    """

    def __init__(self, mapped: UntypedStorage, places: Mapping[object, int]) -> None:
        self._mapped = mapped
        self._places = places
        self._views: dict[object, _Storage] = {}
        self.by_key: dict[object, _Storage] = {}

    def load(self, reference: Any) -> TypedStorage:
        """The unpickler's persistent_load."""
        _, storage_type, key, _, count, view = reference
        if key not in self.by_key:
            dtype = torch.uint8 if storage_type is UntypedStorage else storage_type.dtype
            self.by_key[key] = self._mapped_storage(key, count, dtype)
        whole = self.by_key[key]
        return (whole if view is None else self._view(whole, *view)).typed()

    def _mapped_storage(self, key: object, count: int, dtype: torch.dtype) -> _Storage:
        size = count * dtype.itemsize
        if not 0 <= size <= self._mapped.nbytes():
            raise Damaged(
                f"it is cut short or damaged: it has {self._mapped.nbytes()} bytes, "
                f"and says that {size} are those of its storage {key} alone"
            )
        start = self._places.get(key, 0)
        return _Storage(self._mapped[start : start + size], dtype)

    def _view(self, whole: _Storage, key: object, start: int, count: int) -> _Storage:
        """A part of a storage that has a key of its own, as the first versions of torch wrote."""
        if key not in self._views:
            if not 0 <= start <= start + count <= whole.count:
                raise Damaged(
                    f"it is damaged: its storage {key} is no part of the one that it is in"
                )
            self._views[key] = whole.part(start, count)
        return self._views[key]


def _places(
    file: BinaryIO, keys: Sequence[object], storages: Mapping[object, _Storage]
) -> dict[object, int]:
    """Where each storage's elements begin; the file is at the end of the pickled keys."""
    if len(keys) != len(storages) or set(keys) != set(storages):
        raise Damaged("it is damaged: the storages that it lists are not those of its tensors")
    start = file.tell()
    size = file.seek(0, os.SEEK_END)
    expected = start + sum(_COUNT_BYTES + storages[key].content.nbytes() for key in keys)
    if size < expected:
        raise Damaged(
            f"it is cut short, as of half a download: it has {size} bytes, expected {expected}"
        )
    places = {}
    for key in keys:
        file.seek(start)
        found = int.from_bytes(file.read(_COUNT_BYTES), "little")
        if found != storages[key].count:
            raise Damaged(
                f"it is damaged: its storage {key} has {found} elements, "
                f"expected {storages[key].count} as its tensors say"
            )
        places[key] = start + _COUNT_BYTES
        start = places[key] + storages[key].content.nbytes()
    return places
