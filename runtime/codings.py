"""Content codings of request bodies (RFC 9110, section 8.4.1): none, or gzip."""

import zlib
from collections.abc import Iterator
from typing import Final, Protocol

from starlette.datastructures import Headers

from runtime.errors import BadInput, UnsupportedCoding, brief

_GZIP: Final = 16 + zlib.MAX_WBITS
_SLICE_BYTES: Final = 16 << 10
"""Of input: what follows the end of a member is copied, and a body may be nothing but ends of members."""
_PIECE_BYTES: Final = 256 << 10
"""Of output: inflating one takes less than a millisecond, and other requests have their turn after each."""


class Decoding(Protocol):
    def decode(self, data: bytes) -> Iterator[bytes]:
        """The content in pieces of bounded size, some of them empty; raises BadInput."""

    def finish(self) -> None:
        """Raises BadInput if the content is incomplete."""


def decoding(headers: Headers) -> Decoding:
    """Undoes the codings that the headers name; raises UnsupportedCoding."""
    named = ",".join(headers.getlist("Content-Encoding")).lower().split(",")
    codings = [coding for part in named if (coding := part.strip()) not in {"", "identity"}]
    if not codings:
        return _Identity()
    if codings in (["gzip"], ["x-gzip"]):  # section 8.4.1.3: the same
        return _Gunzip()
    raise UnsupportedCoding(
        f"the body has the Content-Encoding {brief(', '.join(codings))}, expected gzip or none"
    )


class _Identity:
    def decode(self, data: bytes) -> Iterator[bytes]:
        yield data

    def finish(self) -> None:
        """Any content is complete."""


class _Gunzip:
    """Of one member or several (RFC 1952, section 2.2)."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)

    def decode(self, data: bytes) -> Iterator[bytes]:
        try:
            for start in range(0, len(data), _SLICE_BYTES):
                yield from self._inflate(data[start : start + _SLICE_BYTES])
        except zlib.error as error:
            raise BadInput(f"the body is no valid gzip: {error}") from None

    def finish(self) -> None:
        if not self._member.eof:
            raise BadInput("the gzip body is cut short")

    def _inflate(self, rest: bytes) -> Iterator[bytes]:
        more = True
        while rest or more:
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP)
            piece = self._member.decompress(rest, _PIECE_BYTES)
            rest = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            more = len(piece) == _PIECE_BYTES and not self._member.eof
            yield piece
