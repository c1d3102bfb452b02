"""Keeps threads other than the compute unit's out of OpenMP, and the compute unit's team as it is and where it is best.

A second thread with an OpenMP team makes libgomp stop spinning: a resident ResNet-50 then takes 80
instead of 52 ms for as long as the process lives.
"""

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

_RUNTIMES: Final = ("libgomp", "libomp", "libiomp")
_PAIR: Final = 2
_OnEachThread: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

log = logging.getLogger(__name__)


@functools.cache
def _loaded(*names: str) -> ctypes.CDLL | None:
    """The first library in this process whose file's name begins with one of these; None without any."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path("/" + line.partition("/")[2])
        if path.name.startswith(names):
            return ctypes.CDLL(str(path))
    return None


def stay_single_threaded() -> None:
    """The calling thread's operators run on itself alone, from now on; others are not touched."""
    torch.get_num_threads()  # torch sets a thread's count at its first use there: let that pass first
    if runtime := _loaded(*_RUNTIMES):
        runtime.omp_set_num_threads(1)
    # MKL has a count of its own, and a team from it: `trunc_normal_`, with which transformers begin, is its.
    if set_mkl_threads := getattr(_loaded("libtorch_cpu"), "MKL_Set_Num_Threads_Local", None):
        set_mkl_threads(1)


class Placement:
    """Which processor each thread of the calling thread's team is on: for a team of two that has two processors.

    The kernel wakes a thread where it last was if no processor is idle, and as a forward starts, the units still
    work. Both on one processor spin in turns, 4 ms each, until that is balanced: one request of ResNet-50 in seven
    took 50 instead of 33 ms. Beside another process that computes, each took 2,500 ms, and takes 140 if placed.

    Larger teams are the kernel's to place: libgomp ends the threads that a smaller team does without, and
    starts them anew amid a forward.
    """

    def __init__(self) -> None:
        self._processors: tuple[int, ...] = ()

    def start_team(self) -> None:
        """The team comes to be, and is placed if that can be done."""
        processors = self._processors or tuple(sorted(os.sched_getaffinity(0)))
        self._processors = ()
        run_on_team = getattr(_loaded(*_RUNTIMES), "GOMP_parallel", None)
        if not torch.get_num_threads() == len(processors) == _PAIR or run_on_team is None:
            return
        own = threading.get_native_id()

        def place(_: object) -> None:
            if threading.get_native_id() != own and _set_affinity(0, processors[1:]):
                self._processors = processors

        run_on_team(_OnEachThread(place), None, _PAIR, 0)

    def restart_team(self) -> None:
        """After the number of threads was changed: else a new thread would be where its starter is."""
        if self._processors:
            self.start_team()

    @contextmanager
    def kept(self, *, threads_start: bool) -> Iterator[None]:
        """Within it, the calling thread stays on the processor that is its own.

        threads_start: threads that start within it, on that processor alone as the one that starts them, are let
        go at its end.
        """
        processors = self._processors
        if not processors or not _set_affinity(0, processors[:1]):
            self._processors = ()
            yield
            return
        try:
            yield
        finally:
            _set_affinity(0, processors)
            for thread in Path("/proc/self/task").iterdir() if threads_start else ():
                _let_go(int(thread.name), processors)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.placement = Placement()


of_thread: Final = _OfThread()


def _set_affinity(thread: int, processors: Collection[int]) -> bool:
    """Whether it could be: the thread may have ended, the container have other processors now."""
    try:
        os.sched_setaffinity(thread, processors)
    except OSError:
        return False
    return True


def _let_go(thread: int, processors: Sequence[int]) -> None:
    with suppress(ProcessLookupError):
        if os.sched_getaffinity(thread) == {processors[0]}:
            _set_affinity(thread, processors)


@contextmanager
def watched(what: str) -> Iterator[None]:
    """For code of the user's on this thread: what it changes of torch's thread count is put back.

    That is told in the log, and so are Python threads that it leaves running; of others there is no telling whose
    they are, as the first operator to run starts torch's own.
    """
    count, running = torch.get_num_threads(), threading.active_count()
    try:
        yield
    finally:
        if torch.get_num_threads() != count:
            log.warning("%s changed torch's number of threads", what)
            torch.set_num_threads(count)
            of_thread.placement.restart_team()
        if (left := threading.active_count() - running) > 0:
            log.warning(
                "%s left Python threads running (%d), which may slow the model down", what, left
            )
