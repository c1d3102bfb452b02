"""Frames over a socket, blocking on the handler's side and in the event loop on the proxy's."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler import wire

Pair = tuple[socket.socket, socket.socket]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
headers = st.dictionaries(st.text(), values, max_size=5)


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@given(header=headers, body=st.binary(max_size=2000))
def test_a_frame_arrives_as_it_was_sent(header: dict[str, Any], body: bytes) -> None:
    one, other = socket.socketpair()
    with one, other:
        wire.send(one, header, body)
        wire.send(one, {"next": True})
        assert wire.receive(other) == (header, bytearray(body))
        assert wire.receive(other) == ({"next": True}, bytearray())
        one.close()
        assert wire.receive(other) is None


def test_a_body_larger_than_the_sockets_buffer(pair: Pair) -> None:
    body = bytes(range(256)) * (1 << 14)
    sender = threading.Thread(target=wire.send, args=(pair[0], {"a": 1}, memoryview(body)))
    sender.start()
    assert wire.receive(pair[1]) == ({"a": 1}, bytearray(body))
    sender.join(20)


class _Read(socket.socket):
    """A socket whose other side closes as soon as it has the first message."""

    other: socket.socket

    def sendmsg(self, *arguments: Any) -> int:
        sent = super().sendmsg(*arguments)
        self.other.close()
        return sent


def test_the_other_side_may_close_once_it_has_a_frame(pair: Pair) -> None:
    with _Read(fileno=pair[0].detach()) as one:
        one.other = pair[1]
        wire.send(one, {"a": 1}, b"body")


def test_proxy_and_handler_understand_each_other(pair: Pair) -> None:
    handler, proxy = pair

    def answer() -> None:
        frame = wire.receive(handler)
        assert frame is not None
        wire.send(handler, {"echo": frame[0]}, frame[1])
        handler.close()

    async def ask() -> tuple[Any, Any]:
        reader, writer = await asyncio.open_connection(sock=proxy)
        await wire.write(writer, {"id": "ä"}, b"x" * 300_000)
        told = await wire.read(reader), await wire.read(reader)
        writer.close()
        return told

    answering = threading.Thread(target=answer)
    answering.start()
    told, end = asyncio.run(ask())
    answering.join(20)
    assert told == ({"echo": {"id": "ä"}}, b"x" * 300_000)
    assert end is None


def frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">IQ", len(header), len(body)) + header + body


BROKEN = [
    (frame(b"{}")[:5], "closed within a frame"),
    (frame(b'{"a": 1}')[:-1], "closed within a frame"),
    (frame(b"{}", b"body")[:-1], "closed within a frame"),
    (frame(b"{}", b"body")[:-4], "closed within a frame"),
    (frame(b"nonsense"), "is not JSON"),
    (frame(b"\xff\xfe\xfd"), "is not JSON"),
    (frame(b"[" * 10_000), "is not JSON"),
    (frame(b"[1]"), "is list, expected an object"),
    (struct.pack(">IQ", 2, wire.MAX_BODY_BYTES + 1), "over the limit"),
    (struct.pack(">IQ", wire.MAX_HEADER_BYTES + 1, 0), "over the limit"),
]


@pytest.mark.parametrize(("sent", "told"), BROKEN)
def test_what_is_no_frame_is_told_on_a_blocking_socket(pair: Pair, sent: bytes, told: str) -> None:
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(wire.ProtocolError, match=told):
        wire.receive(pair[1])


@pytest.mark.parametrize(("sent", "told"), BROKEN)
def test_what_is_no_frame_is_told_in_the_event_loop(sent: bytes, told: str) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        await wire.read(reader)

    with pytest.raises(wire.ProtocolError, match=told):
        asyncio.run(read())


def test_the_form_is_the_documented_one(pair: Pair) -> None:
    wire.send(pair[0], {"type": "cancel"}, b"xyz")
    pair[0].close()
    sent = pair[1].recv(1000)
    header_bytes, body_bytes = struct.unpack(">IQ", sent[:12])
    assert json.loads(sent[12 : 12 + header_bytes]) == {"type": "cancel"}
    assert sent[12 + header_bytes :] == b"xyz"
    assert body_bytes == 3
