"""Keeps threads other than the compute unit's out of OpenMP, and the compute unit's team as it is.

A second thread with an OpenMP team makes libgomp stop spinning: a resident ResNet-50 then takes 80
instead of 52 ms for as long as the process lives.
"""

import ctypes
import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

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
    if runtime := _loaded("libgomp", "libomp", "libiomp"):
        runtime.omp_set_num_threads(1)
    # MKL has a count of its own, and a team from it: `trunc_normal_`, with which transformers begin, is its.
    if set_mkl_threads := getattr(_loaded("libtorch_cpu"), "MKL_Set_Num_Threads_Local", None):
        set_mkl_threads(1)


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
