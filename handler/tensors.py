"""The bytes of a tensor -> the model's input."""

import math
from typing import Final

import torch
from torch import Tensor

from handler.errors import InvalidInput
from models.manifest import InputSpec

_DATATYPES: Final = {
    "FP32": torch.float32,
    "FP64": torch.float64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
}
"""By the names of the Open Inference Protocol."""


def decode(datatype: object, shape: object, body: bytearray, spec: InputSpec) -> Tensor:
    """Row-major little-endian values as a float32 tensor of the model's input shape.

    Values that are not finite pass. FP64 is rounded to the nearest; beyond FP32's range it is infinite.
    """
    dtype = _DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        expected = ", ".join(_DATATYPES)
        raise InvalidInput(f"the input has the datatype {datatype!r}, expected one of {expected}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidInput(f"the input has the shape {shape!r}, expected a list of sizes")
    if len(shape) != 4 or shape[1:] != [3, spec.crop, spec.crop] or shape[0] == 0:
        raise InvalidInput(
            f"the input has the shape {shape}, expected [n, 3, {spec.crop}, {spec.crop}]"
        )
    expected_bytes = dtype.itemsize * math.prod(shape)
    if len(body) != expected_bytes:
        raise InvalidInput(
            f"the input has {len(body)} bytes, expected {expected_bytes} for the shape {shape}"
        )
    return torch.frombuffer(body, dtype=dtype).reshape(shape).to(torch.float32)
