import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from runtime import pool as pool_module
from runtime.errors import (
    BadInput,
    Fault,
    HandlerDied,
    NotFound,
    OverTime,
    QueueFull,
    ServiceError,
    Unavailable,
)
from runtime.handler_process import End
from runtime.pool import Job, Pool

pytestmark = pytest.mark.anyio

Until = Callable[[Callable[[], object]], Awaitable[None]]


def job(body: bytes | str, request_id: str = "a") -> Job:
    header = {
        "id": request_id,
        "model": "m",
        "version": None,
        "strategy": "cicada",
        "input": {"kind": "image"},
        "outputs": ["labels", "logits"],
        "top": 1,
    }
    return Job(header, body.encode() if isinstance(body, str) else body)


async def answering_pid(pool: Pool, body: bytes | str = "answer") -> int:
    """The process that answered."""
    answer = await pool.infer(job(body))
    assert answer.result.labels is not None
    return int(answer.result.labels[0][0].label)


def children() -> list[psutil.Process]:
    """This process's, zombies included."""
    return psutil.Process().children()


class Stubs:
    """Makes pools of stub handlers, and notes how handlers ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self.ends: list[End] = []

    @asynccontextmanager
    async def pool(
        self,
        *arguments: str,
        handlers: int = 1,
        queue: int = 8,
        timeout_s: float = 20.0,
        cancel_s: float = 20.0,
    ) -> AsyncIterator[Pool]:
        before = children()  # other tests' servers
        pool = Pool(
            [*self._command, *arguments],
            handlers=handlers,
            queue=queue,
            timeout_s=timeout_s,
            cancel_s=cancel_s,
            on_end=self.ends.append,
        )
        pool.start()
        try:
            yield pool
        finally:
            await pool.close()
            assert children() == before


@pytest.fixture
def stubs(stub_command: list[str]) -> Stubs:
    return Stubs(stub_command)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


async def test_a_request_that_comes_before_any_handler_is_ready_is_answered(stubs: Stubs) -> None:
    async with stubs.pool() as pool:
        assert pool.why_not_ready() == "no handler is ready yet"
        asked = job("answer", "some-id")
        answer = await pool.infer(asked)
        assert answer.result.id == "some-id"
        assert len(answer.body) == 12
        assert answer.result.timeline.arrival_ns == asked.dispatched_ns
        assert pool.why_not_ready() is None


async def test_bodies_larger_than_any_buffer_arrive_whole(stubs: Stubs) -> None:
    async with stubs.pool() as pool:
        await answering_pid(pool, b"x" * (16 << 20))


async def test_each_handler_works_on_one_request_at_a_time(
    stubs: Stubs, until: Until, fifo: Path
) -> None:
    async with stubs.pool(handlers=2) as pool:
        await until(lambda: pool.ready == 2)
        held = [asyncio.create_task(answering_pid(pool, f"hold {fifo}")) for _ in range(2)]
        await until(lambda: pool.running == 2)
        waiting = asyncio.create_task(answering_pid(pool))
        await until(lambda: pool.waiting == 1)
        await release(fifo, held)
        pids = await asyncio.gather(*held)
        assert len(set(pids)) == 2
        assert await waiting in pids


async def release(fifo: Path, held: Sequence[asyncio.Task[int]]) -> None:
    """Lets handlers go on that read the FIFO: one may open it after another has read its end."""
    for task in held:
        while not task.done():
            with suppress(OSError):  # nobody reads it at this moment
                os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            await asyncio.sleep(0.005)


async def test_requests_are_served_in_the_order_of_their_arrival(stubs: Stubs) -> None:
    order: list[str] = []

    async def ask(pool: Pool, request_id: str) -> None:
        await pool.infer(job("answer", request_id))
        order.append(request_id)

    async with stubs.pool() as pool:
        ids = [f"r{number}" for number in range(8)]
        await asyncio.gather(*(ask(pool, request_id) for request_id in ids))
    assert order == ids


async def test_a_full_queue_refuses_and_says_when_to_try_again(stubs: Stubs, until: Until) -> None:
    async with stubs.pool(queue=2) as pool:
        await until(lambda: pool.ready == 1)
        working = asyncio.create_task(pool.infer(job("wait")))
        await until(lambda: pool.running == 1)
        waiting = [asyncio.create_task(pool.infer(job("answer"))) for _ in range(2)]
        await until(lambda: pool.waiting == 2)
        with pytest.raises(QueueFull, match="2 requests are waiting") as refused:
            await pool.infer(job("answer"))
        assert refused.value.headers == {"Retry-After": "1"}
        working.cancel()
        await asyncio.gather(*waiting)


@pytest.mark.parametrize(
    ("command", "cause", "sentence"),
    [
        ("die SIGKILL", "SIGKILL", "was killed by SIGKILL"),
        ("die SIGSEGV", "SIGSEGV", "was killed by SIGSEGV"),
        ("die SIGBUS", "SIGBUS", "was killed by SIGBUS"),
        ("exit 3", "exit", "exited with code 3"),
        ("exit 0", "exit", "exited with code 0"),
        ("close", "closed", "closed its socket without exiting"),
        ("garbage", "garbage", "sent what is no answer"),
        ("half", "garbage", "sent what is no answer"),
        ("ready", "garbage", "sent what is no answer"),
        ("wrong-id", "garbage", "sent what is no answer"),
        ("wrong-size", "garbage", "sent what is no answer"),
        ("wrong-layer", "garbage", "sent what is no answer"),
    ],
)
async def test_a_handler_that_ends_fails_its_own_request_only(
    stubs: Stubs, command: str, cause: str, sentence: str
) -> None:
    async with stubs.pool() as pool:
        before = await answering_pid(pool)
        failing = asyncio.create_task(pool.infer(job(command)))
        following = asyncio.create_task(answering_pid(pool))
        with pytest.raises(HandlerDied, match=sentence):
            await failing
        assert await following != before
        assert [end.cause for end in stubs.ends] == [cause]
        assert not psutil.pid_exists(before)


async def test_a_fault_of_the_proxys_own_is_answered_too(stubs: Stubs) -> None:
    async with stubs.pool() as pool:
        no_json = job("answer")
        no_json.header["top"] = object()
        with pytest.raises(Fault, match="an unexpected fault of the service"):
            await pool.infer(no_json)
        await answering_pid(pool)


async def test_a_frame_that_nobody_asked_for_costs_the_handler_its_place(
    stubs: Stubs, until: Until
) -> None:
    async with stubs.pool() as pool:
        before = await answering_pid(pool, "twice")
        await until(lambda: stubs.ends)
        assert stubs.ends[0].cause == "garbage"
        assert await answering_pid(pool) != before


async def test_a_handler_over_the_time_limit_is_killed_and_replaced(
    stubs: Stubs, until: Until
) -> None:
    async with stubs.pool(timeout_s=0.5) as pool:
        await until(lambda: pool.ready == 1)
        (before,) = pool.pids
        with pytest.raises(OverTime, match=r"the request took longer than 0\.5 s"):
            await pool.infer(job("hang"))
        await until(lambda: not psutil.pid_exists(before) and pool.ready == 1)
        assert await answering_pid(pool) != before
        assert [end.cause for end in stubs.ends] == ["timeout"]


async def test_a_stopped_handler_is_killed_at_the_time_limit(stubs: Stubs, until: Until) -> None:
    async with stubs.pool(timeout_s=0.5) as pool:
        await until(lambda: pool.ready == 1)
        (before,) = pool.pids
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(OverTime):
            await pool.infer(job(b"x" * (16 << 20)))
        await until(lambda: not psutil.pid_exists(before) and pool.ready == 1)


async def test_waiting_has_the_time_limit_too(stubs: Stubs, until: Until) -> None:
    async with stubs.pool(timeout_s=1.5) as pool:
        await until(lambda: pool.ready == 1)
        first = asyncio.create_task(pool.infer(job("hang")))
        await until(lambda: pool.running == 1)
        pool._timeout_s = 0.1  # of the one that waits
        with pytest.raises(OverTime, match=r"no handler became free within 0\.1 s"):
            await pool.infer(job("answer"))
        assert pool.waiting == 0
        with pytest.raises(OverTime):
            await first


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, BadInput), (404, NotFound), (500, Fault), (503, Unavailable), (418, Fault)],
)
async def test_a_refusal_of_the_handler_is_the_callers_error(
    stubs: Stubs, status: int, error: type[ServiceError]
) -> None:
    async with stubs.pool() as pool:
        before = await answering_pid(pool)
        with pytest.raises(error, match="a GIF, expected better"):
            await pool.infer(job(f"error {status} a GIF, expected better"))
        assert await answering_pid(pool) == before


async def test_a_caller_that_leaves_while_waiting_leaves_the_queue_at_once(
    stubs: Stubs, until: Until
) -> None:
    async with stubs.pool() as pool:
        await until(lambda: pool.ready == 1)
        working = asyncio.create_task(pool.infer(job("wait")))
        await until(lambda: pool.running == 1)
        waiting = asyncio.create_task(pool.infer(job("exit 1")))
        await until(lambda: pool.waiting == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert pool.waiting == 0
        working.cancel()
        await answering_pid(pool)
        assert stubs.ends == []


async def test_a_caller_that_leaves_has_its_running_request_cancelled(
    stubs: Stubs, until: Until
) -> None:
    async with stubs.pool() as pool:
        before = await answering_pid(pool)
        working = asyncio.create_task(pool.infer(job("wait")))
        await until(lambda: pool.running == 1)
        working.cancel()
        await asyncio.wait([working])
        assert await answering_pid(pool) == before
        assert stubs.ends == []


async def test_a_handler_that_does_not_hear_a_cancellation_is_killed(
    stubs: Stubs, until: Until
) -> None:
    async with stubs.pool(cancel_s=0.2) as pool:
        before = await answering_pid(pool)
        working = asyncio.create_task(pool.infer(job("hang")))
        await until(lambda: pool.running == 1)
        working.cancel()
        await asyncio.wait([working])
        assert await answering_pid(pool) != before
        assert [end.cause for end in stubs.ends] == ["cancel"]


async def test_a_handler_that_dies_idle_is_replaced_before_it_is_missed(
    stubs: Stubs, until: Until
) -> None:
    async with stubs.pool() as pool:
        before = await answering_pid(pool)
        os.kill(before, signal.SIGKILL)
        await until(lambda: stubs.ends and pool.ready == 1)
        assert await answering_pid(pool) != before


@pytest.mark.parametrize(
    ("start", "why"),
    [("exits", "exited with code 7"), ("garbage", "sent what is no answer")],
)
async def test_handlers_that_cannot_start_are_retried_and_the_reason_is_told(
    stubs: Stubs, until: Until, tmp_path: Path, start: str, why: str
) -> None:
    starts = tmp_path / "starts"
    async with stubs.pool("--starts", str(starts), "--start", start) as pool:
        await until(lambda: len(stubs.ends) >= 3)
        assert why in str(pool.why_not_ready())
        assert len(starts.read_text().splitlines()) >= 3


async def test_a_handler_that_is_never_ready_is_given_up(
    stubs: Stubs, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.3)
    async with stubs.pool("--start", "mute") as pool:
        await until(lambda: stubs.ends)
        assert stubs.ends[0] == End("start", "was not ready within 0.3 s")
        assert pool.ready == 0


async def test_a_command_that_does_not_exist_is_told(until: Until, tmp_path: Path) -> None:
    ends: list[End] = []
    command = [str(tmp_path / "absent")]
    pool = Pool(command, handlers=1, queue=1, timeout_s=0.3, on_end=ends.append)
    pool.start()
    await until(lambda: ends)
    assert "cannot be started" in str(pool.why_not_ready())
    with pytest.raises(Unavailable, match="cannot be started"):
        await pool.infer(job("answer"))
    await pool.close()


def test_pauses_between_fruitless_starts_grow_up_to_a_limit() -> None:
    pauses = [pool_module._pause(fruitless) for fruitless in range(40)]
    assert pauses[:6] == [0.0, 0.0, 0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == pool_module.LONGEST_PAUSE_S
    assert pauses == sorted(pauses)


async def test_draining_finishes_what_is_under_way_and_takes_nothing_new(
    stubs: Stubs, until: Until, fifo: Path
) -> None:
    async with stubs.pool() as pool:
        await until(lambda: pool.ready == 1)
        held = asyncio.create_task(answering_pid(pool, f"hold {fifo}"))
        await until(lambda: pool.running == 1)
        pool.drain(20.0)
        assert pool.why_not_ready() == "the service is shutting down"
        with pytest.raises(Unavailable, match="shutting down"):
            await pool.infer(job("answer"))
        await release(fifo, [held])
        assert await held > 0


async def test_what_draining_does_not_finish_in_time_is_refused(stubs: Stubs, until: Until) -> None:
    async with stubs.pool() as pool:
        await until(lambda: pool.ready == 1)
        working = asyncio.create_task(pool.infer(job("wait")))
        await until(lambda: pool.running == 1)
        pool.drain(0.05)
        with pytest.raises(Unavailable, match="shutting down"):
            await working


async def test_closing_ends_even_a_handler_that_hangs(
    stubs: Stubs, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "EXIT_GRACE_S", 0.1)
    async with stubs.pool() as pool:
        await until(lambda: pool.ready == 1)
        working = asyncio.create_task(pool.infer(job("hang")))
        await until(lambda: pool.running == 1)
        (pid,) = pool.pids
        await pool.close()
        with pytest.raises(Unavailable):
            await working
        assert not psutil.pid_exists(pid)


async def test_many_replacements_leave_no_zombie_and_no_descriptor(
    stubs: Stubs, until: Until
) -> None:
    async with stubs.pool() as pool:
        await answering_pid(pool)
        before = psutil.Process().num_fds()
        processes = len(children())
        for _ in range(20):
            with pytest.raises(HandlerDied):
                await pool.infer(job("die SIGKILL"))
        await answering_pid(pool)
        await until(lambda: len(children()) == processes)
        await until(lambda: psutil.Process().num_fds() <= before)
        assert len(stubs.ends) == 20
