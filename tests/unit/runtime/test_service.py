import asyncio
from pathlib import Path

import pytest

from runtime.app import create_app
from runtime.service import Service
from runtime.settings import Settings

pytestmark = pytest.mark.anyio


async def test_what_keeps_the_event_loop_busy_happens_once_a_turn(tmp_path: Path) -> None:
    service: Service = create_app(Settings(weights=tmp_path)).state.service
    loop = asyncio.get_running_loop()
    turns = 0
    seen: list[int] = []

    def count() -> None:
        nonlocal turns
        turns += 1
        if len(seen) < 10:
            loop.call_soon(count)

    async def busy() -> None:
        async with service.turn():
            seen.append(turns)

    count()
    await asyncio.gather(*(busy() for _ in range(10)))
    assert len(set(seen)) == 10
