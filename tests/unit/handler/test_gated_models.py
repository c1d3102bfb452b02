"""Requests on models that are cut by the general way: every strategy and format, and little memory."""

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from handler.cancellation import Cancellation
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.strategies import STRATEGIES
from models import catalog, preparation
from models.manifest import WeightFormat
from models.random_weights import RandomWeights
from models.store import Store

NAMES = ("shufflenet_v2_x0_5", "squeezenet1_1", "densenet121")
FORMATS: Final[tuple[WeightFormat, ...]] = ("safetensors", "pth")


@pytest.fixture(scope="module")
def gated_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("gated"))
    for name in NAMES:
        for weight_format in FORMATS:
            source = preparation.from_seed(3, name, "block")
            preparation.prepare(store, f"{name}-{weight_format}", source, weight_format)
    return store


@pytest.fixture(scope="module", params=[None, 1 << 16], ids=["unbounded", "little memory"])
def handler(request: pytest.FixtureRequest, gated_store: Store) -> Iterator[RequestHandler]:
    pipeline = Pipeline(retrievals=2, ahead_bytes=request.param)
    yield RequestHandler(gated_store, pipeline)
    pipeline.close()


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def plain(name: str) -> nn.Module:
    model = catalog.torchvision_model(name)
    model.load_state_dict(dict(RandomWeights(catalog.architecture(name), 3)))
    return model


def image(name: str) -> Tensor:
    side = catalog.usual_image_size(name)
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(5))


def asking(model: str, strategy: str, value: Tensor) -> dict[str, Any]:
    return {
        "type": "infer",
        "id": "one",
        "model": model,
        "version": None,
        "strategy": strategy,
        "input": {"kind": "tensor", "datatype": "FP32", "shape": list(value.shape)},
        "outputs": ["logits"],
        "top": 5,
    }


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_answer_is_the_plain_models_bit_for_bit(
    handler: RequestHandler, name: str, plain: nn.Module, strategy: str, weight_format: str
) -> None:
    value = image(name)
    header = asking(f"{name}-{weight_format}", strategy, value)
    body = bytearray(value.numpy().tobytes())
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()) as (told, content):
        assert told["type"] == "result", told
        found = torch.from_numpy(np.frombuffer(content, "<f4").copy()).reshape(1, -1)
    with torch.inference_mode():
        expected = plain(value)
    assert torch.equal(found, expected)

    timeline = told["timeline"]
    executed = [layer for layer, kind, _, _ in timeline["spans"] if kind == "execute"]
    assert executed == list(range(len(timeline["layers"]))), "each once, in the forward's order"
    applied = {layer for layer, kind, _, _ in timeline["spans"] if kind == "apply"}
    assert applied == set(executed)
    for layer in executed:
        spans = {kind: (start, end) for of, kind, start, end in timeline["spans"] if of == layer}
        assert spans["construct"][1] <= spans["apply"][0]
        assert spans["apply"][1] <= spans["execute"][0]
    initialized = [kind for _, kind, _, _ in timeline["spans"] if kind == "initialize"]
    assert bool(initialized) == STRATEGIES[strategy].initialize


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_weight_stays_mapped_until_a_collection(
    handler: RequestHandler, gated_store: Store, name: str, strategy: str
) -> None:
    value = image(name)
    header = asking(f"{name}-safetensors", strategy, value)
    gc.collect()
    gc.disable()
    try:
        body = bytearray(value.numpy().tobytes())
        with handler.handling(header, body, time.monotonic_ns(), Cancellation()) as (told, _):
            assert told["type"] == "result", told
        assert str(gated_store.root) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_the_manifest_says_where_the_model_is_cut(gated_store: Store, name: str) -> None:
    manifest = gated_store.open(f"{name}-safetensors").manifest
    chain = catalog.architecture(name)
    assert [(layer.name, layer.parts, layer.until) for layer in manifest.layers] == [
        (cut.name, cut.parts, cut.until) for cut in chain.cuts
    ]


def test_the_next_forward_is_made_once_the_answer_is_sent(
    handler: RequestHandler, gated_store: Store
) -> None:
    model = gated_store.open(f"{NAMES[0]}-safetensors")
    gated = handler._plans.of(model).gated
    assert gated is not None
    value = image(NAMES[0])
    header, body = asking(model.name, "cicada", value), bytearray(value.numpy().tobytes())
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()):
        assert gated._ahead._made is None
    ahead = gated._ahead._made
    assert ahead is not None
    root = weakref.ref(ahead._structure.root)
    del ahead
    gc.disable()
    try:
        gated.discard()
        assert root() is None, "without a collection"
    finally:
        gc.enable()
