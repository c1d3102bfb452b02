"""Requests on a model prepared with `--optimize`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from handler.cancellation import Cancellation
from handler.errors import ModelFault
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.plan import Plans
from handler.strategies import STRATEGIES
from models import blocked, optimization, preparation
from models.manifest import WeightFormat
from models.store import PreparedModel, Store

IMAGE = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(4))


def logits(handler: RequestHandler, model: str, strategy: str) -> Tensor:
    header: dict[str, Any] = {
        "type": "infer",
        "id": "one",
        "model": model,
        "version": None,
        "strategy": strategy,
        "received_ns": 0,
        "input": {"kind": "tensor", "datatype": "FP32", "shape": list(IMAGE.shape)},
        "outputs": ["logits"],
        "top": 5,
    }
    body = bytearray(IMAGE.numpy().tobytes())
    with handler.handling(header, body, 0, Cancellation()) as (told, content):
        assert told["type"] == "result", told
        return torch.from_numpy(np.frombuffer(bytes(content), dtype="<f4").copy())


TIMES = {
    "contiguous": [[9.0], [5.0], [6.0], [6.0]],
    "channels_last": [[9.0], [6.0], [5.0], [6.0]],
    "blocked": [[9.0], [6.0], [6.0], [5.0]],
}


@pytest.mark.parametrize(
    ("fastest", "weight_format"),
    [
        ("contiguous", "safetensors"),
        ("channels_last", "safetensors"),
        ("blocked", "safetensors"),
        ("contiguous", "pth"),
        ("channels_last", "pth"),
    ],
)
def test_every_strategy_answers_within_the_tolerance(
    fastest: str, weight_format: WeightFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        optimization, "_times", lambda contenders, _: TIMES[fastest][: len(contenders)]
    )
    store = Store(tmp_path)
    source = preparation.from_seed(0, "resnet18", "block")
    preparation.prepare(store, "plain", source, weight_format)
    chosen = preparation.optimized(source, weight_format, threads=1)
    model = preparation.prepare(store, "fast", chosen, weight_format)
    assert model.manifest.optimization is not None
    assert model.manifest.optimization.memory_format == fastest
    pipeline = Pipeline(retrievals=2)
    try:
        handler = RequestHandler(store, pipeline)
        expected = logits(handler, "plain", "cicada")
        answers = [logits(handler, "fast", strategy) for strategy in STRATEGIES]
    finally:
        pipeline.close()
    assert (answers[0] - expected).abs().max() <= optimization.TOLERANCE * expected.abs().max()
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


@pytest.fixture
def blocked_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedModel:
    monkeypatch.setattr(optimization, "_times", lambda *_: TIMES["blocked"])
    source = preparation.from_seed(0, "resnet18", "block")
    chosen = preparation.optimized(source, "safetensors", threads=1)
    return preparation.prepare(Store(tmp_path), "fast", chosen, "safetensors")


def test_weights_laid_out_by_another_onednn_are_refused(
    blocked_model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "onednn_version", lambda: "0.1")
    with pytest.raises(
        ModelFault, match=r"laid out for oneDNN [\d.]+, found 0\.1: prepare it again"
    ):
        Plans().of(blocked_model)


@pytest.mark.parametrize("descriptor", ["", "?", "AAAA", "eNoDAAAAAAE="])
def test_a_layout_that_is_none_is_refused(blocked_model: PreparedModel, descriptor: str) -> None:
    with pytest.raises(ModelFault, match=r"'fast': conv1\.weight: its layout"):
        Plans().of(with_layout(blocked_model, descriptor=descriptor))


def test_a_layout_of_another_size_is_refused(blocked_model: PreparedModel) -> None:
    with pytest.raises(ModelFault, match=r"its layout takes \d+ bytes, it has 64"):
        Plans().of(with_layout(blocked_model, bytes=64))


def with_layout(model: PreparedModel, **fields: Any) -> PreparedModel:
    """The model with another layout of its first tensor."""
    first, *others = model.manifest.layers
    tensor, *rest = first.parameters
    assert tensor.blocked is not None
    changed = tensor.model_copy(update={"blocked": tensor.blocked.model_copy(update=fields)})
    layer = first.model_copy(update={"parameters": (changed, *rest)})
    manifest = model.manifest.model_copy(update={"layers": (layer, *others)})
    return replace(model, manifest=manifest)


def test_blocked_weights_do_not_stay_when_their_tensors_go(blocked_model: PreparedModel) -> None:
    """A mapping that the tensors keep alive, and nothing that grows with the requests."""
    store = Store(blocked_model.path.parents[2])
    pipeline = Pipeline(retrievals=2)
    try:
        handler = RequestHandler(store, pipeline)
        for _ in range(20):
            logits(handler, "fast", "cicada")
        before = psutil.Process().memory_info().rss
        for _ in range(300):
            logits(handler, "fast", "cicada")
        assert psutil.Process().memory_info().rss - before < 5 << 20  # 34 KB a request at most
        assert ".safetensors" not in Path("/proc/self/maps").read_text()
    finally:
        pipeline.close()
