"""A layer's weight file, written tensor by tensor in either format, hashed on the way."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import torch
from torch import Tensor

from models import blocked
from models.layers import TensorPlace
from models.manifest import ALIGNMENT, DataType, TensorEntry, WeightFormat

DATA_TYPES: Final[dict[torch.dtype, DataType]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_WRITE_BYTES: Final = 4 << 20
"""Files are written in pieces of this size, each at a multiple of it: then the page cache holds them in
huge pages (on file systems with large folios), and a request maps 2 MiB in the time of 64 KiB."""
_HEADER_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What was written: size, hash, and each tensor's place in the file."""

    bytes: int
    sha256: str
    tensors: tuple[TensorEntry, ...]


def write(
    path: Path,
    weight_format: WeightFormat,
    places: Sequence[TensorPlace],
    weights: Mapping[str, Tensor],
    on_written: Callable[[int], None] = lambda _: None,
) -> WeightFile:
    """Writes a layer's tensors to `path`, in the order of `places`.

    `weights` gives each tensor under its key when its turn comes, in the place's shape and type.
    `on_written` is told the bytes of each piece. Raises OSError when the disk does not take them.
    """
    with path.open("xb", buffering=0) as file:
        output = _Output(file, path, on_written)
        write_tensors = _write_safetensors if weight_format == "safetensors" else _write_pth
        entries = write_tensors(output, places, weights)
        output.finish()
    return WeightFile(output.bytes, output.sha256, entries)


class _Output:
    """A file written in large aligned pieces, counted and hashed on the way."""

    def __init__(self, file: BinaryIO, path: Path, on_written: Callable[[int], None]) -> None:
        self._file = file
        self._path = path
        self._digest = hashlib.sha256()
        self._on_written = on_written
        self._pending = bytearray()
        self.bytes = 0
        self.error: OSError | None = None

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        size = view.nbytes
        self._digest.update(view)
        self.bytes += size
        while view.nbytes:
            piece = view[: _WRITE_BYTES - len(self._pending)]
            self._pending += piece
            view = view[piece.nbytes :]
            if len(self._pending) == _WRITE_BYTES:
                self._write_pending()
        return size

    def flush(self) -> None:
        """Nothing: a write that ends elsewhere than at a multiple of its size is what is avoided."""

    def finish(self) -> None:
        """Writes what is left."""
        self._write_pending()

    def _write_pending(self) -> None:
        with memoryview(self._pending) as pending:
            written = 0
            while written < pending.nbytes:
                try:
                    written += self._file.write(pending[written:])
                except OSError as error:
                    error.filename = str(self._path)
                    self.error = error
                    raise
        self._on_written(len(self._pending))
        self._pending.clear()


def _write_safetensors(
    output: _Output, places: Sequence[TensorPlace], weights: Mapping[str, Tensor]
) -> tuple[TensorEntry, ...]:
    header, sizes = _safetensors_header(places)
    output.write(len(header).to_bytes(_HEADER_LENGTH_BYTES, "little"))
    output.write(header)
    entries = []
    for place, size in zip(places, sizes, strict=True):
        entries.append(_entry(place, output.bytes))
        if size:
            output.write(_content(place, weights[place.key]))
        output.write(bytes(_filler(size)))
    return tuple(entries)


def _safetensors_header(places: Sequence[TensorPlace]) -> tuple[bytes, list[int]]:
    """The header, padded so that data begin aligned, and each tensor's size.

    The format allows no holes between tensors, so each is followed by a filler tensor up to the next
    aligned place.
    """
    sizes = [_entry(place, 0).bytes for place in places]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        shape = _stored_shape(place, size)
        header[place.key] = _described(DATA_TYPES[place.dtype], shape, position, size)
        position += size
        if filler := _filler(size):
            header[f"__pad.{number}"] = _described("U8", (filler,), position, filler)
            position += filler
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * _filler(_HEADER_LENGTH_BYTES + len(encoded)), sizes


def _stored_shape(place: TensorPlace, size: int) -> tuple[int, ...]:
    if place.blocked is not None:
        return (size // place.dtype.itemsize,)
    return in_stored_order(place.shape) if place.channels_last else place.shape


def _described(dtype: DataType, shape: tuple[int, ...], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def _filler(size: int) -> int:
    return -size % ALIGNMENT


def _write_pth(
    output: _Output, places: Sequence[TensorPlace], weights: Mapping[str, Tensor]
) -> tuple[TensorEntry, ...]:
    storages: set[int] = set()
    tensors = {place.key: _alone(_checked(place, weights[place.key]), storages) for place in places}
    try:
        torch.save(tensors, cast("IO[bytes]", output))  # it asks for write and flush alone
    except RuntimeError:
        if output.error is not None:  # torch hides what the disk said
            raise output.error from None
        raise
    return tuple(_entry(place, 0) for place in places)


def _alone(tensor: Tensor, storages: set[int]) -> Tensor:
    """The tensor with a storage of its own and of its size, since torch.save writes whole storages."""
    storage = tensor.untyped_storage()
    compact = tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
    if not compact or storage.data_ptr() in storages:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        storage = tensor.untyped_storage()
    storages.add(storage.data_ptr())
    return tensor.detach()


def _content(place: TensorPlace, tensor: Tensor) -> Any:
    if place.blocked is not None:
        return _blocked_content(place, _checked(place, tensor))
    values = _checked(place, tensor).detach()
    if place.channels_last:
        values = values.permute(0, 2, 3, 1)
    return values.contiguous().reshape(-1).view(torch.uint8).numpy()


def _blocked_content(place: TensorPlace, tensor: Tensor) -> bytes:
    if not tensor.is_mkldnn or blocked.layout(tensor) != place.blocked:
        raise ValueError(f"{place.key}: expected oneDNN's layout {place.blocked}")
    return blocked.content(tensor)


def in_stored_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a channels-last weight: outputs, inputs, rows, columns -> outputs, rows, columns, inputs."""
    outputs, inputs, rows, columns = shape
    return outputs, rows, columns, inputs


def _checked(place: TensorPlace, tensor: Tensor) -> Tensor:
    if tuple(tensor.shape) != place.shape or tensor.dtype != place.dtype:
        raise ValueError(
            f"{place.key}: found {tensor.dtype} {tuple(tensor.shape)}, "
            f"expected {place.dtype} {place.shape}"
        )
    return tensor


def _entry(place: TensorPlace, offset: int) -> TensorEntry:
    return TensorEntry(
        name=place.key,
        dtype=DATA_TYPES[place.dtype],
        shape=place.shape,
        offset=offset,
        parameter=place.parameter,
        channels_last=place.channels_last,
        blocked=place.blocked,
    )
