"""Keeps threads other than the compute unit's out of OpenMP.

A second thread with an OpenMP team makes libgomp stop spinning: a resident ResNet-50 then takes 80
instead of 52 ms for as long as the process lives.
"""

import ctypes
import functools
from pathlib import Path

import torch


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded; None where torch was built without one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "/libgomp" in f"/{path}" or "/libomp" in f"/{path}" or "/libiomp" in f"/{path}":
            return ctypes.CDLL(f"/{path}")
    return None


def stay_single_threaded() -> None:
    """The calling thread's operators run on itself alone, from now on; others are not touched."""
    torch.get_num_threads()  # torch sets a thread's count at its first use there: let that pass first
    runtime = _runtime()
    if runtime is not None:
        runtime.omp_set_num_threads(1)
