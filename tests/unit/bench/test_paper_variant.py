"""The handler with the scheduler off, or behind a slower disk: its answers are the same, its disk is slower."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import control_groups
from bench.control_groups import NotAllowed
from bench.latency import random_input
from bench.paper import variant
from bench.paper.variant import Bucket, ThrottledFile
from bench.worker import Worker, WorkerFailed
from handler.retrieval import CHUNK_BYTES
from handler.scheduler import Durations, PriorityAwareScheduler
from models import preparation
from models.store import Store

INPUT = {"kind": "tensor", "datatype": "FP32", "shape": [1, 3, 224, 224]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("weights"))
    source = preparation.from_seed(0, "resnet18", "block")
    preparation.prepare(store, "resnet18", source, "safetensors")
    return store.root


def logits(*arguments: str, weights: Path) -> bytes:
    handlers = ["--weights", str(weights), "--threads", "1"]
    with Worker("bench.paper.entry", [*arguments, "--", *handlers]) as worker:
        _, body = worker.infer("resnet18", "cicada", INPUT, random_input())
        return bytes(body)


def test_every_variant_answers_as_the_product_does(weights: Path) -> None:
    with Worker.handler(weights, 1) as worker:
        _, expected = worker.infer("resnet18", "cicada", INPUT, random_input())
    assert logits(weights=weights) == expected
    assert logits("--scheduler", "off", weights=weights) == expected
    assert logits("--bytes-per-s", "500000000", weights=weights) == expected


def test_all_that_a_handler_takes_counts_in_its_group(weights: Path) -> None:
    """torch alone takes more than this; it did not count when the group was joined after its import."""
    try:
        with control_groups.memory_limited(150 << 20) as group, pytest.raises(WorkerFailed):
            logits("--group", str(group.folder), weights=weights)
    except NotAllowed as error:
        pytest.skip(str(error))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(variant, "time", made)
    return made


def test_a_bucket_gives_bytes_at_its_speed_whoever_asks(clock: Clock) -> None:
    bucket = Bucket(bytes_per_s=1000)
    bucket.take(500)
    assert clock.now == pytest.approx(0.5)
    bucket.take(1000)
    assert clock.now == pytest.approx(1.5)
    clock.now = 10.0
    bucket.take(100)
    assert clock.now == pytest.approx(10.1), "a disk that was idle saves nothing up"


class File:
    """Three chunks, the last one short."""

    bytes = 2 * CHUNK_BYTES + 10

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> bool:
        self._steps += 1
        return self._steps < 3

    def take(self) -> dict[str, object]:
        return {}


def test_a_throttled_file_pays_for_each_chunk_what_it_has(clock: Clock) -> None:
    file = ThrottledFile(Bucket(CHUNK_BYTES), File())  # type: ignore[arg-type]
    assert file.bytes == File.bytes
    moments = []
    more = True
    while more:
        more = file.step()
        moments.append(clock.now)
    assert moments == pytest.approx([1.0, 2.0, 2.0 + 10 / CHUNK_BYTES])


@pytest.fixture
def off() -> Iterator[None]:
    with ExitStack() as stack:
        variant.never_suspend(stack)
        yield


def late_request() -> frozenset[int]:
    """Which layers are held when the needed layer's retrieval is late."""
    now = 0
    scheduler = PriorityAwareScheduler([0, 1, 2], Durations([100, 100, 100]), lambda: now)
    scheduler.issued(0)
    scheduler.issued(1)
    scheduler.issued(2)
    now = 1000
    scheduler.review()
    return scheduler.suspended


def test_the_scheduler_holds_later_layers_of_a_late_one() -> None:
    assert late_request() == {1, 2}


@pytest.mark.usefixtures("off")
def test_the_scheduler_can_be_turned_off() -> None:
    assert late_request() == frozenset()
