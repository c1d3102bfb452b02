"""A handler with something changed that the product has no switch for: the scheduler off, or a slower disk."""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from unittest import mock

from torch import Tensor

from handler import process, steps
from handler.errors import ModelFault
from handler.retrieval import CHUNK_BYTES, WeightFile
from handler.scheduler import Decision, PriorityAwareScheduler


class Bucket:
    """One disk of a fixed speed: chunks, whoever asks for them, are had one after another."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Returns when the disk would have had so many bytes."""
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + size / self._bytes_per_s
            ready = self._free_at
        time.sleep(max(0.0, ready - time.monotonic()))


class ThrottledFile:
    """A weight file behind a bucket; in the place of `handler.steps.NamedFile`."""

    is_mapped = False  # even what lies in the page cache has to be waited for

    def __init__(self, bucket: Bucket, inner: WeightFile) -> None:
        self._bucket = bucket
        self._inner = inner
        self._left = inner.bytes

    @property
    def bytes(self) -> int:
        return self._inner.bytes

    def step(self) -> bool:
        chunk = min(CHUNK_BYTES, self._left)
        self._left -= chunk
        self._bucket.take(chunk)
        return self._inner.step()

    def take(self) -> Mapping[str, Tensor]:
        return self._inner.take()


def never_suspend(stack: ExitStack) -> None:
    """Turns the priority-aware scheduler off: retrievals run as they were issued."""

    def undecided(_: PriorityAwareScheduler) -> Decision:
        return Decision()

    stack.enter_context(mock.patch.object(PriorityAwareScheduler, "review", undecided))


def throttle(stack: ExitStack, bytes_per_s: int) -> None:
    """Our own throttled retrieval source: every chunk of every file passes one bucket."""
    bucket = Bucket(bytes_per_s)
    named = steps.NamedFile

    def throttled(file: WeightFile, fault: Callable[[str], ModelFault]) -> ThrottledFile:
        return ThrottledFile(bucket, named(file, fault))

    stack.enter_context(mock.patch.object(steps, "NamedFile", throttled))


def main(arguments: Sequence[str]) -> None:
    """arguments: ours and `--` and the handler's; `bench.paper.entry` has joined the group before."""
    position = arguments.index("--")
    parser = argparse.ArgumentParser(prog="python -m bench.paper.entry")
    parser.add_argument("--socket-fd", help="stands first as `bench.worker` has it; the handler's")
    parser.add_argument("--scheduler", choices=("on", "off"), default="on")
    parser.add_argument("--bytes-per-s", type=int, default=0, help="0: as fast as can be")
    chosen = parser.parse_args(arguments[:position])
    sys.argv[1:] = ["--socket-fd", chosen.socket_fd, *arguments[position + 1 :]]
    with ExitStack() as stack:
        if chosen.scheduler == "off":
            never_suspend(stack)
        if chosen.bytes_per_s:
            throttle(stack, chosen.bytes_per_s)
        process.main()
