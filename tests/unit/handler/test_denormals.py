import subprocess
import sys
import threading

import torch

from handler import denormals

TINY = 1e-40  # as float32 below 1.2e-38, the smallest number of full precision


def is_zero() -> bool:
    """Whether this thread takes a denormal number as zero."""
    return (torch.tensor([TINY]) * 1.0).item() == 0.0


def test_denormal_numbers_are_zero_within_and_not_after() -> None:
    assert not is_zero()
    with denormals.taken_as_zero():
        assert is_zero()
        assert (torch.tensor([1.5e-38]) * 0.5).item() == 0.0
        assert (torch.tensor([1.5e-38]) * 1.0).item() > 0.0
    assert not is_zero()


def test_an_error_within_leaves_the_thread_as_it_was() -> None:
    try:
        with denormals.taken_as_zero():
            raise RuntimeError
    except RuntimeError:
        pass
    assert not is_zero()


def test_other_threads_are_not_touched() -> None:
    found: list[bool] = []
    begin = threading.Event()

    def look() -> None:
        begin.wait()
        found.append(is_zero())

    other = threading.Thread(target=look)
    other.start()
    with denormals.taken_as_zero():
        begin.set()
        other.join()
    assert found == [False]


IN_A_TEAM = f"""
import torch
from handler import denormals
torch.set_num_threads(2)
with denormals.taken_as_zero():
    torch.ones(1 << 20).sum()
many = torch.full((1 << 22,), {TINY})
with denormals.taken_as_zero():
    print(int((many * 1.0).count_nonzero()))
"""


def test_a_team_of_threads_begun_within_computes_so_too() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IN_A_TEAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "0\n", run.stderr
