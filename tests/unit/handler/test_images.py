"""Images of every kind that callers send, against torchvision's preset on what Pillow decodes."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from handler import images
from handler.errors import InvalidInput
from models.manifest import InputSpec

SPEC = InputSpec(
    resize=40,
    crop=32,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    interpolation="bicubic",
)


def picture(mode: str = "RGB", size: tuple[int, int] = (60, 50)) -> Image.Image:
    noise = random.Random(0).randbytes(size[0] * size[1] * 3)
    return Image.frombytes("RGB", size, noise).convert(mode)


def encoded(image: Image.Image, form: str, **options: Any) -> bytearray:
    file = io.BytesIO()
    image.save(file, form, **options)
    return bytearray(file.getvalue())


@pytest.mark.parametrize(
    ("form", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
        ("PNG", "LA", {}),
        ("PNG", "1", {}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    ],
)
def test_every_form_is_prepared_as_torchvisions_preset_does(
    form: str, mode: str, options: dict[str, Any]
) -> None:
    body = encoded(picture(mode), form, **options)
    preset = ImageClassification(
        crop_size=32, resize_size=40, interpolation=InterpolationMode.BICUBIC
    )

    found = images.decode(body, SPEC)

    assert found.shape == (1, 3, 32, 32)
    assert found.dtype == torch.float32
    assert torch.equal(found[0], preset(Image.open(io.BytesIO(body)).convert("RGB")))


def test_a_real_photo(photo: Path) -> None:
    preset = ImageClassification(
        crop_size=32, resize_size=40, interpolation=InterpolationMode.BICUBIC
    )
    expected = preset(Image.open(photo).convert("RGB"))
    assert torch.equal(images.decode(bytearray(photo.read_bytes()), SPEC)[0], expected)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body is empty, expected an image"),
        (b"hello, world", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "expected one of JPEG, PNG"),
        (b"%PDF-1.7\n", "not an image"),
    ],
)
def test_what_is_no_image_is_told(body: bytes, told: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        images.decode(bytearray(body), SPEC)
    assert told in str(raised.value)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_image_cut_short_is_refused(form: str) -> None:
    body = encoded(picture(size=(200, 200)), form)
    with pytest.raises(InvalidInput):
        images.decode(body[: len(body) // 2], SPEC)


def test_forms_that_are_not_named_are_not_tried() -> None:
    with pytest.raises(InvalidInput, match="not an image"):
        images.decode(encoded(picture(), "PPM"), SPEC)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, on odd tags
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_damaged_image_is_an_image_or_refused(form: str) -> None:
    body, chance = encoded(picture(), form), random.Random(form)
    for _ in range(200):
        damaged = body.copy()
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(min(200, len(damaged)))] = chance.randrange(256)
        try:
            found = images.decode(damaged, SPEC)
        except InvalidInput as error:
            assert str(error)  # noqa: PT017 - either way is right
        else:
            assert found.shape == (1, 3, 32, 32)


def test_a_picture_of_more_pixels_than_memory_should_hold_is_refused() -> None:
    with pytest.raises(InvalidInput, match="pixels"):
        images.decode(encoded(Image.new("1", (10_000, 10_000)), "PNG"), SPEC)


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_a_picture_that_resizing_would_blow_up_is_refused(size: tuple[int, int]) -> None:
    body = encoded(Image.new("L", size), "PNG")
    with pytest.raises(InvalidInput, match=f"{size[0]} x {size[1]} pixels: resized"):
        images.decode(body, SPEC)


def test_a_long_picture_within_reason_is_taken() -> None:
    body = encoded(picture(size=(2000, 10)), "PNG")
    assert images.decode(body, SPEC).shape == (1, 3, 32, 32)
