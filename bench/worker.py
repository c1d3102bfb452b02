"""A measured process and the socket to it: a handler, or a stand-in that answers the same frames."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from handler import wire
from models.errors import ModelError

_END_S = 10.0


def starters(count: int) -> ThreadPoolExecutor:
    """Threads on which several workers start at once; to be left after them.

    A handler dies with the thread that started it (PR_SET_PDEATHSIG, prctl(2)), which must stay.
    """
    return ThreadPoolExecutor(count, thread_name_prefix="start workers")


class WorkerFailed(ModelError):
    """The process answered with an error, or ended."""


class Worker:
    """Starts `python -m MODULE --socket-fd N ...`, waits until it is ready, and exchanges frames.

    A context manager; leaving it ends the process.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, "--socket-fd", str(descriptor), *arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
            )
        self._connection = ours
        try:
            self.ready = self._receive()[0]
        except BaseException:
            self.close()
            raise

    @classmethod
    def handler(cls, weights: Path, threads: int, memory_limit: int = 0) -> Self:
        """A handler process on a store."""
        return cls(
            "handler.process",
            [
                *("--weights", str(weights)),
                *("--threads", str(threads)),
                *("--memory-limit", str(memory_limit)),
            ],
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def infer(
        self,
        model: str,
        strategy: str,
        described: dict[str, Any],
        body: bytes | bytearray | memoryview,
        outputs: Sequence[str] = ("logits",),
    ) -> tuple[wire.Header, bytearray]:
        """One request, answered. Raises WorkerFailed."""
        header: wire.Header = {
            "type": "infer",
            "id": "bench",
            "model": model,
            "version": None,
            "strategy": strategy,
            "input": described,
            "outputs": list(outputs),
            "top": 5,
        }
        return self.exchange(header, body)

    def exchange(
        self, header: wire.Header, body: bytes | bytearray | memoryview = b""
    ) -> tuple[wire.Header, bytearray]:
        """Sends a frame and returns the answer. Raises WorkerFailed."""
        wire.send(self._connection, header, body)
        return self._receive()

    def _receive(self) -> tuple[wire.Header, bytearray]:
        frame = wire.receive(self._connection)
        if frame is None:
            code = self._process.wait()
            raise WorkerFailed(f"{self._process.args!r} ended with code {code}")
        if frame[0].get("type") == "error":
            raise WorkerFailed(frame[0]["message"])
        return frame
