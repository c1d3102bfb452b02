"""Inputs of every kind as the model's input tensor: images, several of them, pixels."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms._presets import ImageClassification

from handler import images, inputs
from handler.errors import InvalidInput
from models.manifest import InputSpec

SPEC = InputSpec(
    resize=40,
    crop=32,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    interpolation="bilinear",
)
PRESET = ImageClassification(crop_size=32, resize_size=40)


def noise(*shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("shape", [(1, 50, 60, 3), (3, 45, 40, 3), (2, 1, 1, 3), (1, 300, 7, 3)])
def test_pixels_are_what_an_image_file_of_them_is(shape: tuple[int, ...]) -> None:
    pixels = noise(*shape)
    found = inputs.decode(
        {"kind": "pixels", "shape": list(shape)}, bytearray(pixels.tobytes()), SPEC
    )
    files = [images.decode(bytearray(png(image)), SPEC) for image in pixels]
    presets = [PRESET(Image.fromarray(image)).unsqueeze(0) for image in pixels]
    assert torch.equal(found, torch.cat(files))
    assert torch.equal(found, torch.cat(presets))


def test_images_of_any_sizes_and_forms_are_one_batch(photo: Path) -> None:
    encoded = [photo.read_bytes(), png(noise(50, 60, 3)), png(noise(9, 9, 3))]
    described = {"kind": "images", "lengths": [len(image) for image in encoded]}
    found = inputs.decode(described, bytearray(b"".join(encoded)), SPEC)
    assert found.shape == (3, 3, 32, 32)
    for row, image in zip(found, encoded, strict=True):
        assert torch.equal(row[None], images.decode(bytearray(image), SPEC))


def test_one_image_is_the_same_as_a_batch_of_one(photo: Path) -> None:
    encoded = bytearray(photo.read_bytes())
    one = inputs.decode({"kind": "image"}, encoded, SPEC)
    assert torch.equal(
        inputs.decode({"kind": "images", "lengths": [len(encoded)]}, encoded, SPEC), one
    )


@pytest.mark.parametrize(
    ("described", "size", "told"),
    [
        ({}, 0, "input of kind None, expected 'image', 'images', 'pixels' or 'tensor'"),
        ({"kind": "sound"}, 0, "input of kind 'sound'"),
        ({"kind": "images"}, 0, "lengths None, expected a list of sizes"),
        ({"kind": "images", "lengths": [-1, 4]}, 3, "expected a list of sizes"),
        ({"kind": "images", "lengths": [True]}, 1, "expected a list of sizes"),
        ({"kind": "images", "lengths": []}, 0, "0 images in 0 bytes"),
        ({"kind": "images", "lengths": [2]}, 3, "1 images in 3 bytes"),
        ({"kind": "images", "lengths": [0]}, 0, "image 1 of 1: "),
        ({"kind": "pixels", "shape": None}, 3, "shape None, expected a list of sizes"),
        ({"kind": "pixels", "shape": [1, 1, 3]}, 3, "expected [n, height, width, 3]"),
        ({"kind": "pixels", "shape": [1, 3, 1, 1]}, 3, "expected [n, height, width, 3]"),
        ({"kind": "pixels", "shape": [1, 0, 1, 3]}, 0, "expected a list of sizes"),
        ({"kind": "pixels", "shape": [1, 1, 2, 3]}, 3, "3 bytes, expected 6"),
    ],
)
def test_what_does_not_fit_is_told(described: dict[str, Any], size: int, told: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(told)):
        inputs.decode(described, bytearray(size), SPEC)


def test_of_several_images_the_bad_one_is_named() -> None:
    good = png(noise(9, 9, 3))
    described = {"kind": "images", "lengths": [len(good), 9]}
    with pytest.raises(InvalidInput, match="image 2 of 2: "):
        inputs.decode(described, bytearray(good + b"GET a dog"), SPEC)


def test_pixels_that_resizing_would_blow_up_are_refused() -> None:
    with pytest.raises(InvalidInput, match="pixels"):
        inputs.decode({"kind": "pixels", "shape": [1, 1, 100_000, 3]}, bytearray(300_000), SPEC)


def test_every_kind_of_image_keeps_to_the_most_pixels() -> None:
    file = png(noise(50, 60, 3))
    for described, body in (
        ({"kind": "image"}, file),
        ({"kind": "images", "lengths": [len(file)]}, file),
        ({"kind": "pixels", "shape": [1, 50, 60, 3]}, bytes(9000)),
    ):
        inputs.decode(described, bytearray(body), SPEC, max_pixels=3000)
        with pytest.raises(InvalidInput, match="2999"):
            inputs.decode(described, bytearray(body), SPEC, max_pixels=2999)
