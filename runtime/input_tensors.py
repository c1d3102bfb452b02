"""An inference request's input, checked, as a handler takes it: what it is, and its bytes."""

import base64
import binascii
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from models.manifest import InputSpec
from runtime import binary_tensors
from runtime.errors import BadInput, brief
from runtime.protocol import INPUT, InferenceRequest, RequestInput

_FP32_BYTES: Final = 4
_SIZES: Final = 1 << 31
_ELEMENT_BYTES: Final = {"FP32": 4, "FP64": 8, "FP16": 2, "BF16": 2, "UINT8": 1}
_ONLY_BINARY: Final = ("FP16", "BF16")
"""JSON has no agreed form of them (the protocol's "Tensor Data")."""

_NUMBERS: Final[frozenset[type]] = frozenset(
    {int, float}
)  # true and false are of a type of their own
_WHOLE_NUMBERS: Final[frozenset[type]] = frozenset({int})


@dataclass(frozen=True, slots=True)
class HandlerInput:
    """The `input` of an `infer` frame (`handler/inputs.py`), and the frame's body."""

    header: dict[str, Any]
    body: bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Given:
    """One input of a request, with its part of the bytes behind the JSON object if it has one."""

    tensor: RequestInput
    binary: memoryview | None
    spec: InputSpec

    @property
    def datatype(self) -> str:
        return self.tensor.datatype

    @property
    def shape(self) -> list[int]:
        return self.tensor.shape


def raw(body: bytes, spec: InputSpec) -> InferenceRequest:
    """What a body without a JSON object asks for: one FP32 tensor in, every output out as binary data."""
    shape = [1, 3, spec.crop, spec.crop]
    expected = _FP32_BYTES * math.prod(shape)
    if len(body) != expected:
        raise BadInput(
            f"the body has {len(body)} bytes, expected {expected}: "
            f"with {binary_tensors.HEADER} 0 it is an FP32 tensor of shape {shape}"
        )
    parameters = {binary_tensors.SIZE: expected}
    tensor = RequestInput(name=INPUT, shape=shape, datatype="FP32", parameters=parameters)
    return InferenceRequest(inputs=[tensor], parameters={"binary_data_output": True})


def decode(
    asked: InferenceRequest, binary: memoryview | None, spec: InputSpec, limit: int
) -> HandlerInput:
    """The request's one input. Raises BadInput.

    binary: what follows the JSON object, None where no header tells of it.
    limit: bytes that a batch of more than one may take in FP32, which a handler makes of every input.
    """
    names = [tensor.name for tensor in asked.inputs]
    if names != [INPUT]:
        raise BadInput(f"inputs are {brief(names)}, expected exactly one, named {INPUT!r}")
    (tensor,) = asked.inputs
    (part,) = binary_tensors.assign(asked.inputs, binary)
    decoder = _DECODERS.get(tensor.datatype)
    if decoder is None:
        expected = ", ".join(_DECODERS)
        raise BadInput(
            f"input {INPUT!r} has datatype {brief(tensor.datatype)}, expected one of {expected}"
        )
    if part is None and tensor.data is None:
        raise BadInput(f"input {INPUT!r} has neither data nor {binary_tensors.SIZE}")
    given = _Given(tensor, part, spec)
    check_sizes(given.tensor)
    _check_batch(given, limit)
    return decoder(given)


def check_sizes(tensor: RequestInput) -> None:
    """Python computes with larger ones, but refuses to print a product of more than 4300 digits."""
    if any(size >= _SIZES for size in tensor.shape):
        raise BadInput(
            f"input {tensor.name!r} has shape {brief(tensor.shape)}, expected sizes below {_SIZES}"
        )


def _check_batch(given: _Given, limit: int) -> None:
    count = given.shape[0] if given.shape else 0
    needed = count * 3 * given.spec.crop**2 * _FP32_BYTES
    if count > 1 and needed > limit:
        raise BadInput(
            f"input {INPUT!r} has shape {brief(given.shape)}: {needed} bytes in FP32, "
            f"over the limit of {limit} bytes"
        )


def _floats(given: _Given) -> HandlerInput:
    side = given.spec.crop
    if not _is_batch(given.shape, [3, side, side]):
        raise _wrong_shape(given, f"[n, 3, {side}, {side}]")
    if given.binary is not None:
        return _tensor(given, _sized(given, given.binary))
    if given.datatype in _ONLY_BINARY:
        raise BadInput(f"{given.datatype} has no form in JSON, expected it as binary data")
    return _tensor(given, _fp32(given), datatype="FP32")


def _tensor(given: _Given, body: bytes | memoryview, datatype: str | None = None) -> HandlerInput:
    header = {"kind": "tensor", "datatype": datatype or given.datatype, "shape": given.shape}
    return HandlerInput(header, body)


def _pixels(given: _Given) -> HandlerInput:
    """UINT8 [n, height, width, 3]: decoded RGB images, which the handler treats as it treats others."""
    shape = given.shape
    if len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        raise _wrong_shape(given, "[n, height, width, 3]")
    body = _whole(given) if given.binary is None else _sized(given, given.binary)
    return HandlerInput({"kind": "pixels", "shape": shape}, body)


def _images(given: _Given) -> HandlerInput:
    """BYTES [n] or [n, 1]: encoded images, in JSON as base64."""
    if not (_is_batch(given.shape, []) or _is_batch(given.shape, [1])):
        raise _wrong_shape(given, "[n] or [n, 1]")
    count = given.shape[0]
    images: Sequence[bytes | memoryview]
    if given.binary is not None:
        images = binary_tensors.elements(given.binary, count)
    else:
        images = [_from_base64(place, text) for place, text in enumerate(flat(given.tensor), 1)]
    header = {"kind": "images", "lengths": [len(image) for image in images]}
    return HandlerInput(header, images[0] if count == 1 else b"".join(images))


_DECODERS: Final[dict[str, Callable[[_Given], HandlerInput]]] = {
    "FP32": _floats,
    "FP64": _floats,
    "FP16": _floats,
    "BF16": _floats,
    "UINT8": _pixels,
    "BYTES": _images,
}


def _is_batch(shape: list[int], of: list[int]) -> bool:
    return shape[1:] == of and shape[:1] > [0]


def _wrong_shape(given: _Given, expected: str) -> BadInput:
    return BadInput(
        f"input {INPUT!r} has shape {brief(given.shape)}, "
        f"expected {expected} of {given.datatype} with n from 1"
    )


def _sized(given: _Given, binary: memoryview) -> memoryview:
    expected = _ELEMENT_BYTES[given.datatype] * math.prod(given.shape)
    if len(binary) != expected:
        raise BadInput(
            f"{binary_tensors.SIZE} of input {INPUT!r} is {len(binary)}, expected {expected} "
            f"for {given.datatype} of shape {given.shape}"
        )
    return binary


def _fp32(given: _Given) -> bytes:
    """The JSON data as little-endian FP32 in row-major order.

    Packed by `struct`, which takes half the time of looking at every value's type first.
    """
    values = flat(given.tensor)
    try:
        packed = struct.pack(f"<{len(values)}f", *values)
    except (struct.error, OverflowError):  # no number, or too large an integer or float
        check_types(given.tensor, values, _NUMBERS, "numbers")
        raise _beyond_range() from None
    found = np.frombuffer(packed, "<f4")
    if not np.isfinite(found).all():
        raise _beyond_range()
    if ((found == 0) | (found == 1)).any():  # which true and false become
        check_types(given.tensor, values, _NUMBERS, "numbers")
    return packed


def _whole(given: _Given) -> bytes:
    """The JSON data as whole numbers from 0 to 255."""
    values = flat(given.tensor)
    check_types(given.tensor, values, _WHOLE_NUMBERS, "whole numbers")
    try:
        return bytes(values)
    except ValueError:
        raise BadInput(f"data of input {INPUT!r} holds a number outside 0 to 255") from None


def flat(tensor: RequestInput) -> list[Any]:
    """The JSON data in row-major order, as many as the shape says.

    Not by numpy, which would make strings, if there are any, all as long as the longest.
    """
    count = math.prod(tensor.shape)
    expected = f"expected {count} elements, flat or nested as the shape {tensor.shape} says"
    values = tensor.data
    if not isinstance(values, list):
        raise BadInput(f"data of input {tensor.name!r} is {brief(values)}, {expected}")
    if values and isinstance(values[0], list):
        for size in tensor.shape[1:]:
            if not all(isinstance(row, list) and len(row) == size for row in values):
                raise BadInput(f"data of input {tensor.name!r} is nested otherwise, {expected}")
            values = list(itertools.chain.from_iterable(values))
    if len(values) != count:
        raise BadInput(f"data of input {tensor.name!r} has {len(values)} elements, {expected}")
    return values


def check_types(
    tensor: RequestInput, values: list[Any], types: frozenset[type], expected: str
) -> None:
    if not types.issuperset(map(type, values)):
        odd = next(value for value in values if type(value) not in types)
        raise BadInput(f"data of input {tensor.name!r} holds {brief(odd)}, expected {expected}")


def _beyond_range() -> BadInput:
    return BadInput(f"data of input {INPUT!r} holds a number beyond the range of FP32")


def _from_base64(place: int, text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise BadInput(
        f"element {place} of data of input {INPUT!r} is {brief(text)}, "
        f"expected an encoded image in base64"
    )
