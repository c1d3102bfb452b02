"""Images over HTTP to real handlers: those that are answered, and those that must cost nobody anything."""

import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

Server = Any
PATH = "/predictions/resnet18"


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (180, 300, 3), np.uint8))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("coding", ["identity", "gzip"])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("JPEG", {}),
        ("PNG", {}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_an_image_gets_the_probabilities_that_torchvision_gives_it(
    server: Server, reference: nn.Module, form: str, options: dict[str, Any], coding: str
) -> None:
    body = encoded(picture(), form, **options)
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    value = preset(Image.open(io.BytesIO(body)).convert("RGB")).unsqueeze(0)
    with torch.inference_mode():
        expected = torch.softmax(reference(value), dim=1)[0]

    content = gzip.compress(body) if coding == "gzip" else body
    headers = {"Content-Encoding": coding, "Content-Type": "image/x-wrong"}
    response = server.client.post(f"{PATH}?top=1000", content=content, headers=headers)

    found = torch.zeros(1000)
    for label in response.json():
        found[label["index"]] = label["probability"]
    assert torch.equal(found, expected)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes) -> bytes:
    """With one line of pixels, whatever it says."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(width % 65536 + 1)))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *more, data, chunk(b"IEND", b"")])


def with_flipped_bytes(body: bytes, start: int) -> bytes:
    broken = bytearray(body)
    broken[start::37] = bytes(byte ^ 0xFF for byte in broken[start::37])
    return bytes(broken)


PHOTO = encoded(picture(), "JPEG")
HOSTILE = {
    "nothing but a signature": (PHOTO[:3], "its header is damaged"),
    "a photo cut short": (PHOTO[: len(PHOTO) // 2], "truncated"),
    "a photo of giant dimensions": (
        PHOTO.replace(struct.pack(">HH", 180, 300), b"\xff\xff\xff\xff"),
        "more pixels than the 50000000 that CICADA_MAX_PIXELS allows",
    ),
    "a PNG of giant dimensions": (png(2**31 - 1, 2**31 - 1), "CICADA_MAX_PIXELS"),
    "a PNG just over the limit": (png(10_000, 5001), "10000 x 5001 pixels"),
    "a PNG without its pixels": (png(7000, 7000)[:-20], "cannot be decoded"),
    "a long PNG": (png(30_000, 1), "resized so that its shorter side has 256"),
    "a tall PNG": (png(1, 30_000), "resized so that its shorter side has 256"),
    "a PNG without pixels": (png(0, 0), "its header is damaged"),
    "a PNG whose text is a bomb": (
        png(9, 9, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20)))),
        "cannot be decoded",
    ),
    "a PNG whose profile is a bomb": (
        png(9, 9, *[chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(64 << 20)))] * 9),
        "",
    ),
    "a TIFF with broken strips": (
        with_flipped_bytes(encoded(picture(), "TIFF", compression="tiff_deflate"), 400),
        "",
    ),
    "a TIFF with broken codes": (
        with_flipped_bytes(encoded(picture(), "TIFF", compression="tiff_lzw"), 400),
        "",
    ),
    "a TIFF with a broken directory": (
        with_flipped_bytes(encoded(picture(), "TIFF"), 8),
        "",
    ),
    "a GIF with broken codes": (with_flipped_bytes(encoded(picture(), "GIF"), 900), ""),
    "a WebP cut short": (encoded(picture(), "WEBP")[:9000], ""),
    "a BMP of no depth": (b"BM" + bytes(12) + b"\x28" + bytes(60), "cannot be decoded"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "looks like image/svg+xml"),
    "a page": (b"<!DOCTYPE html><title>Sign in</title>", "looks like text/html"),
    "a page that ends in a photo": (b"<html>" + PHOTO, "expected one of JPEG"),
    "a document that holds a photo": (b"%PDF-1.7\n" + PHOTO, "looks like application/pdf"),
    "an archive that holds a photo": (b"PK\x03\x04" + PHOTO, "looks like application/zip"),
    "a photo, compressed twice": (gzip.compress(PHOTO), "looks like application/gzip"),
    "JSON": (b'{"instances": [1, 2]}', "looks like application/json"),
    "a pickle": (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix", "expected one of JPEG"),
}


@pytest.fixture(scope="module", autouse=True)
def _no_handler_ended_and_the_log_is_json(server: Server) -> Iterator[None]:
    handlers = [handler.pid for handler in server.handlers()]
    yield
    assert [handler.pid for handler in server.handlers()] == handlers
    assert [line for line in server.log.splitlines() if not line.startswith("{")] == []


@pytest.mark.parametrize("name", HOSTILE)
def test_an_image_that_is_none_is_refused_and_the_next_one_answered(
    server: Server, name: str
) -> None:
    body, told = HOSTILE[name]
    (handler,) = server.handlers()
    assert server.client.post(PATH, content=PHOTO).status_code == 200
    before = peak_bytes(handler)

    response = server.client.post(PATH, content=body)

    assert response.status_code == 400, response.text
    assert told in response.json()["error"]
    assert "\n" not in response.json()["error"]
    assert "BytesIO" not in response.json()["error"]
    assert (
        peak_bytes(handler) - before < 280 << 20
    )  # 49 million grey pixels and their lines at most
    assert server.client.post(PATH, content=PHOTO).status_code == 200


def peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_odd_images_that_pillow_warns_of_are_answered_in_silence(server: Server) -> None:
    with_broken_exif = encoded(picture(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    with_odd_tags = encoded(picture(), "TIFF", tiffinfo={33432: "x" * 99, 65000: "y"})
    for body in (with_broken_exif, with_odd_tags, PHOTO + b"PK\x03\x04"):
        assert server.client.post(PATH, content=body).status_code == 200


def test_the_limit_of_pixels_is_a_setting(start_server: Callable[..., Server]) -> None:
    server = start_server(CICADA_MAX_PIXELS="53999")
    server.wait_until_ready()
    response = server.client.post(PATH, content=PHOTO)
    assert response.status_code == 400
    assert "300 x 180 pixels, more than the 53999" in response.json()["error"]
    smaller = encoded(picture().resize((100, 100)), "PNG")
    assert "resized" in server.client.post(PATH, content=smaller).json()["error"]
