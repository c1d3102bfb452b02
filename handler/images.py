"""An encoded image -> the model's input, exactly as the torchvision preset of its weights makes it."""

import ctypes
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Final

from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError, _imaging
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from handler import colours
from handler.errors import InvalidInput
from handler.recognition import looks_like
from models.manifest import InputSpec

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
Resize = int | tuple[int, int]

MAX_PIXELS: Final = 50_000_000
"""The default of the setting CICADA_MAX_PIXELS, which says the same in the proxy."""

_MEDIA_TYPES: Final = {f"image/{name.lower()}" for name in FORMATS}
_TILE_SIZE: Final = (ExifTags.Base.TileWidth, ExifTags.Base.TileLength)
_LONGEST_REASON: Final = 200
_TRANSPOSITIONS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the values of the tag Orientation (Exif 3.0, section 4.6.5.1); 1 is upright."""


def decode(encoded: bytearray, spec: InputSpec, max_pixels: int = MAX_PIXELS) -> Tensor:
    """An encoded image as float32 [1, 3, crop, crop]; of several frames or pages, the first.

    max_pixels: that the image, or what it is resized to, may have. Raises InvalidInput.
    """
    return prepare(_decoded(encoded, spec.resize, max_pixels), spec, max_pixels)


def prepare(image: Image.Image, spec: InputSpec, max_pixels: int = MAX_PIXELS) -> Tensor:
    """A decoded, upright RGB image as float32 [1, 3, crop, crop]. Raises InvalidInput."""
    _check_size(image.size, spec.resize, max_pixels)
    prepared: Tensor = _preset(spec)(image)
    return prepared.unsqueeze(0)


def keep_quiet() -> None:
    """In a process whose output is its log: Pillow warns of odd images, libtiff tells stderr of broken ones.

    Whoever sent them is answered.
    """
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with suppress(AttributeError):  # a Pillow without libtiff
        ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler(None)


@lru_cache(maxsize=64)
def _preset(spec: InputSpec) -> ImageClassification:
    preset = ImageClassification(
        crop_size=spec.crop,
        mean=spec.mean,
        std=spec.std,
        interpolation=InterpolationMode(spec.interpolation),
        antialias=spec.antialias,
    )
    # Its constructor takes the shorter side alone; what it resizes with takes both.
    preset.resize_size = [spec.resize] if isinstance(spec.resize, int) else list(spec.resize)
    return preset


def _decoded(encoded: bytearray, resize: Resize, max_pixels: int) -> Image.Image:
    """The image upright, in RGB; its header is judged before memory is spent on its pixels."""
    if not encoded:
        raise InvalidInput("the body is empty, expected an image")
    with _decoding(encoded, max_pixels):
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        _check_size(image.size, resize, max_pixels)
        _check_tiles(image, max_pixels)
        rgb = colours.rgb(image)
        transposition = _transposition(image)
        del image  # of 50 million pixels with alpha it takes 200 MB
        return rgb if transposition is None else rgb.transpose(transposition)


@contextmanager
def _decoding(encoded: bytearray, max_pixels: int) -> Iterator[None]:
    """What Pillow says of a broken file, as InvalidInput: its decoders raise whatever they trip over."""
    try:
        yield
    except (InvalidInput, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise InvalidInput(_no_image(encoded)) from error
    except Image.DecompressionBombError as error:
        raise InvalidInput(
            f"the image has more pixels than the {max_pixels} that CICADA_MAX_PIXELS allows"
        ) from error
    except Exception as error:  # KeyError included
        raise InvalidInput(f"the image cannot be decoded: {_reason(error)}") from error


def _no_image(encoded: bytearray) -> str:
    expected = f"expected one of {', '.join(FORMATS)}"
    found = looks_like(encoded)
    if found is None:
        return f"the body is not an image: it begins with {bytes(encoded[:8])!r}, {expected}"
    if found in _MEDIA_TYPES:
        return f"the image cannot be decoded: it looks like {found}, but its header is damaged"
    if found.startswith("image/"):
        return f"the image looks like {found}, {expected}"
    return f"the body is not an image: it looks like {found}, {expected}"


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:_LONGEST_REASON] or type(error).__name__


def _check_size(size: tuple[int, int], resize: Resize, max_pixels: int) -> None:
    """Refuses what would take too much memory, before or after resizing (a PNG of 312 bytes took 1.2 GB).

    resize: what torchvision makes of the shorter side, while the longer follows in proportion; or of both.
    """
    width, height = size
    if width < 1 or height < 1:
        raise InvalidInput(f"the image has {width} x {height} pixels, expected at least 1 x 1")
    if width * height > max_pixels:
        raise InvalidInput(
            f"the image has {width} x {height} pixels, "
            f"more than the {max_pixels} that CICADA_MAX_PIXELS allows"
        )
    if not isinstance(resize, int):
        return  # to a size that is the model's, whatever the image
    shorter, longer = sorted(size)
    resized = resize * int(resize * longer / shorter)
    if resized > max_pixels:
        raise InvalidInput(
            f"the image has {width} x {height} pixels: resized so that its shorter side has {resize}, "
            f"it would have {resized}, more than the {max_pixels} that CICADA_MAX_PIXELS allows"
        )


def _check_tiles(image: ImageFile.ImageFile, max_pixels: int) -> None:
    """A TIFF's tiles are decoded whole, however little of them lies within the image."""
    tags = getattr(image, "tag_v2", {})
    width, height = (tags.get(tag, 1) for tag in _TILE_SIZE)
    if width * height > max_pixels:
        raise InvalidInput(
            f"the image has tiles of {width} x {height} pixels, "
            f"more than the {max_pixels} that CICADA_MAX_PIXELS allows"
        )


def _transposition(image: ImageFile.ImageFile) -> Image.Transpose | None:
    """What turns a decoded image upright; Pillow itself turns a TIFF, and takes the tag away.

    Metadata that cannot be read do not make an image unreadable: they say nothing.
    """
    try:
        return _TRANSPOSITIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - of any kind, as when decoding
        return None
