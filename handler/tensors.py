"""The bytes of a tensor -> the model's input."""

import math

import numpy as np
import torch
from torch import Tensor

from handler.errors import InvalidInput
from models.manifest import InputSpec


def decode(datatype: object, shape: object, body: bytearray, spec: InputSpec) -> Tensor:
    """Row-major little-endian values as a tensor of the model's input shape."""
    if datatype != "FP32":
        raise InvalidInput(f"the input has the datatype {datatype!r}, expected 'FP32'")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidInput(f"the input has the shape {shape!r}, expected a list of sizes")
    expected = [3, spec.crop, spec.crop]
    if len(shape) != 4 or shape[1:] != expected or shape[0] == 0:
        raise InvalidInput(
            f"the input has the shape {shape}, expected [n, 3, {spec.crop}, {spec.crop}]"
        )
    count = math.prod(shape)
    if len(body) != 4 * count:
        raise InvalidInput(
            f"the input has {len(body)} bytes, expected {4 * count} for the shape {shape}"
        )
    return torch.from_numpy(np.frombuffer(body, dtype="<f4")).reshape(shape)
