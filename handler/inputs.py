"""A request's input, whatever its kind, as the model's input tensor."""

from typing import Any

from torch import Tensor

from handler import images, tensors
from handler.errors import InvalidInput
from models.manifest import InputSpec


def decode(description: dict[str, Any], body: bytearray, spec: InputSpec) -> Tensor:
    """The input as float32 [n, 3, crop, crop]. Raises InvalidInput."""
    match description.get("kind"):
        case "image":
            return images.decode(body, spec)
        case "tensor":
            return tensors.decode(description.get("datatype"), description.get("shape"), body, spec)
        case kind:
            raise InvalidInput(f"input of kind {kind!r}, expected 'image' or 'tensor'")
