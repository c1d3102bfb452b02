"""Decoded pixels -> the model's input, as an image file of them would give it."""

import math

import torch
from PIL import Image
from torch import Tensor

from handler import images
from handler.errors import InvalidInput
from models.manifest import InputSpec


def decode(
    shape: object, body: bytearray, spec: InputSpec, max_pixels: int = images.MAX_PIXELS
) -> Tensor:
    """RGB images of one size, a byte per value, [n, height, width, 3], each preprocessed by itself."""
    if not isinstance(shape, list) or not all(type(size) is int and size >= 1 for size in shape):
        raise InvalidInput(f"the input has the shape {shape!r}, expected a list of sizes")
    if len(shape) != 4 or shape[3] != 3:
        raise InvalidInput(f"the input has the shape {shape}, expected [n, height, width, 3]")
    if len(body) != math.prod(shape):
        raise InvalidInput(
            f"the input has {len(body)} bytes, expected {math.prod(shape)} for the shape {shape}"
        )
    count, height, width, _ = shape
    size = height * width * 3
    view = memoryview(body)
    prepared = [
        images.prepare(
            Image.frombytes("RGB", (width, height), view[start : start + size]), spec, max_pixels
        )
        for start in range(0, count * size, size)
    ]
    return torch.cat(prepared)
