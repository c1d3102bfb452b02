"""Forms as clients make them, fed in pieces cut anywhere."""

import random
from typing import Any

import httpx
import pytest

from runtime.errors import BadInput
from runtime.forms import FileField

CONTENTS = {
    "nothing": b"",
    "noise": random.Random(0).randbytes(300_000),
    "nearly boundaries": b"\r\n--bound\r\n--boundar\r\r\n\r\n--boundarx--\r\n" * 50,
    "line ends": b"\r\n" * 1000 + b"\r",
}


def form(content: bytes) -> bytes:
    files: dict[str, Any] = {
        "before": ("x", b"y"),
        "file": ("a.jpg", content, "image/jpeg"),
        "after": (None, b"z"),
    }
    headers = {"Content-Type": "multipart/form-data; boundary=boundary"}
    return httpx.Request("POST", "http://a", files=files, headers=headers).read()


def read(body: bytes, cuts: int) -> bytes:
    chance = random.Random(cuts)
    ends = sorted(chance.randrange(len(body) + 1) for _ in range(cuts))
    field = FileField("file", b"boundary")
    for start, end in zip([0, *ends], [*ends, len(body)], strict=True):
        field.write(body[start:end])
    return field.finish()


@pytest.mark.parametrize("cuts", [0, 1, 10, 1000])
@pytest.mark.parametrize("name", CONTENTS)
def test_the_file_comes_out_as_it_is(name: str, cuts: int) -> None:
    assert read(form(CONTENTS[name]), cuts) == CONTENTS[name]


def test_a_form_cut_anywhere_is_bad_input() -> None:
    body = form(b"content")
    last = body.rindex(b"--boundary--") + len(b"--boundary--")
    for length in range(last):
        with pytest.raises(BadInput):
            read(body[:length], 0)
    assert read(body[:last], 0) == b"content"  # the line's end may be missing


@pytest.mark.parametrize(
    "disposition",
    [
        b'form-data; name="file"',
        b"form-data; name=\"file\"; filename*=UTF-8''a.jpg",
        b'form-data; name="File"; filename="a.jpg"',
    ],
)
def test_what_is_no_file_of_the_name_is_passed_over(disposition: bytes) -> None:
    part = b"--boundary\r\nContent-Disposition: %b\r\n\r\nx\r\n--boundary--\r\n" % disposition
    with pytest.raises(BadInput, match="no file in a field named 'file'"):
        read(part, 0)
