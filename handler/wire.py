"""The frames between proxy and handler: a JSON header and raw bytes, over one stream socket.

A frame is `u32 header length | u64 body length | header (UTF-8 JSON object) | body`, big-endian.
The proxy sends `infer` and `cancel`, the handler `ready`, `result` and `error`.
"""

import asyncio
import json
import socket
import struct
from typing import Any, Final

_PREFIX: Final = struct.Struct(">IQ")
MAX_HEADER_BYTES: Final = 64 << 20
MAX_BODY_BYTES: Final = 4 << 30

Header = dict[str, Any]
Body = bytes | bytearray | memoryview
"""Of single bytes, whatever it views."""


class ProtocolError(Exception):
    """The other side sent what is no frame."""


def _encode(header: Header, body_bytes: int) -> bytes:
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return _PREFIX.pack(len(encoded), body_bytes) + encoded


def _lengths(prefix: bytes) -> tuple[int, int]:
    header_bytes, body_bytes = _PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"a frame of {header_bytes} + {body_bytes} bytes is over the limit")
    return header_bytes, body_bytes


def _decode(encoded: bytes | bytearray) -> Header:
    try:
        header = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"a frame's header is {type(header).__name__}, expected an object")
    return header


def send(connection: socket.socket, header: Header, body: Body = b"") -> None:
    """Sends one frame on a blocking socket; raises OSError when the other side has gone."""
    view = memoryview(body).cast("B")
    encoded = _encode(header, view.nbytes)
    # At once, so that the other side wakes once; and if that was all, not a byte later: it may have gone.
    sent = connection.sendmsg([encoded, view])
    for rest in (encoded[sent:], view[max(0, sent - len(encoded)) :]):
        if rest:
            connection.sendall(rest)


def receive(connection: socket.socket) -> tuple[Header, bytearray] | None:
    """Receives one frame from a blocking socket; None when the other side closed between frames."""
    prefix = _receive_exactly(connection, _PREFIX.size)
    if not prefix:
        return None
    header_bytes, body_bytes = _lengths(bytes(prefix))
    header = _decode(_receive_exactly(connection, header_bytes))
    body = _receive_exactly(connection, body_bytes)
    if len(body) < body_bytes:
        raise ProtocolError("the connection closed within a frame")
    return header, body


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """`size` bytes; none at all if the stream ends before the first."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    received = 0
    while received < size:
        count = connection.recv_into(view[received:])
        if count == 0:
            if received == 0:
                return bytearray()
            raise ProtocolError("the connection closed within a frame")
        received += count
    return buffer


async def write(writer: asyncio.StreamWriter, header: Header, body: Body = b"") -> None:
    """Sends one frame from the event loop."""
    writer.write(_encode(header, len(body)))
    if body:
        writer.write(body)
    await writer.drain()


async def read(reader: asyncio.StreamReader) -> tuple[Header, bytes] | None:
    """Receives one frame in the event loop; None when the other side closed between frames."""
    try:
        prefix = await reader.readexactly(_PREFIX.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ProtocolError("the connection closed within a frame") from error
        return None
    header_bytes, body_bytes = _lengths(prefix)
    try:
        header = _decode(await reader.readexactly(header_bytes))
        body = await reader.readexactly(body_bytes) if body_bytes else b""
    except asyncio.IncompleteReadError as error:
        raise ProtocolError("the connection closed within a frame") from error
    return header, body
