"""The binary tensor data extension: tensors as bytes behind the JSON object.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
Values are little-endian and row-major; an element of BYTES is its length, four bytes, and then itself.
"""

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from handler.wire import Body
from runtime import answers
from runtime.errors import BadInput, brief
from runtime.protocol import RequestInput

HEADER: Final = "Inference-Header-Content-Length"
MEDIA_TYPE: Final = "application/octet-stream"
SIZE: Final = "binary_data_size"

_LENGTH: Final = struct.Struct("<I")
_DIGITS: Final = re.compile(r"[0-9]{1,19}")


def header_length(header: str, body_bytes: int) -> int:
    """Where the JSON object ends, as the request's header says; 0: there is none, all is one tensor."""
    if not _DIGITS.fullmatch(header) or int(header) > body_bytes:
        raise BadInput(
            f"{HEADER} is {brief(header)}, expected a number up to the body's {body_bytes} bytes"
        )
    return int(header)


def assign(inputs: Sequence[RequestInput], binary: memoryview | None) -> list[memoryview | None]:
    """Each input's part of what follows the JSON object, None for one whose data are in it.

    binary: None where the request has no header that says where the JSON object ends.
    """
    parts: list[memoryview | None] = []
    rest = binary
    for tensor in inputs:
        size = _size(tensor)
        if size is None:
            parts.append(None)
            continue
        if rest is None:
            raise BadInput(
                f"input {brief(tensor.name)} has {SIZE}, expected the header {HEADER} with it"
            )
        if size > len(rest):
            raise BadInput(
                f"{SIZE} of input {brief(tensor.name)} is {size}, "
                f"but {len(rest)} bytes are left of the body"
            )
        parts.append(rest[:size])
        rest = rest[size:]
    if rest:
        raise BadInput(f"{len(rest)} bytes follow those that the inputs' {SIZE} tell of")
    return parts


def _size(tensor: RequestInput) -> int | None:
    if SIZE not in tensor.parameters:
        return None
    size = tensor.parameters[SIZE]
    if type(size) is not int or size < 0:
        raise BadInput(
            f"{SIZE} of input {brief(tensor.name)} is {brief(size)}, expected a number of bytes"
        )
    if tensor.data is not None:
        raise BadInput(f"input {brief(tensor.name)} has both data and {SIZE}, expected one of them")
    return size


def elements(packed: memoryview, count: int) -> list[memoryview]:
    """The elements of a BYTES tensor; raises BadInput unless there are `count`, to the last byte."""
    found: list[memoryview] = []
    rest = packed
    while rest and len(found) < count:
        if len(rest) < _LENGTH.size:
            raise BadInput(
                f"BYTES end with {len(rest)} bytes after element {len(found)}, "
                f"expected the {_LENGTH.size} bytes of a length"
            )
        (length,) = _LENGTH.unpack_from(rest)
        rest = rest[_LENGTH.size :]
        if length > len(rest):
            raise BadInput(
                f"element {len(found) + 1} of BYTES has the length {length}, "
                f"but {len(rest)} bytes are left"
            )
        found.append(rest[:length])
        rest = rest[length:]
    if rest or len(found) < count:
        raise BadInput(
            f"BYTES hold {len(found)} elements and {len(rest)} bytes more, "
            f"expected {count} elements as the shape says"
        )
    return found


def pack(values: Iterable[bytes]) -> bytes:
    """A BYTES tensor of these elements."""
    return b"".join(part for value in values for part in (_LENGTH.pack(len(value)), value))


def content(value: Any, binary: Sequence[Body] = ()) -> tuple[bytes, dict[str, str]]:
    """A body of the value in JSON with the binary data behind it, and the headers that describe it."""
    described = answers.encode(value)
    if not binary:
        return described, {"Content-Type": answers.MEDIA_TYPE}
    headers = {"Content-Type": MEDIA_TYPE, HEADER: str(len(described))}
    return b"".join((described, *binary)), headers
