"""A request's input: an encoded image or the bytes of a tensor, as the model's input tensor."""

import io
import math
import warnings
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from handler.errors import InvalidInput
from models.manifest import InputSpec

_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def decode(description: dict[str, Any], body: bytearray, spec: InputSpec) -> Tensor:
    """The input as float32 [n, 3, crop, crop]. Raises InvalidInput."""
    match description.get("kind"):
        case "image":
            return image(body, spec)
        case "tensor":
            return tensor(description.get("datatype"), description.get("shape"), body, spec)
        case kind:
            raise InvalidInput(f"input of kind {kind!r}, expected 'image' or 'tensor'")


def image(encoded: bytearray, spec: InputSpec) -> Tensor:
    """Decodes an image and preprocesses it as the torchvision preset of the model's weights does."""
    preset = ImageClassification(
        crop_size=spec.crop,
        resize_size=spec.resize,
        mean=spec.mean,
        std=spec.std,
        interpolation=InterpolationMode(spec.interpolation),
        antialias=spec.antialias,
    )
    prepared: Tensor = preset(_opened(encoded))
    return prepared.unsqueeze(0)


def _opened(encoded: bytearray) -> Image.Image:
    if not encoded:
        raise InvalidInput("the body is empty, expected an image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(encoded), formats=_FORMATS) as opened:
                return opened.convert("RGB")
    except UnidentifiedImageError as error:
        raise InvalidInput(
            f"the body is not an image: it begins with {bytes(encoded[:8])!r}, "
            f"expected one of {', '.join(_FORMATS)}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInput(f"the image has more than {Image.MAX_IMAGE_PIXELS} pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise InvalidInput(f"the image cannot be decoded: {error}") from error


def tensor(datatype: object, shape: object, body: bytearray, spec: InputSpec) -> Tensor:
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
