"""A handler that does as it is told: it speaks the frames of `handler/wire.py` and misbehaves on command.

The command is the request's body: a word, and what belongs to it. Any other body is answered properly.
How it starts is told by --start.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from handler import wire

LAYERS = ("conv1", "relu", "fc")
LOGITS = b"\0\0\x80\x3f\0\0\xc0\x7f\0\0\0\xbf"  # 1.0, NaN, -0.5
MILLISECOND = 1_000_000


def hang() -> NoReturn:
    while True:
        signal.pause()


def close(connection: socket.socket) -> NoReturn:
    connection.close()
    hang()


def say(connection: socket.socket, what: bytes) -> NoReturn:
    connection.sendall(what)
    hang()


def say_half_a_frame(connection: socket.socket) -> NoReturn:
    connection.sendall(b"\0\0\0\x05")
    os._exit(0)


def say_ready(connection: socket.socket) -> None:
    ready = {"type": "ready", "pid": os.getpid(), "threads": 1, "torch": "none"}
    wire.send(connection, ready)


def hog() -> NoReturn:
    held = []
    while True:
        held.append(bytearray(b"x" * (8 << 20)))


ENDS: dict[str, Callable[[socket.socket, str], None]] = {
    "exit": lambda _, code: os._exit(int(code)),
    "die": lambda _, name: os.kill(os.getpid(), signal.Signals[name]),
    "hang": lambda *_: hang(),
    "hog": lambda *_: hog(),
    "close": lambda connection, _: close(connection),
    "garbage": lambda connection, _: say(connection, b"HTTP/1.1 200 OK\r\n\r\n"),
    "half": lambda connection, _: say_half_a_frame(connection),
    "ready": lambda connection, _: say_ready(connection),
}


class Stub:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def serve(self) -> None:
        while (frame := wire.receive(self._connection)) is not None:
            header, body = frame
            if header["type"] == "infer":
                self._obey(header, bytes(body))

    def _obey(self, header: wire.Header, body: bytes) -> None:
        word, _, rest = body[:256].decode("latin-1").partition(" ")
        if word in ENDS:
            ENDS[word](self._connection, rest)
        elif word == "hold":
            Path(rest).read_bytes()  # a FIFO: until the test has opened and closed it
            self._answer(header)
        elif word == "wait":
            self._wait_for_cancel(header)
        elif word == "error":
            status, _, message = rest.partition(" ")
            self._refuse(header, int(status), message)
        else:
            self._answer(header, word)

    def _wait_for_cancel(self, header: wire.Header) -> None:
        frame = wire.receive(self._connection)
        if frame is None:
            os._exit(0)
        assert frame[0] == {"type": "cancel", "id": header["id"]}, frame
        self._refuse(header, 499, "the caller has gone")

    def _refuse(self, header: wire.Header, status: int, message: str) -> None:
        refusal = {"type": "error", "id": header["id"], "status": status, "message": message}
        wire.send(self._connection, refusal)

    def _answer(self, header: wire.Header, flaw: str = "") -> None:
        """Proper, or with one flaw: of another request, given twice, of a wrong size, of a wrong layer."""
        now = time.monotonic_ns()
        tensors = [name for name in header["outputs"] if name != "labels"]
        result = {
            "type": "result",
            "id": "another's" if flaw == "wrong-id" else header["id"],
            "model": header["model"],
            "version": header["version"] or "0123456789ab",
            "outputs": [
                {"name": name, "datatype": "FP32", "shape": [1, 3], "bytes": len(LOGITS)}
                for name in tensors
            ],
            "labels": [self._labels(header)] if "labels" in header["outputs"] else None,
            "timeline": timeline(header, now, odd_layer=flaw == "wrong-layer"),
        }
        body = LOGITS * len(tensors) + b"\0" * (flaw == "wrong-size")
        for _ in range(2 if flaw == "twice" else 1):
            wire.send(self._connection, result, body)

    def _labels(self, header: wire.Header) -> list[dict[str, Any]]:
        """Who answered, so that a test can tell."""
        labels = [
            {"label": str(os.getpid()), "index": 0, "probability": 0.75},
            {"label": header["strategy"], "index": 1, "probability": float("nan")},
            {"label": str(header["top"]), "index": 2, "probability": 0.25},
        ]
        return labels[: header["top"]]


def timeline(header: wire.Header, now: int, *, odd_layer: bool) -> dict[str, Any]:
    """Three layers, two with weights; the retrievals overlap, and the second was suspended."""
    start = header["received_ns"]
    rows: list[list[Any]] = [
        [0, "construct", start + 0, start + 10],
        [0, "retrieve", start + 0, start + 40],
        [2, "retrieve", start + 20, start + 90],
        [1, "construct", start + 10, start + 20],
        [2, "construct", start + 20, start + 30],
        [0, "apply", start + 40, start + 50],
        [0, "execute", start + 50, start + 60],
        [1, "execute", start + 60, start + 70],
        [2, "apply", start + 90, start + 95],
        [2, "execute", start + 95, start + 100],
    ]
    units = {"layer": 1.5, "weight": 2.0, "compute": 0.25}
    return {
        "strategy": header["strategy"],
        "model": header["model"],
        "version": header["version"] or "0123456789ab",
        "layers": LAYERS,
        "arrival_ns": start,
        "decoded_ns": [start, start + 5],
        "spans": [*rows, [7, "construct", start, start]] if odd_layer else rows,
        "suspensions": [[2, start + 30, start + 40]],
        "placeholder_bytes": 42,
        "figures": {
            "layers": len(LAYERS),
            "input_ms": 0.005,
            "construct_ms": 0.03,
            "initialize_ms": 0.0,
            "retrieve_ms": 0.08,
            "apply_ms": 0.015,
            "execute_ms": 0.025,
            "pipeline_ms": (now - start) / MILLISECOND,
            "work_ms": units,
            "wait_ms": units,
            "idle_ms": units,
            "utilization": 0.875,
            "occupancy": 1.0,
            "placeholder_bytes": 42,
            "placeholder_usage_ms": 61.25,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--starts", type=Path, help="a file that gets a line for every start")
    parser.add_argument("--start", choices=["ready", "exits", "mute", "garbage"], default="ready")
    arguments = parser.parse_args()
    if arguments.starts is not None:
        with arguments.starts.open("a") as starts:
            starts.write(f"{os.getpid()}\n")
    connection = socket.socket(fileno=arguments.socket_fd)
    if arguments.start == "exits":
        sys.exit(7)
    if arguments.start == "mute":
        hang()
    if arguments.start == "garbage":
        say(connection, b"\xff" * 64)
    say_ready(connection)
    Stub(connection).serve()


if __name__ == "__main__":
    main()
