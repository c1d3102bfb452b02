"""After a request nothing of its model is left in the handler: no memory, no open file, no mapping."""

import re
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from bench.worker import Worker
from handler.strategies import STRATEGIES
from models import preparation
from models.manifest import WeightFormat
from models.store import Store

DEADLINE_S = 20.0
ALLOWED_BYTES = 20_000_000
MODELS: dict[str, WeightFormat] = {"resnet50": "safetensors", "vit_b_32": "pth", "vgg11": "pth"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    for name, weight_format in MODELS.items():
        source = preparation.from_seed(0, name, "block")
        preparation.prepare(Store(root), name, source, weight_format)
    return root


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def weight_mappings(pid: int, store: Path) -> list[str]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if str(store) in line]


def open_weight_files(pid: int, store: Path) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(str(store)):
            found.append(target)
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """What belongs to a request is let go after its answer was sent."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


@pytest.mark.timeout(240)
def test_ten_requests_of_mixed_models_leave_nothing(store: Path) -> None:
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    described = {"kind": "tensor", "datatype": "FP32", "shape": [1, 3, 224, 224]}
    with Worker.handler(store, 2) as handler:
        before = anonymous_bytes(handler.pid)
        pairs = zip(cycle(MODELS), cycle(STRATEGIES), strict=False)
        for model, strategy in islice(pairs, 10):
            handler.infer(model, strategy, described, image.numpy().tobytes())
            wait_until(lambda: not weight_mappings(handler.pid, store))
            wait_until(lambda: not open_weight_files(handler.pid, store))
        wait_until(lambda: anonymous_bytes(handler.pid) <= before + ALLOWED_BYTES)
