"""Numbers below 1.2e-38, which some processors compute with many times more slowly than with others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def taken_as_zero() -> Iterator[None]:
    """Within it, this thread takes and gives zero for them; other threads are not touched.

    A thread starts as the thread that starts it computes: a team of OpenMP that comes to be within it
    stays so. Numbers of usual size come out the same, bit for bit: what is dropped is smaller than the
    last bit of anything above 1e-31 that it could be added to.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
