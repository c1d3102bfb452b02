"""What bytes look like that are no image we take: a media type, for the sentence that refuses them."""

from codecs import getincrementaldecoder
from typing import Final

import filetype
from pydantic_core import from_json

_HEAD_BYTES: Final = 8192
_HTML: Final = ("<!doctype html", "<html", "<head", "<body", "<title")


def looks_like(data: bytearray) -> str | None:
    """A media type; None for bytes of an unknown kind."""
    head = bytes(data[:_HEAD_BYTES])
    kind: str | None = filetype.guess_mime(head)
    return kind or _text(head)


def _text(head: bytes) -> str | None:
    try:
        # Not final: a character may be cut off at the end.
        text = getincrementaldecoder("utf-8-sig")().decode(head).lstrip()
    except UnicodeDecodeError:
        return None
    if not text or not all(sign.isprintable() or sign.isspace() for sign in text):
        return None
    begin = text.lower()
    if begin.startswith(_HTML):
        return "text/html"
    if begin.startswith(("<?xml", "<svg")):
        return "image/svg+xml" if "<svg" in begin else "application/xml"
    return "application/json" if begin.startswith(("{", "[")) and _is_json(head) else "text/plain"


def _is_json(head: bytes) -> bool:
    try:
        from_json(head, allow_partial=True)
    except ValueError:
        return False
    return True
