"""Images of every kind that callers send: their pixels against hand-made ones, their tensors against torchvision's."""

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torchvision
from PIL import Image, ImageFile
from torchvision import transforms

from handler import images
from handler.errors import InvalidInput
from models import pretrained
from models.manifest import InputSpec, Interpolation
from runtime.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as the handler process does

Pixels = npt.NDArray[np.uint8]
SIDE = 8
AS_IT_IS = InputSpec(
    resize=SIDE, crop=SIDE, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear"
)
"""Leaves a picture of 8 x 8 pixels as it is."""
SPEC = InputSpec(
    resize=40,
    crop=32,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    interpolation="bicubic",
)
FORMS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
WEIGHTS = [
    "ResNet50_Weights.IMAGENET1K_V1",
    "ResNet50_Weights.IMAGENET1K_V2",
    "VGG16_Weights.IMAGENET1K_V1",
    "VGG16_Weights.IMAGENET1K_FEATURES",
    "ViT_B_16_Weights.IMAGENET1K_V1",
    "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1",
    "ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1",
    "ViT_L_16_Weights.IMAGENET1K_V1",
]
"""Of every size and interpolation that torchvision's ResNet, VGG and ViT weights take."""


def noise(*shape: int, dtype: type = np.uint8) -> npt.NDArray[Any]:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def picture(mode: str = "RGB", size: tuple[int, int] = (60, 50)) -> Image.Image:
    return Image.fromarray(noise(size[1], size[0], 3)).convert(mode)


def encoded(image: Image.Image, form: str, **options: Any) -> bytearray:
    file = io.BytesIO()
    image.save(file, form, **options)
    return bytearray(file.getvalue())


def pixels(body: bytes | bytearray) -> Pixels:
    """What the model would see of a picture of 8 x 8 pixels."""
    prepared = images.decode(bytearray(body), AS_IT_IS)
    return (prepared[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def grey(levels: npt.NDArray[Any]) -> Pixels:
    return np.repeat(levels.astype(np.uint8)[..., None], 3, axis=2)


def on_white(colours: npt.NDArray[Any], alpha: npt.NDArray[Any]) -> Pixels:
    weight = alpha[..., None] / 255
    mixed: Pixels = np.floor(colours * weight + 255 * (1 - weight) + 0.5).astype(np.uint8)
    return mixed


def refusal(body: bytes | bytearray, **options: Any) -> str:
    with pytest.raises(InvalidInput) as raised:
        images.decode(bytearray(body), SPEC, **options)
    return str(raised.value)


ADAM7 = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)
"""Of each pass: first row, first column, row step, column step (section 8.2)."""


def png(
    samples: npt.NDArray[Any],
    depth: int,
    *,
    palette: npt.NDArray[np.uint8] | None = None,
    palette_alpha: npt.NDArray[np.uint8] | None = None,
    transparent: Sequence[int] = (),
    interlaced: bool = False,
    claimed: tuple[int, int] | None = None,
) -> bytes:
    """A PNG written by hand (PNG, third edition), as Pillow writes few of its colour types and depths.

    samples: height x width x channels (1, 2: with alpha, 3, 4: with alpha), or height x width.

    transparent: the one colour that is. claimed: the width and height of the header, if not the true ones.
    """
    grid = samples if samples.ndim == 3 else samples[..., None]
    colour_type = 3 if palette is not None else {1: 0, 2: 4, 3: 2, 4: 6}[grid.shape[2]]
    width, height = claimed or (grid.shape[1], grid.shape[0])
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, interlaced))
    ]
    if palette is not None:
        chunks.append((b"PLTE", palette.tobytes()))
    if palette_alpha is not None:
        chunks.append((b"tRNS", palette_alpha.tobytes()))
    if transparent:
        chunks.append((b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)))
    passes = (grid[r::rs, c::cs] for r, c, rs, cs in ADAM7) if interlaced else (grid,)
    lines = b"".join(line for part in passes if part.size for line in _lines(part, depth))
    chunks += [(b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _lines(grid: npt.NDArray[Any], depth: int) -> Iterator[bytes]:
    """Each with the filter type None before it."""
    for row in grid.reshape(grid.shape[0], -1):
        if depth == 16:
            yield b"\0" + row.astype(">u2").tobytes()
        else:
            bits = np.unpackbits(row.astype(np.uint8)[:, None], axis=1)[:, -depth:]
            yield b"\0" + np.packbits(bits.reshape(-1)).tobytes()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("size", [(300, 200), (90, 400)])
def test_a_tensor_is_what_the_preset_of_real_weights_makes(
    name: str, size: tuple[int, int]
) -> None:
    weights = torchvision.models.get_weight(name)
    body = encoded(picture(size=size), "JPEG")
    found = images.decode(body, pretrained.preset_of(weights).input)
    expected = weights.transforms()(Image.open(io.BytesIO(body)))
    assert torch.equal(found, expected.unsqueeze(0))


@pytest.mark.parametrize(
    ("form", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"subsampling": 0, "quality": 100}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}),
        ("PNG", "P", {}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("GIF", "P", {}),
        ("GIF", "L", {"interlace": 1}),
        ("BMP", "1", {}),
        ("BMP", "L", {}),
        ("BMP", "P", {}),
        ("BMP", "RGB", {}),
        ("TIFF", "1", {"compression": "group4"}),
        ("TIFF", "P", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}),
        ("TIFF", "RGB", {"compression": "jpeg"}),
        ("TIFF", "CMYK", {}),
        ("TIFF", "YCbCr", {}),
    ],
)
def test_an_image_is_prepared_from_what_pillow_decodes(
    form: str, mode: str, options: dict[str, Any]
) -> None:
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V2
    body = encoded(picture(mode), form, **options)
    found = images.decode(body, pretrained.preset_of(weights).input)
    expected = weights.transforms()(Image.open(io.BytesIO(body)).convert("RGB"))
    assert torch.equal(found, expected.unsqueeze(0))


@pytest.mark.parametrize("interpolation", get_args(Interpolation))
@pytest.mark.parametrize("resize", [70, (90, 60), (40, 200)])
@pytest.mark.parametrize("size", [(300, 200), (50, 400)])
def test_preprocessing_of_one_s_own_is_torchvision_s_transforms(
    interpolation: Interpolation, resize: int | tuple[int, int], size: tuple[int, int]
) -> None:
    mean, std = (0.5, 0.25, 0.1), (0.25, 0.5, 2.0)
    spec = InputSpec(resize=resize, crop=64, mean=mean, std=std, interpolation=interpolation)
    body = encoded(picture(size=size), "PNG")
    transform = transforms.Compose(
        [
            transforms.Resize(resize, transforms.InterpolationMode(interpolation)),
            transforms.CenterCrop(64),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    expected = transform(Image.open(io.BytesIO(body)))
    assert torch.equal(images.decode(body, spec), expected.unsqueeze(0))


def test_a_real_photo(photo: Path) -> None:
    weights = torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1
    found = images.decode(bytearray(photo.read_bytes()), pretrained.preset_of(weights).input)
    assert torch.equal(found, weights.transforms()(Image.open(photo)).unsqueeze(0))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_a_grey_png_of_any_depth_spans_black_to_white(depth: int, interlaced: bool) -> None:
    samples = noise(SIDE, SIDE, dtype=np.uint16) >> (16 - depth)
    levels = samples >> 8 if depth == 16 else samples * (255 // (2**depth - 1))
    assert np.array_equal(pixels(png(samples, depth, interlaced=interlaced)), grey(levels))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_palette_png_of_any_depth_shows_its_colours(depth: int, interlaced: bool) -> None:
    palette = noise(2**depth, 3)
    indices = noise(SIDE, SIDE) >> (8 - depth)
    body = png(indices, depth, palette=palette, interlaced=interlaced)
    assert np.array_equal(pixels(body), palette[indices])


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("channels", [2, 3, 4])
def test_a_colour_png_with_or_without_alpha(channels: int, depth: int, interlaced: bool) -> None:
    samples = noise(SIDE, SIDE, channels, dtype=np.uint16) >> (16 - depth)
    levels = samples >> (depth - 8)
    colours = grey(levels[..., 0]) if channels == 2 else levels[..., :3]
    expected = colours if channels == 3 else on_white(colours, levels[..., -1])
    assert np.array_equal(pixels(png(samples, depth, interlaced=interlaced)), expected)


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_a_grey_png_whose_one_level_is_transparent_lies_on_white(depth: int) -> None:
    samples = noise(SIDE, SIDE, dtype=np.uint16) >> (16 - depth)
    key = int(samples[0, 0])
    levels = samples >> 8 if depth == 16 else samples * (255 // (2**depth - 1))
    expected = np.where(samples == key, 255, levels)
    assert np.array_equal(pixels(png(samples, depth, transparent=[key])), grey(expected))


@pytest.mark.parametrize("depth", [8, 16])
def test_a_colour_png_whose_one_colour_is_transparent_lies_on_white(depth: int) -> None:
    samples = noise(SIDE, SIDE, 3, dtype=np.uint16) >> (16 - depth)
    expected = samples >> (depth - 8)
    expected[2, 3] = 255
    body = png(samples, depth, transparent=samples[2, 3].tolist())
    assert np.array_equal(pixels(body), expected)


def test_a_palette_with_alpha_lies_on_white() -> None:
    palette, alpha = noise(4, 3), np.array([0, 90, 200, 255], np.uint8)
    indices = noise(SIDE, SIDE) >> 6
    body = png(indices, 8, palette=palette, palette_alpha=alpha)
    assert np.array_equal(pixels(body), on_white(palette[indices], alpha[indices]))


@pytest.mark.parametrize(
    ("form", "options"), [("WEBP", {"lossless": True, "exact": True}), ("TIFF", {})]
)
def test_alpha_lies_on_white_in_every_form(form: str, options: dict[str, Any]) -> None:
    colours = noise(SIDE, SIDE, 4)
    body = encoded(Image.fromarray(colours), form, **options)
    assert np.array_equal(pixels(body), on_white(colours[..., :3], colours[..., 3]))


def test_a_transparent_gif_lies_on_white() -> None:
    indices = noise(SIDE, SIDE) >> 6
    image = Image.fromarray(indices).convert("P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    colours = np.array([[0, 0, 0], [255, 0, 0], [255, 255, 255], [0, 0, 255]])
    assert np.array_equal(pixels(encoded(image, "GIF", transparency=2)), colours[indices])


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("options", [{}, {"compression": "tiff_deflate"}])
def test_a_grey_tiff_of_16_bits_spans_black_to_white(
    big_endian: bool, options: dict[str, Any]
) -> None:
    samples = noise(SIDE, SIDE, dtype=np.uint16)
    image = Image.fromarray(samples.astype(">u2") if big_endian else samples)
    assert image.mode == ("I;16B" if big_endian else "I;16")
    assert np.array_equal(pixels(encoded(image, "TIFF", **options)), grey(samples >> 8))


def tiff(samples: npt.NDArray[Any], photometric: int = 1, sample_format: int = 1) -> bytearray:
    """Written as signed or whatever Pillow takes it for, and told to be of another kind."""
    body = encoded(Image.fromarray(samples), "TIFF")
    for tag, value in ((262, photometric), (339, sample_format)):
        place = body.find(tag.to_bytes(2, "little") + b"\x03\0\x01\0\0\0")
        if place >= 0:
            body[place + 8 : place + 10] = value.to_bytes(2, "little")
    return body


def test_a_grey_tiff_of_32_bits_spans_black_to_white() -> None:
    samples = noise(SIDE, SIDE, dtype=np.uint32)
    assert np.array_equal(pixels(tiff(samples.view(np.int32))), grey(samples >> 24))


def test_a_grey_tiff_whose_zero_is_white_is_turned_over() -> None:
    samples = noise(SIDE, SIDE, dtype=np.uint16)
    assert np.array_equal(pixels(tiff(samples, photometric=0)), 255 - grey(samples >> 8))


def test_a_tiff_of_floats_counts_from_0_to_1() -> None:
    samples = np.linspace(0, 1, SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
    expected = grey(np.round(samples * 255))
    assert np.array_equal(pixels(encoded(Image.fromarray(samples), "TIFF")), expected)


@pytest.mark.parametrize(("low", "high"), [(0, 255), (-1, 1), (0, np.nan), (0, np.inf)])
def test_a_tiff_of_floats_beyond_0_to_1_is_refused(low: float, high: float) -> None:
    samples = np.full((SIDE, SIDE), low, np.float32)
    samples[1, 1] = high
    told = refusal(encoded(Image.fromarray(samples), "TIFF"))
    assert f"from {low:g} to {high:g}, expected 0 to 1" in told or "nan" in told


def test_a_tiff_of_signed_samples_is_refused() -> None:
    samples = noise(SIDE, SIDE, dtype=np.int32)
    assert "signed samples" in refusal(tiff(samples, sample_format=2))


@pytest.mark.parametrize(
    ("lab", "expected"),
    [((100, 0, 0), (255, 255, 255)), ((0, 0, 0), (0, 0, 0)), ((54.29, 80.8, 69.9), (255, 0, 0))],
)
def test_lab_colours_are_converted(
    lab: tuple[float, float, float], expected: tuple[int, int, int]
) -> None:
    """CIE Lab under D50, of which the last is sRGB's red."""
    levels = (round(lab[0] * 2.55), round(lab[1]) + 128, round(lab[2]) + 128)
    found = pixels(encoded(Image.new("LAB", (SIDE, SIDE), levels), "TIFF"))
    assert np.abs(found[0, 0].astype(int) - expected).max() <= 6


def test_ink_of_a_cmyk_tiff_darkens() -> None:
    ink = noise(SIDE, SIDE, 4).astype(int)
    expected = (255 - ink[..., :3]) * (255 - ink[..., 3:]) / 255
    found = pixels(encoded(Image.fromarray(ink.astype(np.uint8), "CMYK"), "TIFF"))
    assert np.abs(found - expected).max() <= 1


def test_ink_of_a_cmyk_jpeg_is_inverted_as_adobe_does_it() -> None:
    white = Image.new("CMYK", (SIDE, SIDE), (0, 0, 0, 0))
    assert np.array_equal(pixels(encoded(white, "JPEG")), np.full((SIDE, SIDE, 3), 255))


UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).transpose(1, 0, 2),
    8: np.rot90,
}
"""What turns the stored rows and columns upright, by the tag's value (Exif 3.0, 4.6.5.1)."""


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_image_is_turned_upright(form: str, orientation: int) -> None:
    tag = Image.Exif()
    tag[0x0112] = orientation
    stored = grey(np.kron(noise(2, 2), np.ones((4, 4), np.uint8)))
    stored[0:4, 0:4] = (250, 20, 20)
    options: dict[str, dict[str, Any]] = {
        "WEBP": {"lossless": True},
        "JPEG": {"quality": 100, "subsampling": 0},
    }
    body = encoded(Image.fromarray(stored), form, exif=tag, **options.get(form, {}))
    difference = pixels(body).astype(int) - UPRIGHT[orientation](stored)
    assert np.abs(difference).max() <= (4 if form == "JPEG" else 0)


def test_the_proportions_are_those_of_the_upright_image() -> None:
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V1
    tag = Image.Exif()
    tag[0x0112] = 6
    body = encoded(picture(size=(300, 200)), "PNG", exif=tag)
    upright = Image.open(io.BytesIO(body)).transpose(Image.Transpose.ROTATE_270)
    found = images.decode(body, pretrained.preset_of(weights).input)
    assert torch.equal(found[0], weights.transforms()(upright))


@pytest.mark.parametrize("exif", [b"Exif\0\0MM", b"Exif\0\0II*\0\xff\xff\xff\xff", b"\xff" * 99])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_metadata_that_cannot_be_read_say_nothing(form: str, exif: bytes) -> None:
    body = encoded(picture(), form, exif=exif)
    assert torch.equal(images.decode(body, SPEC), images.decode(encoded(picture(), form), SPEC))


@pytest.mark.parametrize(
    ("form", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("PNG", {})]
)
def test_of_several_frames_or_pages_the_first_is_taken(form: str, options: dict[str, Any]) -> None:
    frames = [Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "lime", "blue")]
    body = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(pixels(body)[0, 0], [255, 0, 0])


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (2000, 10)])
@pytest.mark.parametrize("form", FORMS)
def test_small_and_long_images_within_reason_are_taken(form: str, size: tuple[int, int]) -> None:
    assert images.decode(encoded(picture(size=size), form), SPEC).shape == (1, 3, 32, 32)


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"<!DOCTYPE html>\n<html><body>504</body></html>", "text/html"),
        (b"\n\n <HTML lang=en>", "text/html"),
        (b'{"instances": [[0.5, 1.0]]}', "application/json"),
        (b'[{"a": "' + b"x" * 9000 + b'"}]', "application/json"),
        (b"[not json, though it begins so]", "text/plain"),
        (b"<?xml version='1.0'?><a/>", "application/xml"),
        (b"hello, world", "text/plain"),
        ("grüße, 世界".encode() * 999, "text/plain"),
        (b"\xef\xbb\xbf# a heading", "text/plain"),
        (b"%PDF-1.7\n", "application/pdf"),
        (b"PK\x03\x04" + b"\0" * 30, "application/zip"),
        (b"\x1f\x8b\x08\0" + b"\0" * 30, "application/gzip"),
        (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41" + b"\0" * 64, "video/mp4"),
        (b"ID3\x03" + b"\0" * 40, "audio/mpeg"),
    ],
)
def test_what_is_no_image_is_told_what_it_looks_like(body: bytes, kind: str) -> None:
    assert refusal(body).startswith(f"the body is not an image: it looks like {kind}, expected")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (SVG, "image/svg+xml"),
        (b"<?xml version='1.0'?>" + SVG, "image/svg+xml"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64, "image/heic"),
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + b"\0" * 64, "image/avif"),
        (b"8BPS\0\1" + b"\0" * 20, "image/vnd.adobe.photoshop"),
    ],
)
def test_an_image_of_a_form_not_taken_is_told_by_its_name(body: bytes, kind: str) -> None:
    assert refusal(body).startswith(f"the image looks like {kind}, expected one of JPEG, PNG, ")


def test_nothing_is_told_to_be_nothing() -> None:
    assert refusal(b"") == "the body is empty, expected an image"


@pytest.mark.parametrize("body", [b"\0" * 100, b"\x01\x02\x03", b"\xff\xd8", b"\x93NUMPY\1\0v\0"])
def test_bytes_of_no_kind_are_quoted(body: bytes) -> None:
    assert f"it begins with {body[:8]!r}, expected one of JPEG" in refusal(body)


def test_forms_that_are_not_named_are_not_tried() -> None:
    for form in ("PPM", "PCX", "TGA", "JPEG2000", "AVIF", "ICO", "EPS"):
        assert "expected one of JPEG, PNG, WEBP, GIF, BMP, TIFF" in refusal(
            encoded(picture(), form)
        )


@pytest.mark.parametrize("form", FORMS)
def test_an_image_cut_short_anywhere_is_refused_or_shown(form: str) -> None:
    body = encoded(picture(size=(64, 64)), form)
    for length in range(1, len(body) - 1, max(1, len(body) // 40)):
        try:
            images.decode(body[:length], SPEC)
        except InvalidInput as error:
            assert "\n" not in str(error)  # noqa: PT017 - either way is right
    assert "cannot be decoded" in refusal(body[: len(body) // 2])
    assert images.decode(body, SPEC).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_image_is_an_image_or_refused(form: str) -> None:
    body, chance = encoded(picture(), form), random.Random(form)
    for _ in range(200):
        damaged = body.copy()
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(min(200, len(damaged)))] = chance.randrange(256)
        try:
            found = images.decode(damaged, SPEC, max_pixels=1_000_000)
        except InvalidInput as error:
            assert 0 < len(str(error)) < 300  # noqa: PT017 - either way is right
        else:
            assert found.shape == (1, 3, 32, 32)


def test_what_follows_an_image_makes_it_nothing_else() -> None:
    body = encoded(picture(), "JPEG")
    polyglot = body + b"PK\x03\x04" + b"<script>alert(1)</script>"
    assert torch.equal(images.decode(polyglot, SPEC), images.decode(body, SPEC))


def test_the_default_limit_is_the_settings() -> None:
    assert Settings.model_fields["max_pixels"].default == images.MAX_PIXELS


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test, no pixel may be decoded."""

    def fail(_: object) -> None:
        pytest.fail("the image was decoded")

    for kind in (ImageFile.ImageFile, *ImageFile.ImageFile.__subclasses__()):
        if "load" in vars(kind):
            monkeypatch.setattr(kind, "load", fail)


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize("form", FORMS)
def test_an_image_of_too_many_pixels_is_refused_undecoded(form: str) -> None:
    body = encoded(picture(size=(60, 50)), form)
    told = refusal(body, max_pixels=2999)
    assert told == "the image has 60 x 50 pixels, more than the 2999 that CICADA_MAX_PIXELS allows"


@pytest.mark.parametrize("form", FORMS)
def test_an_image_of_as_many_pixels_as_allowed_is_taken(form: str) -> None:
    body = encoded(picture(size=(60, 50)), form)
    assert images.decode(body, SPEC, max_pixels=3000).shape == (1, 3, 32, 32)


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize("size", [(40_000, 1), (1, 40_000)])
def test_an_image_that_resizing_would_blow_up_is_refused_undecoded(size: tuple[int, int]) -> None:
    body = encoded(Image.new("L", size), "PNG")
    told = refusal(body)
    assert told.startswith(f"the image has {size[0]} x {size[1]} pixels: resized so that")
    assert f"it would have {40 * 40 * 40_000}, more than the 50000000" in told


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize("size", [(60_000, 60_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)])
def test_a_tiny_file_of_giant_dimensions_is_refused_undecoded(size: tuple[int, int]) -> None:
    body = png(np.zeros((1, 1), np.uint8), 8, claimed=size)
    assert len(body) < 100
    assert "CICADA_MAX_PIXELS" in refusal(body)


@pytest.mark.usefixtures("undecoded")
def test_a_small_tiff_of_giant_tiles_is_refused_undecoded() -> None:
    side = 1 << 15
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 0, 325: 9}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    body = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + b"".join(entries) + b"\0" * 13
    assert refusal(body).startswith("the image has tiles of 32768 x 32768 pixels")


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    refusal(png(np.zeros((1, 1), np.uint8), 8, claimed=size))
    empty_gif = bytearray(b"GIF89a\0\0\0\0\0\0\0,\0\0\0\0\0\0\0\0\0\x02\x02L\x01\0;")
    refusal(empty_gif)
