"""Who is given a handler, and when: by memory, by urgency, in the order of arrival."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from models.manifest import InputSpec, LayerEntry, Manifest, TensorEntry
from models.store import Store
from runtime import admission, limits, priority
from runtime.admission import Admission, Free, Held, Need, free
from runtime.app import create_app, handler_command
from runtime.errors import OverTime, Unavailable
from runtime.pool import Job, Pool
from runtime.settings import Settings

Until = Callable[[Callable[[], object]], Awaitable[None]]
MIB = 1 << 20
MAX_PIXELS = 50_000_000


def manifest(weight_format: Literal["safetensors", "pth"] = "safetensors") -> Manifest:
    """Two layers: a weight of 1000 and a buffer of 24 float32, and a weight of 17."""

    def entry(name: str, elements: int, offset: int, *, parameter: bool = True) -> TensorEntry:
        return TensorEntry(
            name=name, dtype="F32", shape=(elements,), offset=offset, parameter=parameter
        )

    rows = [
        ("a", 5000, (entry("a.weight", 1000, 0), entry("a.mean", 24, 4096, parameter=False))),
        ("b", 700, (entry("b.weight", 17, 0),)),
    ]
    layers = tuple(
        LayerEntry(
            index=index,
            name=name,
            file=f"{index:03d}-{name}.{weight_format}",
            bytes=size,
            sha256="0" * 64,
            parameters=parameters,
        )
        for index, (name, size, parameters) in enumerate(rows)
    )
    return Manifest(
        format_version=1,
        architecture="m",
        image_size=2,
        granularity="block",
        weight_format=weight_format,
        classes=3,
        input=InputSpec(resize=2, crop=2, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear"),
        labels=None,
        activation_bytes=1_000_000,
        source="random:0",
        layers=layers,
    )


WEIGHTS = 4 * (1000 + 24 + 17)
ONE_BIT = 125 + 3


@pytest.mark.parametrize(
    ("strategy", "placeholders"),
    [
        ("traditional", WEIGHTS),
        ("pisel", WEIGHTS),
        ("mini", ONE_BIT),
        ("preload", WEIGHTS),
        ("cicada", ONE_BIT),
    ],
)
def test_placeholders_are_counted_by_the_strategy(strategy: str, placeholders: int) -> None:
    tensor = {"kind": "tensor", "datatype": "FP32", "shape": [4, 3, 2, 2]}
    needed = admission.need(manifest(), strategy, tensor, 192, MAX_PIXELS)
    assert needed == Need(8_000_000, placeholders, 0, 192)
    assert needed.bytes == 8_000_000 + placeholders + 192


def test_private_copies_of_weights_count_in_the_format_that_makes_them() -> None:
    tensor = {"kind": "tensor", "datatype": "FP32", "shape": [1, 3, 2, 2]}
    assert (
        admission.need(manifest("pth"), "cicada", tensor, 48, MAX_PIXELS).weights
        == WEIGHTS + 2 * 5000
    )
    assert admission.need(manifest(), "cicada", tensor, 48, MAX_PIXELS).weights == 0


@pytest.mark.parametrize(
    ("described", "body", "images", "input_bytes"),
    [
        ({"kind": "image"}, 1000, 1, 25_000),
        ({"kind": "image"}, 32 * MIB, 1, 32 * MIB + admission.PIXEL_BYTES * MAX_PIXELS),
        ({"kind": "images", "lengths": [400, 600]}, 1000, 2, 25_000),
        ({"kind": "pixels", "shape": [3, 10, 10, 3]}, 900, 3, 4500),
        ({"kind": "tensor", "datatype": "FP32", "shape": [3, 3, 2, 2]}, 144, 3, 144),
    ],
)
def test_the_input_counts_as_what_it_becomes(
    described: dict[str, Any], body: int, images: int, input_bytes: int
) -> None:
    needed = admission.need(manifest(), "cicada", described, body, MAX_PIXELS)
    assert needed.activations == admission.SCRATCH * 1_000_000 * images
    assert needed.input == input_bytes


def test_what_handlers_hold_above_rest_is_not_lost_but_reserved() -> None:
    idle = Held(at_rest=100, now=130)  # the allocator keeps 30 for the next request
    working = Held(at_rest=100, now=180)
    assert free(500, [], 0) == Free(ever=500, now=500)
    assert free(500, [idle], 0) == Free(ever=530, now=530)
    assert free(500, [idle, working], 200) == Free(ever=610, now=410)
    assert free(500, [Held(at_rest=100, now=40)], 0) == Free(ever=500, now=500)


def _tree(root: Path, version: int, files: dict[str, str]) -> Path:
    kinds = {1: "cgroup cgroup rw,memory", 2: "cgroup2 cgroup2 rw"}
    members = {1: "4:memory:/pod/a\n", 2: "0::/pod/a\n"}
    whole = {
        "proc/self/mountinfo": f"31 23 0:28 / /sys/fs/cgroup rw - {kinds[version]}\n",
        "proc/self/cgroup": members[version],
        "proc/meminfo": "MemTotal: 16384 kB\nMemFree: 100 kB\nMemAvailable: 8192 kB\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in whole.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_file_pages_do_not_count_as_taken_in_version_2(tmp_path: Path) -> None:
    stat = f"anon {2 * MIB}\nfile {900 * MIB}\nshmem {MIB}\nslab_unreclaimable 1000\n"
    root = _tree(tmp_path, 2, {"pod/a/memory.max": str(6 * MIB), "pod/a/memory.stat": stat})
    assert limits.memory_left(root) == 3 * MIB - 1000


def test_file_pages_do_not_count_as_taken_in_version_1(tmp_path: Path) -> None:
    stat = f"cache {900 * MIB}\nrss {MIB}\ntotal_cache {900 * MIB}\ntotal_rss {2 * MIB}\n"
    files = {"pod/a/memory.limit_in_bytes": str(6 * MIB), "pod/a/memory.stat": stat}
    assert limits.memory_left(_tree(tmp_path, 1, files)) == 4 * MIB


def test_the_tightest_group_decides_and_else_the_host(tmp_path: Path) -> None:
    files = {
        "pod/a/memory.max": str(100 * MIB),
        "pod/a/memory.stat": f"anon {MIB}",
        "pod/memory.max": str(7 * MIB),
        "pod/memory.stat": f"anon {6 * MIB}",
    }
    assert limits.memory_left(_tree(tmp_path / "group", 2, files)) == MIB
    assert limits.memory_left(_tree(tmp_path / "host", 2, {})) == 8 * MIB
    over = {"pod/a/memory.max": str(MIB), "pod/a/memory.stat": f"anon {2 * MIB}"}
    assert limits.memory_left(_tree(tmp_path / "over", 2, over)) == 0


class Memory:
    """What a pool is told that it may take."""

    def __init__(self, bytes_: int) -> None:
        self.bytes = bytes_

    def free(self, _handlers: Sequence[Held], reserved: int) -> Free:
        return Free(ever=self.bytes, now=self.bytes - reserved)


def job(body: str, *, request_id: str = "a", need: int = 0, urgency: int = 3) -> Job:
    header = {
        "id": request_id,
        "model": "m",
        "version": None,
        "strategy": "cicada",
        "input": {"kind": "image"},
        "outputs": ["labels"],
        "top": 1,
    }
    return Job(header, body.encode(), urgency=urgency, need=Need(need, 0, 0, 0))


@asynccontextmanager
async def pool_of(
    command: list[str], memory: Memory, *, handlers: int = 1, timeout_s: float = 20.0
) -> AsyncIterator[Pool]:
    pool = Pool(command, handlers=handlers, queue=64, timeout_s=timeout_s, free=memory.free)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.anyio
async def test_a_request_that_can_never_fit_is_refused_at_once_and_told_why(
    stub_command: list[str],
) -> None:
    async with pool_of(stub_command, Memory(100 * MIB)) as pool:
        with pytest.raises(Unavailable, match=r"needs up to 101 MiB .*, and 100 MiB can be had"):
            await pool.infer(job("answer", need=101 * MIB))
        await pool.infer(job("answer", need=100 * MIB))
        assert pool.reserved_bytes == 0


@pytest.mark.anyio
async def test_a_request_waits_until_another_gives_its_memory_back(
    stub_command: list[str], until: Until
) -> None:
    async with pool_of(stub_command, Memory(100 * MIB), handlers=3) as pool:
        await until(lambda: pool.ready == 3)
        held = asyncio.create_task(pool.infer(job("wait", need=60 * MIB)))
        await until(lambda: pool.running == 1)
        waiting = asyncio.create_task(pool.infer(job("answer", need=60 * MIB)))
        await until(lambda: pool.waiting == 1)
        assert pool.reserved_bytes == 60 * MIB
        held.cancel()
        await waiting
        await until(lambda: pool.reserved_bytes == 0)


@pytest.mark.anyio
async def test_a_small_request_does_not_overtake_one_that_waits_for_memory(
    stub_command: list[str], until: Until
) -> None:
    order: list[str] = []

    async def ask(pool: Pool, request_id: str, need: int) -> None:
        await pool.infer(job("answer", request_id=request_id, need=need))
        order.append(request_id)

    async with pool_of(stub_command, Memory(100 * MIB), handlers=3) as pool:
        await until(lambda: pool.ready == 3)
        held = asyncio.create_task(pool.infer(job("wait", need=60 * MIB)))
        await until(lambda: pool.running == 1)
        large = asyncio.create_task(ask(pool, "large", 90 * MIB))
        await until(lambda: pool.waiting == 1)
        small = asyncio.create_task(ask(pool, "small", 20 * MIB))
        await until(lambda: pool.waiting == 2)
        held.cancel()
        await asyncio.gather(large, small)
    assert order == ["large", "small"]


@pytest.mark.anyio
async def test_who_waits_behind_a_large_request_has_its_turn_when_that_ones_caller_leaves(
    stub_command: list[str], until: Until
) -> None:
    async with pool_of(stub_command, Memory(100 * MIB), handlers=2) as pool:
        await until(lambda: pool.ready == 2)
        held = asyncio.create_task(pool.infer(job("wait", need=60 * MIB)))
        await until(lambda: pool.running == 1)
        large = asyncio.create_task(pool.infer(job("answer", need=90 * MIB)))
        await until(lambda: pool.waiting == 1)
        small = asyncio.create_task(pool.infer(job("answer", need=20 * MIB)))
        await until(lambda: pool.waiting == 2)
        large.cancel()
        await small
        assert not held.done()
        held.cancel()


@pytest.mark.anyio
async def test_memory_that_does_not_come_free_in_time_is_a_503(
    stub_command: list[str], until: Until
) -> None:
    async with pool_of(stub_command, Memory(100 * MIB), handlers=2, timeout_s=1.5) as pool:
        await until(lambda: pool.ready == 2)
        held = asyncio.create_task(pool.infer(job("hang", need=60 * MIB)))
        await until(lambda: pool.running == 1)
        pool._timeout_s = 0.1  # of the one that waits
        with pytest.raises(Unavailable, match=r"no memory became free for it within 0\.1 s"):
            await pool.infer(job("answer", need=60 * MIB))
        with pytest.raises(OverTime):
            await held
        await until(lambda: pool.reserved_bytes == 0)


@pytest.mark.anyio
async def test_a_handler_that_dies_gives_its_requests_memory_back(
    stub_command: list[str], until: Until
) -> None:
    async with pool_of(stub_command, Memory(100 * MIB)) as pool:
        for _ in range(3):
            with pytest.raises(Exception, match="was killed by SIGKILL"):
                await pool.infer(job("die SIGKILL", need=90 * MIB))
        await pool.infer(job("answer", need=90 * MIB))
        await until(lambda: pool.reserved_bytes == 0)


@pytest.mark.parametrize(
    ("fields", "urgency"),
    [
        ([], 3),
        (["u=0"], 0),
        (["u=7"], 7),
        (["u=5, i"], 5),
        (["i"], 3),
        (["u=2;x=1"], 2),
        (["u=1", "u=6"], 6),
        (["i", "u=6"], 6),
        (["u=8"], 3),
        (["u=-1"], 3),
        (["u=1.0"], 3),
        (['u="1"'], 3),
        (["u"], 3),
        (["u=?1"], 3),
        (["u=(1 2)"], 3),
        (["u=1,,"], 3),
        (["U=1"], 3),
        (["u=1" + " " * 1000], 3),
        (["é"], 3),
        ([""], 3),
    ],
)
def test_the_urgency_is_the_standard_headers_and_what_is_wrong_is_ignored(
    fields: list[str], urgency: int
) -> None:
    assert priority.urgency(fields) == urgency


@pytest.mark.anyio
async def test_requests_are_served_by_urgency_and_by_arrival_within_one(
    stub_command: list[str], until: Until
) -> None:
    order: list[str] = []

    async def ask(pool: Pool, request_id: str, urgency: int) -> None:
        await pool.infer(job("answer", request_id=request_id, urgency=urgency))
        order.append(request_id)

    asked = [("a", 3), ("b", 7), ("c", 0), ("d", 3), ("e", 0), ("f", 5), ("g", 7), ("h", 1)]
    async with pool_of(stub_command, Memory(MIB)) as pool:
        await until(lambda: pool.ready == 1)
        held = asyncio.create_task(pool.infer(job("wait")))
        await until(lambda: pool.running == 1)
        asking = []
        for number, (request_id, urgency) in enumerate(asked, start=1):
            asking.append(asyncio.create_task(ask(pool, request_id, urgency)))
            await until(lambda: pool.waiting == number)  # noqa: B023
        held.cancel()
        await asyncio.gather(*asking)
    assert order == ["c", "e", "h", "a", "d", "f", "b", "g"]


def test_nobody_is_overtaken_for_longer_than_the_steps_between_the_urgencies() -> None:
    waiting = priority.rank(100.0, 7)
    assert priority.rank(100.0 + 7 * priority.STEP_S - 0.1, 0) < waiting
    assert priority.rank(100.0 + 7 * priority.STEP_S + 0.1, 0) > waiting
    assert priority.rank(100.0 + priority.STEP_S + 0.1, 6) > waiting


@pytest.mark.anyio
async def test_over_http_the_header_orders_and_the_need_refuses(
    stub_command: list[str], tmp_path: Path, until: Until
) -> None:
    store = Store(tmp_path / "weights")
    with store.writer("m") as writer:
        writer.publish(manifest())
    app = create_app(Settings(weights=store.root, timeout_s=20.0), command=stub_command)
    pool: Pool = app.state.service.pool
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://cicada") as client,
    ):
        await until(lambda: pool.ready == 1)
        held = asyncio.create_task(pool.infer(job("wait")))
        await until(lambda: pool.running == 1)
        asking = []
        for number, field in enumerate(["u=7", "u=3", "u=1, i"], start=1):
            headers = {"Priority": field, "X-Request-ID": f"r{number}"}
            asking.append(
                asyncio.create_task(client.post("/predictions/m", content=b"x", headers=headers))
            )
            await until(lambda: pool.waiting == number)  # noqa: B023
        assert [waiting.header["id"] for waiting in pool._line] == ["r3", "r2", "r1"]
        held.cancel()
        assert [(await answer).status_code for answer in asking] == [200] * 3
        memory = Memory(1_000_000)
        pool._admission = Admission(lambda reserved: memory.free([], reserved))
        refused = await client.post("/predictions/m", content=b"x")
        assert refused.status_code == 503
        assert refused.json()["error"].startswith("the request needs up to 2 MiB of memory")
        assert refused.headers["Retry-After"] == "1"


@pytest.mark.anyio
async def test_what_a_request_really_takes_is_within_its_need(weights: Path, until: Until) -> None:
    """Private memory above the handler's at rest, looked at every few hundred microseconds."""
    model = Store(weights).open("resnet18").manifest
    command = handler_command(Settings(weights=weights, threads=1), limits.measure())
    described = {"kind": "tensor", "datatype": "FP32", "shape": [8, 3, 224, 224]}
    body = bytes(8 * 3 * 224 * 224 * 4)
    pool = Pool(command, handlers=1, queue=8, timeout_s=60.0)
    pool.start()
    try:
        await until(lambda: pool.ready)
        (pid,) = pool.pids
        at_rest = limits.private_memory(pid)
        for strategy in ("cicada", "traditional"):
            needed = admission.need(model, strategy, described, len(body), MAX_PIXELS)
            asked = job("", need=needed.bytes)
            asked.header.update(
                model="resnet18", strategy=strategy, input=described, outputs=["logits"]
            )
            asked.body = body
            asking = asyncio.create_task(pool.infer(asked))
            most = at_rest
            while not asking.done():
                most = max(most, limits.private_memory(pid))
                await asyncio.sleep(0.0003)
            await asking
            assert needed.activations / 8 < most - at_rest <= needed.bytes
    finally:
        await pool.close()
