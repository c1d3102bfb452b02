"""The handler process: takes requests from the proxy's socket and answers them, one at a time."""

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import torch

from handler import denormals, images, loglines, memory, openmp, wire
from handler.cancellation import Cancellation
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.timeline import now_ns
from handler.unit import UnitThread
from models.store import Store

_PR_SET_PDEATHSIG: Final = 1
_OOM_SCORE: Final = 500
_MOST_OOM_SCORE: Final = 1000
_RETRIEVALS: Final = 2
_SWITCH_S: Final = 0.001
"""How long a unit may keep the interpreter from another: by default 5 ms, which the compute unit would
wait for its first layer while all others are constructed (ResNet-152: 1.06 of resident, now 1.04)."""
_COMPUTE_NICE: Final = 10
"""Of the compute unit's threads, beside all others: between operators they spin, and hold a processor on which the
proxy or a unit has a few microseconds' work to do. The kernel takes what is above 19 for 19."""
_SMALL_MEMORY: Final = 4 << 30
_AHEAD_SHARE: Final = 4
"""With less than 4 GiB, at most a quarter of it may be retrieved ahead of execution."""

log = logging.getLogger(__name__)


class HandlerProcess:
    """Reads frames on the main thread, so that a cancellation is heard while the compute unit works."""

    def __init__(self, connection: socket.socket, handler: RequestHandler, threads: int) -> None:
        self._connection = connection
        self._handler = handler
        self._threads = threads
        self._compute = UnitThread("compute", on_start=_start_openmp_team, on_rest=handler.rest)
        self._id: str | None = None
        self._cancellation = Cancellation()

    def serve(self) -> None:
        """Until the proxy closes the socket."""
        wire.send(
            self._connection,
            {
                "type": "ready",
                "pid": os.getpid(),
                "threads": self._threads,
                "torch": str(torch.__version__),
            },
        )
        while (frame := wire.receive(self._connection)) is not None:
            self._take(*frame)
            del frame  # else its body would stay until the next one is there

    def _take(self, header: wire.Header, body: bytearray) -> None:
        match header.get("type"):
            case "infer":
                self._begin(header, body)
            case "cancel":
                self._cancel(header)
            case kind:
                raise wire.ProtocolError(f"a frame of type {kind!r}, expected 'infer' or 'cancel'")

    def _begin(self, header: wire.Header, body: bytearray) -> None:
        arrival_ns = now_ns()
        cancellation = Cancellation()
        self._id = header.get("id")
        self._cancellation = cancellation
        self._compute.submit(lambda: self._handle(header, body, arrival_ns, cancellation))

    def _cancel(self, header: wire.Header) -> None:
        if header.get("id") == self._id:
            self._cancellation.cancel()

    def _handle(
        self, header: wire.Header, body: bytearray, arrival_ns: int, cancellation: Cancellation
    ) -> None:
        try:
            with self._handler.handling(header, body, arrival_ns, cancellation) as (
                answer,
                content,
            ):
                wire.send(self._connection, answer, content)
        except BaseException:
            log.exception("the handler ends")
            os._exit(1)  # the proxy sees the socket close, and starts another


def _start_openmp_team() -> None:
    """The compute unit's team comes to be before the first request: its start costs milliseconds."""
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _COMPUTE_NICE)
    with denormals.taken_as_zero():
        torch.ones(1 << 20).sum()
    openmp.of_thread.placement.start_team()


def _set_threads(count: int) -> None:
    """Of the compute unit; this thread, the main one, computes on itself alone."""
    torch.set_num_threads(count)
    openmp.stay_single_threaded()


def _die_with_parent() -> None:
    """The kernel kills this process when the proxy has gone, however it went."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _go_before_the_proxy() -> None:
    """Short of memory, the kernel kills a handler, which is replaced, rather than the proxy."""
    path = Path("/proc/self/oom_score_adj")
    try:
        path.write_text(str(min(_MOST_OOM_SCORE, int(path.read_text()) + _OOM_SCORE)))
    except OSError as error:
        log.warning("oom_score_adj cannot be raised: %s", error)


def _ahead_bytes(memory_limit: int) -> int | None:
    return memory_limit // _AHEAD_SHARE if 0 < memory_limit < _SMALL_MEMORY else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m handler.process")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--memory-limit", type=int, default=0, help="bytes; 0: none")
    parser.add_argument("--max-pixels", type=int, default=images.MAX_PIXELS, help="of an image")
    parser.add_argument("--processing", help="of models that were prepared without one")
    parser.add_argument("--default-model", help="to be ready for; by default the only one")
    arguments = parser.parse_args()
    loglines.configure("INFO", sys.stdout, process="handler", pid=os.getpid())
    _die_with_parent()
    _go_before_the_proxy()
    images.keep_quiet()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the proxy ends us

    sys.setswitchinterval(_SWITCH_S)
    memory.configure_allocator()
    _set_threads(arguments.threads)
    connection = socket.socket(fileno=arguments.socket_fd)
    pipeline = Pipeline(retrievals=_RETRIEVALS, ahead_bytes=_ahead_bytes(arguments.memory_limit))
    handler = RequestHandler(
        Store(arguments.weights), pipeline, arguments.max_pixels, arguments.processing
    )
    handler.expect(arguments.default_model)
    _set_threads(arguments.threads)  # the user's code may have set others
    # The 340,000 objects that the imports made stay: the collector need not go through them amid a request.
    gc.freeze()
    try:
        HandlerProcess(connection, handler, arguments.threads).serve()
    except (wire.ProtocolError, OSError):
        log.exception("the proxy's socket")
        os._exit(1)
    os._exit(0)  # a request that still runs has no one left to answer


if __name__ == "__main__":
    main()
