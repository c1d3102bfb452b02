"""Keeps threads other than the compute unit's out of OpenMP.

A second thread with an OpenMP team makes libgomp stop spinning: a resident ResNet-50 then takes 80
instead of 52 ms for as long as the process lives.
"""

import ctypes
import functools
from pathlib import Path

import torch


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
