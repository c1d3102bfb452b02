"""Multipart forms (RFC 7578): the one file in a field of a given name, everything else passed over."""

import logging
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from runtime.errors import BadInput

_MAX_PARTS: Final = 64

# It warns of forms that it refuses, with bytes that the caller sent.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class FileField:
    """Takes a form in pieces, and keeps the content of the field `name` that has a file name."""

    def __init__(self, name: str, boundary: bytes | None) -> None:
        if not boundary:
            raise BadInput(
                "the multipart form cannot be read: Missing boundary in its Content-Type"
            )
        self._name = name
        self._parts = 0
        self._files = 0
        self._content: list[bytes] = []
        self._complete = False
        self._wanted = False
        self._header = self._value = self._disposition = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_to_header,
                    "on_header_value": self._add_to_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise BadInput(f"the multipart form cannot be read: {error}") from None

    def write(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise BadInput(f"the multipart form cannot be read: {error}") from None

    def finish(self) -> bytes:
        """The file's content; raises BadInput unless the form is whole and has exactly one such file."""
        if not self._complete:
            raise BadInput("the multipart form cannot be read: it ends before its last boundary")
        if self._files != 1:
            found = "no file" if self._files == 0 else f"{self._files} files"
            raise BadInput(
                f"the multipart form has {found} in a field named {self._name!r}, expected one"
            )
        return b"".join(self._content)

    # What the parser calls

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise BadInput(f"the multipart form has more than {_MAX_PARTS} parts")
        self._wanted = False
        self._header = self._value = self._disposition = b""

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        kind, parameters = parse_options_header(self._disposition.decode("latin-1"))
        if kind != b"form-data" or b"name" not in parameters:
            raise BadInput(
                "a part of the multipart form has no Content-Disposition: form-data with a name"
            )
        named = parameters[b"name"] == self._name.encode()
        self._wanted = named and b"filename" in parameters
        self._files += self._wanted

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._wanted:
            self._content.append(data[start:end])

    def _end(self) -> None:
        self._complete = True
