"""An encoded image -> the model's input, exactly as the torchvision preset of its weights makes it."""

import io
import warnings
from typing import Final

from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from handler.errors import InvalidInput
from models.manifest import InputSpec

_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_MOST_RESIZED_PIXELS: Final = 25_000_000
"""100 MB; an image may be 464 times as long as it is wide at the usual 232 pixels."""


def decode(encoded: bytearray, spec: InputSpec) -> Tensor:
    """Decodes an image and preprocesses it as the torchvision preset of the model's weights does."""
    return prepare(_opened(encoded, spec.resize), spec)


def prepare(image: Image.Image, spec: InputSpec) -> Tensor:
    """A decoded RGB image as float32 [1, 3, crop, crop]. Raises InvalidInput."""
    _check_proportions(image, spec.resize)
    preset = ImageClassification(
        crop_size=spec.crop,
        resize_size=spec.resize,
        mean=spec.mean,
        std=spec.std,
        interpolation=InterpolationMode(spec.interpolation),
        antialias=spec.antialias,
    )
    prepared: Tensor = preset(image)
    return prepared.unsqueeze(0)


def _opened(encoded: bytearray, resize: int) -> Image.Image:
    if not encoded:
        raise InvalidInput("the body is empty, expected an image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(encoded), formats=_FORMATS) as opened:
                _check_proportions(opened, resize)
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


def _check_proportions(opened: Image.Image, resize: int) -> None:
    """Refuses what resizing would blow up: a PNG of 312 bytes, 30000 x 8, would take 1.2 GB."""
    shorter, longer = sorted(opened.size)
    if resize * resize * longer > _MOST_RESIZED_PIXELS * shorter:
        raise InvalidInput(
            f"the image has {opened.width} x {opened.height} pixels: "
            f"resized so that the shorter side has {resize}, it would have more than "
            f"{_MOST_RESIZED_PIXELS}"
        )
