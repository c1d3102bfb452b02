"""The sample photo is the one whose provenance stands beside it."""

import hashlib
from pathlib import Path

from PIL import Image


def test_the_photo_is_the_one_described(photo: Path) -> None:
    described = photo.with_name("PROVENANCE.md").read_text()
    with Image.open(photo) as image:
        assert f"{image.format}, {image.width} x {image.height} pixels, {image.mode}" in described
    assert hashlib.sha256(photo.read_bytes()).hexdigest() in described
