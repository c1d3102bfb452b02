"""A measurement begins when the processes that were measured before are at rest."""

import subprocess
import sys
import threading
import time

import pytest

from bench import settling

DEADLINE_S = 20.0
BUSY_UNTIL_TOLD = """
import sys, threading
told = threading.Event()
def spin():
    while not told.is_set():
        pass
threading.Thread(target=spin).start()
print("begun", flush=True)
sys.stdin.readline()
told.set()
print("at rest", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", BUSY_UNTIL_TOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_it_waits_for_a_thread_of_a_child_that_works(
    child: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_LIMIT_S", DEADLINE_S)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        waiting = threading.Thread(target=settling.settle)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive(), "the child works still"
        child.stdin.write("rest\n")
        child.stdin.flush()
        assert child.stdout.readline() == "at rest\n"
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()


def test_it_does_not_wait_for_ever(
    child: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_LIMIT_S", 0.05)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        begun = time.monotonic()
        settling.settle()
        assert time.monotonic() - begun >= 0.05
        child.kill()
