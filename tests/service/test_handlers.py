"""Handlers that are killed, starve, or lose a file under them: what their callers and the next ones see."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from handler import wire
from models import catalog, preparation
from models.pretrained import preset
from models.random_weights import RandomWeights
from models.store import PreparedModel, Store
from runtime import limits
from runtime.app import handler_command
from runtime.errors import Fault, HandlerDied
from runtime.handler_process import End
from runtime.limits import OutOfMemoryKills
from runtime.pool import Answer, Job, Pool
from runtime.settings import Settings

Until = Callable[[Callable[[], object]], Awaitable[None]]

REPLACEMENTS = 1000
READY = wire._encode({"type": "ready", "pid": 1, "threads": 1, "torch": "none"}, 0)
QUICK_STUB = f"import os, sys; fd = int(sys.argv[2]); os.write(fd, {READY!r}); os.read(fd, 9); os.kill(os.getpid(), 9)"


def job(body: bytes | str, **changes: Any) -> Job:
    header = {
        "id": "a",
        "model": "m",
        "version": None,
        "strategy": "cicada",
        "input": {"kind": "image"},
        "outputs": ["labels", "logits"],
        "top": 1,
        **changes,
    }
    return Job(header, body.encode() if isinstance(body, str) else body)


@asynccontextmanager
async def pool_of(command: list[str], ends: list[End], **options: Any) -> AsyncIterator[Pool]:
    chosen = {"handlers": 1, "queue": 8, "timeout_s": 60.0, **options}
    pool = Pool(command, on_end=ends.append, **chosen)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


LOSING_HANDLERS = f"""
import asyncio, logging, sys, psutil, uvloop
from runtime.errors import HandlerDied
from runtime.pool import Job, Pool

logging.disable()

async def lose(pool, count):
    for _ in range(count):
        try:
            await pool.infer(Job({{"id": "a"}}, b"x"))
        except HandlerDied as died:
            assert "was killed by SIGKILL" in str(died)
        else:
            raise AssertionError("answered")

async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)

async def main():
    ends = []
    process = psutil.Process()
    pool = Pool(sys.argv[1:], handlers=4, queue=8, timeout_s=60.0, on_end=ends.append)
    pool.start()
    await until(lambda: pool.ready == 4)
    descriptors = process.num_fds()
    await asyncio.gather(*(lose(pool, {REPLACEMENTS // 4}) for _ in range(4)))
    await until(lambda: pool.ready == 4 and len(process.children()) == 4)
    await until(lambda: process.num_fds() <= descriptors)
    await pool.close()
    print(len(process.children()), len(ends), {{end.cause for end in ends}})

uvloop.run(main())
"""


def test_a_thousand_replacements_leave_no_zombie_and_no_descriptor() -> None:
    """In a process of its own, as small as the proxy: a large one is slow to start others."""
    run = subprocess.run(
        [sys.executable, "-c", LOSING_HANDLERS, sys.executable, "-I", "-S", "-c", QUICK_STUB],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.stdout == f"0 {REPLACEMENTS} {{'SIGKILL'}}\n", run.stderr


@pytest.mark.anyio
@pytest.mark.parametrize("command", ["die SIGKILL", "die SIGSEGV", "exit 1", "close", "garbage"])
async def test_the_request_learns_within_a_second_that_its_handler_has_gone(
    stub_command: list[str], until: Until, command: str
) -> None:
    async with pool_of(stub_command, []) as pool:
        await until(lambda: pool.ready)
        start = time.monotonic()
        with pytest.raises(HandlerDied):
            await pool.infer(job(command))
        assert time.monotonic() - start < 1.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "weights")


def prepare(store: Store, name: str, seed: int = 0) -> PreparedModel:
    """A ResNet-18 of three classes."""
    chain = catalog.architecture("resnet18", classes=3)
    source = preparation.Source(
        f"random:{seed}", chain, RandomWeights(chain, seed), preset("resnet18", chain.image_size)
    )
    return preparation.prepare(store, name, source, "safetensors")


def real_handler(store: Store) -> list[str]:
    return handler_command(Settings(weights=store.root, threads=1), limits.measure())


def images(count: int, model: str) -> Job:
    value = torch.zeros(count, 3, 224, 224)
    described = {"kind": "tensor", "datatype": "FP32", "shape": list(value.shape)}
    return job(value.numpy().tobytes(), model=model, input=described, outputs=["logits"])


@pytest.mark.anyio
async def test_a_file_cut_short_under_a_request_costs_that_request_alone(
    store: Store, until: Until
) -> None:
    model = prepare(store, "cut")
    prepare(store, "whole")
    file = next(model.path.glob("*-layer4.1.*"))
    ends: list[End] = []
    async with pool_of(real_handler(store), ends) as pool:
        await pool.infer(images(1, "cut"))
        (pid,) = pool.pids
        maps = Path(f"/proc/{pid}/maps")
        # The first request's mapping, which goes after its answer.
        await until(lambda: file.name not in maps.read_text())
        working = asyncio.create_task(pool.infer(images(16, "cut")))
        await until(lambda: file.name in maps.read_text())
        os.truncate(file, 0)
        with pytest.raises(HandlerDied, match="was killed by SIGBUS"):
            await working
        await until(lambda: [end.cause for end in ends] == ["SIGBUS"])
        with pytest.raises(Fault, match=f"^model 'cut': {file.name}: has 0 bytes, expected"):
            await pool.infer(images(1, "cut"))
        answer: Answer = await pool.infer(images(1, "whole"))
        assert answer.result.model == "whole"


def test_the_kernel_takes_a_handler_before_the_proxy(server: Any) -> None:
    def score(process: psutil.Process) -> int:
        return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())

    (handler,) = server.handlers()
    assert score(handler) == min(1000, score(server.process) + 500)


IN_A_SMALL_GROUP = """
import asyncio, os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from runtime.errors import HandlerDied
from runtime.pool import Job, Pool

async def main():
    ends = []
    pool = Pool(sys.argv[2:], handlers=1, queue=8, timeout_s=60.0, on_end=ends.append)
    pool.start()
    header = {"id": "a", "model": "m", "version": None, "strategy": "cicada",
              "input": {"kind": "image"}, "outputs": ["labels"], "top": 1}
    try:
        await pool.infer(Job(header, b"hog"))
    except HandlerDied as died:
        print(died)
    print((await pool.infer(Job(header, b"answer"))).result.id)
    print(ends[0].cause)
    await pool.close()

asyncio.run(main())
"""
SMALL_GROUP_BYTES = 256 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group of our own; where none can be made the kernel cannot be asked."""
    for parent in limits._memory_groups(limits.HOST):
        group = parent / f"cicada-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        names = ("memory.max", "memory.limit_in_bytes")
        limit = next((group / name for name in names if (group / name).exists()), None)
        if limit is not None:
            limit.write_text(str(SMALL_GROUP_BYTES))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no memory control group can be made here")


def test_a_handler_that_takes_all_memory_is_killed_alone_and_the_cause_is_named(
    small_group: Path, stub_command: list[str]
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", IN_A_SMALL_GROUP, str(small_group), *stub_command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "the handler at work on this request was killed by the kernel, which was out of memory",
        "a",
        "oom",
    ]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill {kills}\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"),
    ],
)
def test_each_kill_for_memory_explains_one_death(tmp_path: Path, file: str, text: str) -> None:
    version = 2 if file == "memory.events" else 1
    group = _group(tmp_path, version)
    (group / file).write_text(text.format(kills=5))
    kills = OutOfMemoryKills(tmp_path)
    assert not kills.explain_one()
    (group / file).write_text(text.format(kills=7))
    assert [kills.explain_one() for _ in range(3)] == [True, True, False]


def _group(root: Path, version: int) -> Path:
    kinds = {1: "cgroup cgroup rw,memory", 2: "cgroup2 cgroup2 rw"}
    members = {1: "4:memory:/a\n", 2: "0::/a\n"}
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(f"31 23 0:28 / /sys/fs/cgroup rw - {kinds[version]}\n")
    (proc / "cgroup").write_text(members[version])
    group = root / "sys" / "fs" / "cgroup" / "a"
    group.mkdir(parents=True)
    return group
