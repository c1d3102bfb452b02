"""Content codings: what comes out, whatever pieces it comes in, and how much at a time."""

import gzip
import random
import zlib

import pytest
from starlette.datastructures import Headers

from runtime import codings
from runtime.errors import BadInput, UnsupportedCoding

GZIP = Headers({"Content-Encoding": "gzip"})


def inflated(encoded: bytes, cuts: int) -> bytes:
    chance = random.Random(cuts)
    ends = sorted(chance.randrange(len(encoded) + 1) for _ in range(cuts))
    decoding = codings.decoding(GZIP)
    pieces = [
        piece
        for start, end in zip([0, *ends], [*ends, len(encoded)], strict=True)
        for piece in decoding.decode(encoded[start:end])
    ]
    decoding.finish()
    assert max(map(len, pieces), default=0) <= 256 << 10
    return b"".join(pieces)


@pytest.mark.parametrize("cuts", [0, 1, 5, 50])
@pytest.mark.parametrize(
    "content",
    [b"", b"x", bytes(3_000_000), random.Random(0).randbytes(700_000), b"abc" * 400_000],
    ids=["nothing", "a byte", "zeros", "noise", "a pattern"],
)
def test_gzip_comes_out_whole_in_pieces_of_bounded_size(content: bytes, cuts: int) -> None:
    assert inflated(gzip.compress(content), cuts) == content
    half = len(content) // 2
    members = gzip.compress(content[:half]) + gzip.compress(content[half:], compresslevel=0)
    assert inflated(members, cuts) == content


def test_a_body_of_nothing_but_empty_members_is_empty() -> None:
    assert inflated(gzip.compress(b"") * 20_000, 3) == b""


@pytest.mark.parametrize("cut", [1, 8, 9, 17, 300])
def test_gzip_cut_short_is_bad_input(cut: int) -> None:
    with pytest.raises(BadInput, match="cut short"):
        inflated(gzip.compress(random.Random(0).randbytes(1000))[:-cut], 2)


@pytest.mark.parametrize("encoded", [b"x", zlib.compress(b"x"), gzip.compress(b"x") + b"\0"])
def test_what_is_no_gzip_is_bad_input(encoded: bytes) -> None:
    with pytest.raises(BadInput):
        inflated(encoded + b"more", 0)


@pytest.mark.parametrize("named", ["", "identity", "Identity, ", "identity, identity"])
def test_without_a_coding_all_passes(named: str) -> None:
    decoding = codings.decoding(Headers({"Content-Encoding": named}))
    assert list(decoding.decode(b"content")) == [b"content"]
    decoding.finish()


def test_a_coding_may_stand_in_a_list_or_a_second_field() -> None:
    for fields in ([b"identity, gzip"], [b"identity", b"GZIP"]):
        headers = Headers(raw=[(b"content-encoding", field) for field in fields])
        pieces = codings.decoding(headers).decode(gzip.compress(b"content"))
        assert b"".join(pieces) == b"content"


@pytest.mark.parametrize("fields", [[b"br"], [b"gzip, br"], [b"gzip", b"gzip"], [b"gzip;q=1"]])
def test_any_other_coding_is_refused(fields: list[bytes]) -> None:
    with pytest.raises(UnsupportedCoding):
        codings.decoding(Headers(raw=[(b"content-encoding", field) for field in fields]))
