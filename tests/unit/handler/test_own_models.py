"""Requests on models of the user's: whatever a forward does, in every strategy and format, and in little memory."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from handler.cancellation import Cancellation
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.strategies import STRATEGIES
from models import general, own, preparation
from models.gates import call_with
from models.manifest import WeightFormat
from models.preparation import Source
from models.store import Store
from tests.unit import own_modules
from tests.unit.own_modules import MODULES, ComesBack, Ends, floats

FORMATS: Final[tuple[WeightFormat, ...]] = ("safetensors", "pth")
OWN_MODULES: Final = own_modules.__file__
"""As a file: another top-level package may be called `tests`."""
TIMM: Final = {"model_name": "mobilenetv4_conv_small", "num_classes": 7}

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor"),
    pytest.mark.parametrize("strategy", STRATEGIES),
    pytest.mark.parametrize("weight_format", FORMATS),
]


@pytest.fixture(scope="module", params=[None, 1 << 10], ids=["unbounded", "little memory"])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    pipeline = Pipeline(retrievals=2, ahead_bytes=request.param)
    yield pipeline
    pipeline.close()


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Weights are let go without it, however a module refers to itself."""
    gc.disable()
    yield
    gc.enable()


Prepare = Callable[..., tuple[Store, nn.Module]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Prepares a factory's model in both formats, every part a layer; gives the plain module with its weights too."""
    stores: dict[str, tuple[Store, nn.Module]] = {}

    def prepare(
        make: Callable[..., nn.Module], factory: str, options: dict[str, Any], example: str
    ) -> tuple[Store, nn.Module]:
        key = f"{factory} {options}"
        if key not in stores:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(general, "_LEAST_BYTES", {"block": 0, "stage": 0})
                source = preparation.from_factory(factory, options, example, "block", seed=3)
            store = Store(tmp_path_factory.mktemp("own"))
            for weight_format in FORMATS:
                preparation.prepare(store, weight_format, source, weight_format)
            stores[key] = store, with_weights(make(**options), source)
        return stores[key]

    return prepare


def with_weights(module: nn.Module, source: Source) -> nn.Module:
    aliases = source.architecture.aliases
    state = {key: source.weights[aliases.get(key, key)] for key in module.state_dict()}
    module.load_state_dict(state)
    return module.eval()


def example_of(inputs: Any) -> str:
    if isinstance(inputs, dict):
        return ",".join(f"{name}={example_of(one)}" for name, one in inputs.items())
    return f"{'x'.join(map(str, inputs.shape))}:{str(inputs.dtype).removeprefix('torch.')}"


def asking(model: str, strategy: str, inputs: Any) -> tuple[dict[str, Any], bytearray]:
    tensors = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    header: dict[str, Any] = {
        "type": "infer",
        "id": "one",
        "model": model,
        "version": None,
        "strategy": strategy,
        "input": {"kind": "tensors", "shapes": [list(tensor.shape) for tensor in tensors]},
        "outputs": [],
        "top": 5,
    }
    return header, bytearray(b"".join(tensor.numpy().tobytes() for tensor in tensors))


def answered(
    handler: RequestHandler, header: dict[str, Any], body: bytearray
) -> tuple[dict[str, Any], list[Tensor]]:
    """The answer, and its outputs."""
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()) as (told, content):
        assert told["type"] == "result", told
        outputs, start = [], 0
        for output in told["outputs"]:
            assert output["datatype"] == "FP32"
            part = content[start : start + output["bytes"]]
            values = np.frombuffer(part, "<f4").reshape(output["shape"])
            outputs.append(torch.from_numpy(values.copy()))
            start += output["bytes"]
        assert start == len(content)
        return told, outputs


def are_equal(found: list[Tensor], module: nn.Module, inputs: Any) -> bool:
    with torch.inference_mode():
        expected = [tensor for _, tensor in own.named(call_with(module, inputs))]
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", MODULES)
def test_whatever_a_forward_does_the_answer_is_the_plain_modules(
    prepared: Prepare, pipeline: Pipeline, name: str, strategy: str, weight_format: str
) -> None:
    make, inputs = MODULES[name]
    store, plain = prepared(
        lambda **_: make(), f"{OWN_MODULES}:make", {"name": name}, example_of(inputs)
    )
    handler = RequestHandler(store, pipeline)
    for _ in range(2):  # the second request maps on the weight unit what the first found in memory
        told, found = answered(handler, *asking(weight_format, strategy, inputs))
        assert are_equal(found, plain, inputs)
        executed = [layer for layer, kind, _, _ in told["timeline"]["spans"] if kind == "execute"]
        assert len(executed) == len(set(executed)), "each once"
        assert str(store.root) not in Path("/proc/self/maps").read_text()


def test_a_forward_may_come_back_to_its_layers_more_often_than_on_the_example(
    prepared: Prepare, pipeline: Pipeline, strategy: str, weight_format: str
) -> None:
    store, plain = prepared(ComesBack, f"{OWN_MODULES}:ComesBack", {}, "1x1x5")
    assert [layer.until for layer in store.open(weight_format).manifest.layers] == [0, 1]
    handler = RequestHandler(store, pipeline)
    inputs = floats(2, 3, 5)
    _, found = answered(handler, *asking(weight_format, strategy, inputs))
    assert are_equal(found, plain, inputs)
    assert not are_equal(found, plain, inputs[:, :1]), "another answer"


def test_a_model_of_timms_classifies_images_as_the_plain_one_does(
    prepared: Prepare, pipeline: Pipeline, strategy: str, weight_format: str
) -> None:
    store, plain = prepared(timm.create_model, "timm:create_model", TIMM, "1x3x224x224")
    image = floats(1, 3, 224, 224)
    header, body = asking(weight_format, strategy, image)
    header["input"] = {"kind": "tensor", "datatype": "FP32", "shape": list(image.shape)}
    header["outputs"] = ["logits"]
    told, found = answered(RequestHandler(store, pipeline), header, body)
    assert are_equal(found, plain, image)
    assert len(told["timeline"]["layers"]) > 2


def test_a_forward_that_would_end_the_process_is_a_fault_that_is_named(
    prepared: Prepare, pipeline: Pipeline, strategy: str, weight_format: str
) -> None:
    store, _ = prepared(Ends, f"{OWN_MODULES}:Ends", {}, "1x2")
    header, body = asking(weight_format, strategy, floats(2, 2))
    handler = RequestHandler(store, pipeline)
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()) as (told, _):
        failed = f"model '{weight_format}': its forward failed: SystemExit: too long"
        assert (told["type"], told["status"], told["message"]) == ("error", 500, failed)
