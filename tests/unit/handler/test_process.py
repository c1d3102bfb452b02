"""The handler process's loop, without a process: what of a frame it keeps, and what it refuses."""

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any, Final, cast

import pytest

from handler import wire
from handler.handle import Answer, RequestHandler
from handler.process import HandlerProcess

DEADLINE_S: Final = 20


class Body(bytearray):
    """One that can be referred to weakly."""


class Echo:
    """Answers with the body's length."""

    @contextmanager
    def handling(self, header: wire.Header, body: bytearray, *_: object) -> Iterator[Answer]:
        yield {"id": header["id"], "bytes": len(body)}, b""

    def rest(self) -> None:
        """Nothing was left free."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The proxy's end and the handler's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(DEADLINE_S)
        yield ours, theirs


@pytest.fixture
def loop(ends: tuple[socket.socket, socket.socket]) -> Iterator[HandlerProcess]:
    loop = HandlerProcess(ends[1], cast("RequestHandler", Echo()), 1)
    yield loop
    loop._compute.close()


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_a_requests_body_is_let_go_before_the_next_is_there(
    loop: HandlerProcess,
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[weakref.ref[Body]] = []

    def frames() -> Iterator[tuple[dict[str, Any], bytearray] | None]:
        body = Body(b"image")
        known.append(weakref.ref(body))
        frame = {"type": "infer", "id": "a"}, body
        del body
        yield frame
        del frame
        deadline = time.monotonic() + DEADLINE_S
        while known[0]() is not None:
            assert time.monotonic() < deadline, "the body is kept while the next frame is awaited"
            time.sleep(0.001)
        yield None

    received = frames()
    monkeypatch.setattr(wire, "receive", lambda _: next(received))
    loop.serve()
    monkeypatch.undo()

    told = [wire.receive(ends[0]) for _ in range(2)]
    assert told[0] is not None
    assert told[0][0]["type"] == "ready"
    assert told[1] == ({"id": "a", "bytes": len(b"image")}, bytearray())


def test_a_frame_of_another_type_is_refused(
    loop: HandlerProcess, ends: tuple[socket.socket, socket.socket]
) -> None:
    wire.send(ends[0], {"type": "sing"})
    with pytest.raises(wire.ProtocolError, match="'sing', expected 'infer' or 'cancel'"):
        loop.serve()


def test_the_compute_units_threads_come_after_all_others(loop: HandlerProcess) -> None:
    """Its OpenMP team, which exists from its start on, has its priority."""
    priorities: Queue[int] = Queue()

    def measure() -> None:
        priorities.put(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    loop._compute.submit(measure)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert priorities.get(timeout=DEADLINE_S) == min(own + 10, 19)
