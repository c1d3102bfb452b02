"""Convolution weights in the blocked layout of oneDNN's kernels, used where they lie in a mapped file.

A convolution lays plain weights out anew at each call, which costs more than a third of ResNet-50's forward
pass. torch can hold weights laid out once, but makes such tensors only by copying; on memory that is
there already they come from the C interface of its ahead-of-time compiler.
"""

import base64
import ctypes
import functools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from models.manifest import BlockedLayout

_LARGEST_DESCRIPTOR: Final = 1 << 16
_mkldnn: Final = torch.ops.mkldnn


@functools.cache
def onednn_version() -> str | None:
    """The version whose layouts this torch has and can use; None where there is none."""
    found = re.search(r"(?:MKL-DNN|oneDNN) v([\w.]+)", torch.__config__.show())
    if found is None:
        return None
    try:
        _interface()
    except (AttributeError, OSError):  # a torch with another interface, or built as one library
        return None
    return found[1]


@dataclass(frozen=True, slots=True)
class Convolution:
    """What its kernel, and with it the layout of its weights, is chosen by."""

    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    input_size: tuple[int, ...]
    """Images, channels, rows, columns. With another the answer is the same, and slower."""

    @classmethod
    def of(cls, module: nn.Conv2d, value: Tensor) -> "Convolution":
        padding, stride, dilation = (
            tuple(int(size) for size in sizes)
            for sizes in (module.padding, module.stride, module.dilation)
        )
        return cls(padding, stride, dilation, module.groups, tuple(value.shape))

    def blocked(self, weight: Tensor) -> Tensor:
        """The weight, copied into the layout that this processor's kernel wants."""
        laid_out: Tensor = _mkldnn._reorder_convolution_weight(  # noqa: SLF001 - has no other name
            weight.contiguous(),
            self.padding,
            self.stride,
            self.dilation,
            self.groups,
            self.input_size,
        )
        return laid_out


def layout(weight: Tensor) -> BlockedLayout:
    """Of a blocked weight, as a manifest has it."""
    described = _mkldnn._get_mkldnn_serialized_md(weight)  # noqa: SLF001 - has no other name
    descriptor = base64.b64encode(zlib.compress(described.numpy().tobytes())).decode()
    return BlockedLayout(descriptor=descriptor, bytes=_bytes(weight))


def content(weight: Tensor) -> bytes:
    """A copy of a blocked weight's memory."""
    return ctypes.string_at(int(_mkldnn.data_ptr(weight)), _bytes(weight))


def _bytes(weight: Tensor) -> int:
    return int(_mkldnn._nbytes(weight))  # noqa: SLF001 - has no other name


class BlockedView:
    """A blocked weight that has no memory yet.

    start: where it begins in its file, in bytes. Raises ValueError for a descriptor that describes none.
    """

    __slots__ = ("_descriptor", "_sizes", "_start", "_strides", "key")

    def __init__(
        self, key: str, shape: tuple[int, ...], blocked: BlockedLayout, start: int
    ) -> None:
        self.key = key
        descriptor = _unpacked(key, blocked)
        self._start = start
        self._sizes = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))()
        self._descriptor = (ctypes.c_uint8 * len(descriptor)).from_buffer_copy(descriptor)
        # Asks for the descriptor's sizes alone; nothing lies at that address.
        needed = _bytes(_tensors([self], 0)[0])
        if needed != blocked.bytes:
            raise ValueError(f"{key}: its layout takes {needed} bytes, it has {blocked.bytes}")

    def capsule(self, address: int) -> Any:
        """A new tensor on the memory of the file, in the form that torch takes it from."""
        interface = _interface()
        handle = ctypes.c_void_p()
        failed = interface.make(
            address + self._start,
            len(self._sizes),
            self._sizes,
            self._strides,
            0,
            interface.float32,
            interface.cpu,
            0,
            ctypes.byref(handle),
            interface.onednn,
            self._descriptor,
            len(self._descriptor),
        )
        if failed:
            raise RuntimeError(f"torch made no blocked tensor for {self.key}")
        return _capsule(handle.value, None, None)


def tensors(views: Sequence[BlockedView], memory: Tensor) -> dict[str, Tensor]:
    """The weights by key, on the memory of a whole file, which they keep alive."""
    made = _tensors(views, memory.data_ptr())
    for tensor in made:
        tensor.memory = memory  # type: ignore[attr-defined]
    return {view.key: tensor for view, tensor in zip(views, made, strict=True)}


def _tensors(views: Sequence[BlockedView], address: int) -> list[Tensor]:
    capsules = [view.capsule(address) for view in views]
    # The function for a single tensor never lets go of it.
    made: list[Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)  # noqa: SLF001
    return made


def _unpacked(key: str, blocked: BlockedLayout) -> bytes:
    try:
        packed = base64.b64decode(blocked.descriptor, validate=True)
        descriptor = zlib.decompressobj().decompress(packed, _LARGEST_DESCRIPTOR)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{key}: its layout is no descriptor of oneDNN's") from error
    expected = _descriptor_bytes()
    if len(descriptor) != expected:
        raise ValueError(
            f"{key}: its layout's descriptor has {len(descriptor)} bytes, oneDNN's have {expected}"
        )
    return descriptor


@functools.cache
def _descriptor_bytes() -> int:
    weight = torch.zeros(1, 1, 1, 1)
    smallest = Convolution((0, 0), (1, 1), (1, 1), 1, (1, 1, 1, 1)).blocked(weight)
    described = _mkldnn._get_mkldnn_serialized_md(smallest)  # noqa: SLF001 - has no other name
    return int(described.numel())


@dataclass(frozen=True, slots=True)
class _Interface:
    """torch's C function that makes a tensor on given memory, and its names of types."""

    make: Any
    float32: int
    cpu: int
    onednn: int


@functools.cache
def _interface() -> _Interface:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    make = library.aoti_torch_create_tensor_from_blob_v2
    make.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_int64),
    )
    return _Interface(
        make,
        library.aoti_torch_dtype_float32(),
        library.aoti_torch_device_type_cpu(),
        library.aoti_torch_layout__mkldnn(),
    )


_capsule: Final = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
