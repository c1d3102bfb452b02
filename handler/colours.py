"""A decoded image of any colour mode and depth -> 8-bit RGB.

Pillow's own `convert("RGB")` clips samples of more than 8 bits and uncovers what is transparent.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageCms, ImageFile

from handler.errors import InvalidInput

_DEEP_MODES: Final = ("I;16", "I;16L", "I;16B", "I", "F")
_SAMPLE_FORMAT: Final = 339
_UNSIGNED, _SIGNED = 1, 2
_WHITE_IS_ZERO: Final = 0

_Levels = npt.NDArray[np.uint8]


def rgb(image: ImageFile.ImageFile) -> Image.Image:
    """The opened image, loaded. Samples of n bits become their highest 8, as Pillow does it for colours.

    Floating-point samples count from 0 (black) to 1 (white). What is transparent lies on white.
    """
    _scale_transparent_colour(image)
    image.load()
    if image.mode in _DEEP_MODES:
        return _deep_grey(image).convert("RGB")
    if image.mode == "LAB":
        return _from_lab(image)
    if image.has_transparency_data:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _scale_transparent_colour(image: ImageFile.ImageFile) -> None:
    """Of a PNG with 2, 4 or 16 bits, Pillow scales the samples, but not the one that is transparent."""
    transparent = image.info.get("transparency")
    if image.format != "PNG" or transparent is None or not image.tile:
        return
    match image.tile[0].args:
        case "L;2":
            image.info["transparency"] = transparent * 0b01010101
        case "L;4":
            image.info["transparency"] = transparent * 0b00010001
        case "RGB;16B":
            image.info["transparency"] = tuple(sample >> 8 for sample in transparent)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # grey, multiplied by its alpha: Pillow converts it to LA only
        image = image.convert("LA")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image, None, image)
    return canvas


def _from_lab(image: Image.Image) -> Image.Image:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    if converted is None:
        raise InvalidInput("the image's Lab colours cannot be converted")
    return converted


def _deep_grey(image: ImageFile.ImageFile) -> Image.Image:
    tags = getattr(image, "tag_v2", {})
    samples = np.asarray(image)
    levels = _levels_of_floats(samples) if image.mode == "F" else _levels_of_integers(samples, tags)
    if tags.get(ExifTags.Base.PhotometricInterpretation) == _WHITE_IS_ZERO:
        levels = 255 - levels
    transparent = image.info.get("transparency")
    if transparent is not None:
        levels = np.where(samples == transparent, np.uint8(255), levels)
    return Image.fromarray(levels)


def _levels_of_integers(samples: npt.NDArray[Any], tags: Any) -> _Levels:
    """Of 12, 16 or 32 bits. Pillow reads 32 unsigned bits as signed."""
    if tags.get(_SAMPLE_FORMAT, (_UNSIGNED,))[0] == _SIGNED:
        raise InvalidInput("the image has signed samples, expected unsigned or floating-point ones")
    bits: int = tags.get(ExifTags.Base.BitsPerSample, (8 * samples.itemsize,))[0]
    unsigned = samples.view(np.uint32) if samples.itemsize == 4 else samples
    return (unsigned >> (bits - 8)).astype(np.uint8)


def _levels_of_floats(samples: npt.NDArray[np.float32]) -> _Levels:
    low, high = float(samples.min()), float(samples.max())
    if not (low >= 0 and high <= 1):  # nor NaN
        raise InvalidInput(
            f"the image has floating-point samples from {low:g} to {high:g}, expected 0 to 1"
        )
    return (samples * np.float32(255) + np.float32(0.5)).astype(np.uint8)
