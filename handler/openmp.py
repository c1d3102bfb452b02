"""Keeps threads other than the compute unit's out of OpenMP, and the compute unit's team as it is and where it is best.

A second thread with an OpenMP team makes libgomp stop spinning: a resident ResNet-50 then takes 80
instead of 52 ms for as long as the process lives.
"""

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Collection, Iterator
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
    """Which processor each of the calling thread's team is on: where it is two threads that have two processors.

    The kernel wakes a thread where it last was if no processor is idle, and as a forward starts, the units still
    work. Both on one processor spin in turns, 4 ms each, until that is balanced: one request of ResNet-50 in seven
    took 50 instead of 33 ms. Beside another process that computes, each took 2,200 ms, and takes 120 if placed.

    Larger teams are the kernel's to place: libgomp ends the threads that a smaller team does without, and
    starts them anew amid a forward.
    """

    def __init__(self) -> None:
        self._other: int | None = None
        """The team's thread that is not the calling one, by the kernel's number."""
        self._processors: tuple[int, ...] = ()

    def start_team(self) -> None:
        """The team comes to be, and is placed if that can be done."""
        run_on_team = getattr(_loaded(*_RUNTIMES), "GOMP_parallel", None)
        if torch.get_num_threads() != _PAIR or run_on_team is None:
            return
        team: set[int] = set()
        run_on_team(_OnEachThread(lambda _: team.add(threading.get_native_id())), None, _PAIR, 0)
        for other in team - {threading.get_native_id()}:
            self._other = other
            self._place(other, _processors())

    def _place(self, other: int, processors: tuple[int, ...]) -> None:
        self._processors = processors
        _set_affinity(other, processors[1:] if len(processors) == _PAIR else processors)
        _set_affinity(0, processors)

    @contextmanager
    def apart(self, *, held: bool) -> Iterator[None]:
        """Begins with the calling thread on a processor of its own, and `held` keeps it there.

        What starts on a thread that is held, threads or processes, has that processor alone, and libraries
        count it: so a thread that runs the user's code is not to be held.
        """
        if self._other is None:
            yield
            return
        processors = _processors()
        if processors != self._processors:
            self._place(self._other, processors)
        if len(processors) != _PAIR:
            yield
            return
        _set_affinity(0, processors[:1])
        if not held:
            _set_affinity(0, processors)
            yield
            return
        try:
            yield
        finally:
            _set_affinity(0, _processors())


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.placement = Placement()


of_thread: Final = _OfThread()


def _processors() -> tuple[int, ...]:
    """Those of the main thread, which are the process's, as they may be changed while it runs."""
    return tuple(sorted(os.sched_getaffinity(os.getpid())))


def _set_affinity(thread: int, processors: Collection[int]) -> None:
    """0 is the calling thread. Does nothing where it has ended, or may not use these any more."""
    with suppress(OSError):
        os.sched_setaffinity(thread, processors)


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
        if (left := threading.active_count() - running) > 0:
            log.warning(
                "%s left Python threads running (%d), which may slow the model down", what, left
            )
