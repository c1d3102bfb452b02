"""A request's input, whatever its kind, as the model's input tensor."""

from typing import Any

import torch
from torch import Tensor

from handler import images, pixels, tensors
from handler.errors import InvalidInput
from models.manifest import InputSpec


def decode(
    description: dict[str, Any],
    body: bytearray,
    spec: InputSpec,
    max_pixels: int = images.MAX_PIXELS,
) -> Tensor:
    """The input as float32 [n, 3, crop, crop]. Raises InvalidInput.

    max_pixels: that an image may have.
    """
    match description.get("kind"):
        case "image":
            return images.decode(body, spec, max_pixels)
        case "images":
            return _images(description.get("lengths"), body, spec, max_pixels)
        case "pixels":
            return pixels.decode(description.get("shape"), body, spec, max_pixels)
        case "tensor":
            return tensors.decode(description.get("datatype"), description.get("shape"), body, spec)
        case kind:
            raise InvalidInput(
                f"input of kind {kind!r}, expected 'image', 'images', 'pixels' or 'tensor'"
            )


def _images(lengths: object, body: bytearray, spec: InputSpec, max_pixels: int) -> Tensor:
    """Encoded images one after another, of any sizes and formats, as a batch."""
    if not isinstance(lengths, list) or not all(
        type(size) is int and size >= 0 for size in lengths
    ):
        raise InvalidInput(f"the images have the lengths {lengths!r}, expected a list of sizes")
    if not lengths or sum(lengths) != len(body):
        raise InvalidInput(
            f"{len(lengths)} images in {len(body)} bytes, expected one or more in {sum(lengths)}"
        )
    prepared = []
    start = 0
    for place, length in enumerate(lengths, 1):
        try:
            prepared.append(images.decode(body[start : start + length], spec, max_pixels))
        except InvalidInput as error:
            raise InvalidInput(f"image {place} of {len(lengths)}: {error}") from error
        start += length
    return torch.cat(prepared)
