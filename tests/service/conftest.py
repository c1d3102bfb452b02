"""A pool of stub handlers, an application over them, and a real server."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STUB = Path(__file__).with_name("stub_handler.py")
DEADLINE_S = 20.0


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop that the server runs on."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def stub_command() -> list[str]:
    """What starts a stub handler; more of its arguments may follow."""
    return [sys.executable, str(STUB)]


async def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], object]:
    """Awaits a condition, with a deadline."""
    return _until
