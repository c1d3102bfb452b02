"""Checkpoints as people have them: `cicada prepare`, then a request, beside plain torchvision on the same weights."""

import argparse
import copy
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner, Result

from handler.cancellation import Cancellation
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from models import catalog
from models.random_weights import RandomWeights
from models.store import PreparedModel, Store
from runtime.cli import app

SIDE: Final = 64
CLASSES: Final = 3

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    pipeline = Pipeline(retrievals=2)
    yield pipeline
    pipeline.close()


@pytest.fixture(scope="module")
def weights() -> Weights:
    return dict(RandomWeights(catalog.architecture("resnet18", classes=CLASSES), 0))


@pytest.fixture
def plain(weights: Weights) -> nn.Module:
    """torchvision's own, for the test to change as users do."""
    model = catalog.torchvision_model("resnet18", classes=CLASSES)
    model.load_state_dict(weights)
    return model


def asked(store: Store, pipeline: Pipeline, image: Tensor, strategy: str = "cicada") -> Tensor:
    """The logits that a request for `mine` gets."""
    header = {
        "type": "infer",
        "id": "one",
        "model": "mine",
        "version": None,
        "strategy": strategy,
        "received_ns": time.monotonic_ns(),
        "input": {"kind": "tensor", "datatype": "FP32", "shape": list(image.shape)},
        "outputs": ["logits"],
        "top": 5,
    }
    body = bytearray(image.numpy().tobytes())
    handler = RequestHandler(store, pipeline)
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()) as (told, content):
        assert told["type"] == "result", told
        (output,) = told["outputs"]
        values = np.frombuffer(content, dtype="<f4").reshape(output["shape"])
        return torch.from_numpy(values.copy())


@dataclass(frozen=True, slots=True)
class Prepared:
    result: Result
    model: PreparedModel
    answer: Tensor

    @property
    def said(self) -> str:
        return self.result.stderr


Prepare = Callable[..., Prepared]


@pytest.fixture
def prepare(tmp_path: Path, pipeline: Pipeline, image: Tensor) -> Prepare:
    """Prepares `mine` from the file and asks it for the image's logits."""

    def run(file: Path, *options: str) -> Prepared:
        store = Store(tmp_path / "weights")
        words = ("prepare", "mine", "--checkpoint", str(file), "--weights", str(store.root))
        result = CliRunner().invoke(app, [*words, "--crop", str(SIDE), *options])
        assert result.exit_code == 0, result.output
        return Prepared(result, store.open("mine"), asked(store, pipeline, image))

    return run


def forward(model: nn.Module, image: Tensor) -> Tensor:
    with torch.inference_mode():
        answer: Tensor = model.eval()(image)
    return answer


def legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def as_on_gpu(save: Callable[[object, Path], None]) -> Callable[[object, Path], None]:
    """Writes what torch.save writes of tensors in a GPU's memory: the place's name is all that differs."""

    def run(content: object, path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda _storage: "cuda:1")
            save(content, path)
        assert b"cuda:1" in path.read_bytes()

    return run


def beside_training(weights: Weights) -> dict[str, Any]:
    """What training scripts save, with numbers of NumPy, arguments and a scheduler among it."""
    parameter = nn.Parameter(torch.ones(3, 3))
    parameter.grad = torch.ones(3, 3)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    losses = defaultdict(list)
    losses["train"].append(np.float32(0.5))
    return {
        "epoch": 90,
        "arch": "resnet18",
        "state_dict": OrderedDict(weights),
        "best_acc1": torch.tensor(70.0),
        "best_loss": np.float64(0.25),
        "confusion": np.eye(3),
        "seen": torch.empty(0),
        "optimizer": optimizer.state_dict(),
        "optimizer_class": torch.optim.Adam,
        "args": argparse.Namespace(lr=0.1, data=Path("/data")),
        "losses": losses,
        "numpy_state": np.random.RandomState(0).get_state(),
    }


def reference_script(weights: Weights) -> dict[str, Any]:
    """What torchvision's references/classification/train.py saves, with a scheduler that holds another."""
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=1)
    main = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main], [1])
    parameter.grad = torch.ones(3, 3)
    optimizer.step()
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, output_dir="."),
        "scaler": {"scale": 65536.0, "_growth_tracker": 0},
    }


class HyperParameters(dict[str, object]):
    """As a trainer's own class of dicts."""


class Callback:
    """As a trainer's; its class is a key of what is saved."""


def lightning(weights: Weights) -> dict[str, Any]:
    hyper_parameters = HyperParameters(lr=0.1, backbone="resnet18")
    hyper_parameters.frozen = True  # type: ignore[attr-defined]
    return {
        "pytorch-lightning_version": "2.4.0",
        "epoch": 3,
        "state_dict": {f"model.{key}": tensor for key, tensor in weights.items()},
        "callbacks": {Callback: {"best": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2, 2)}}}],
        "hyper_parameters": hyper_parameters,
        "loops": {"fit_loop": {"state_dict": {}}},
    }


def wrapped(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + key: tensor for key, tensor in weights.items()}


def shared(weights: Weights) -> Weights:
    """Views into one storage that is ten times as large as they are, at odd places in it."""
    total = sum(tensor.numel() for tensor in weights.values() if tensor.is_floating_point())
    large = torch.zeros(10 * total)
    views, start = {}, 7
    for key, tensor in weights.items():
        if tensor.is_floating_point():
            views[key] = large[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel() + 3
        else:
            views[key] = tensor
    return views


def strided(weights: Weights) -> Weights:
    """Convolutions in channels-last order, matrices transposed, vectors as every second element."""

    def changed(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4:
            return tensor.to(memory_format=torch.channels_last)
        if tensor.dim() == 2:
            return tensor.T.contiguous().T
        if tensor.dim() == 1:
            return tensor.repeat_interleave(2)[::2]
        return tensor

    return {key: changed(tensor) for key, tensor in weights.items()}


def without_counters(weights: Weights) -> Weights:
    return {key: value for key, value in weights.items() if "num_batches" not in key}


def with_odd_counters(weights: Weights) -> Weights:
    """A counter too many, one of another form, one that float16 could not hold."""
    odd = {"bn1.num_batches_tracked": torch.tensor([5]), "fc.num_batches_tracked": torch.tensor(5)}
    infinite = {"layer1.0.bn1.num_batches_tracked": torch.tensor(torch.inf).half()}
    return weights | odd | infinite


def nested(weights: Weights) -> dict[str, Any]:
    return {"model": {"state_dict": weights, "step": 1}}


def plain_weights(weights: Weights) -> Weights:
    return weights


def with_a_number(weights: Weights) -> dict[str, Any]:
    return {**weights, "epoch": 3, "name": "mine"}


KINDS: Final[dict[str, tuple[Callable[[Weights], Any], Callable[[Any, Path], None]]]] = {
    "zip": (OrderedDict, torch.save),
    "legacy": (plain_weights, legacy),
    "safetensors": (plain_weights, safetensors.torch.save_file),
    "gpu": (plain_weights, as_on_gpu(torch.save)),
    "gpu legacy": (plain_weights, as_on_gpu(legacy)),
    "training": (beside_training, torch.save),
    "training legacy": (beside_training, legacy),
    "nested": (nested, torch.save),
    "nested legacy": (nested, legacy),
    "reference script": (reference_script, torch.save),
    "lightning": (lightning, torch.save),
    "lightning legacy": (lightning, legacy),
    "more than tensors": (with_a_number, torch.save),
    "data parallel": (wrapped("module."), torch.save),
    "compiled": (wrapped("_orig_mod."), torch.save),
    "compiled, data parallel": (wrapped("module._orig_mod."), torch.save),
    "data parallel, compiled": (wrapped("_orig_mod.module."), torch.save),
    "trainer, data parallel, compiled": (wrapped("model.module._orig_mod."), torch.save),
    "data parallel, trainer, compiled": (wrapped("module.net._orig_mod."), torch.save),
    "trainer in safetensors": (wrapped("backbone."), safetensors.torch.save_file),
    "views": (shared, torch.save),
    "views legacy": (shared, legacy),
    "strides": (strided, torch.save),
    "strides legacy": (strided, legacy),
    "no counters": (without_counters, torch.save),
    "odd counters": (with_odd_counters, torch.save),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_answers_as_torchvision_does(
    kind: str, weights: Weights, plain: nn.Module, prepare: Prepare, image: Tensor, tmp_path: Path
) -> None:
    content, save = KINDS[kind]
    save(content(weights), tmp_path / "file")
    prepared = prepare(tmp_path / "file")
    assert torch.equal(prepared.answer, forward(plain, image))
    assert prepared.model.manifest.architecture == "resnet18"
    assert "the keys and shapes are those of resnet18" in prepared.said
    needed = sum(tensor.nbytes for tensor in weights.values())
    assert needed < prepared.model.bytes < 1.01 * needed


def test_what_is_left_out_and_taken_away_is_said(
    weights: Weights, prepare: Prepare, tmp_path: Path
) -> None:
    torch.save(with_a_number(weights), tmp_path / "a")
    said = prepare(tmp_path / "a", "--architecture", "resnet18").said
    assert "left out, since they are no tensors: epoch (int), name (str)" in said
    assert "the keys and shapes" not in said
    torch.save(lightning(weights), tmp_path / "b")
    assert "every key was taken without its 'model.'" in prepare(tmp_path / "b").said


def test_an_averaged_model_is_chosen_by_its_key(
    plain: nn.Module, prepare: Prepare, image: Tensor, tmp_path: Path
) -> None:
    averaged = AveragedModel(plain)
    averaged.update_parameters(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.01)
    file = tmp_path / "file"
    torch.save({"model": plain.state_dict(), "model_ema": averaged.state_dict()}, file)
    first = prepare(file, "--key", "model").answer
    second = prepare(file, "--key", "model_ema").answer
    assert torch.equal(first, forward(plain, image))
    assert torch.equal(second, forward(averaged.module, image))
    assert not torch.equal(first, second)


def test_one_of_several_models_in_one_dict_is_chosen_by_its_prefix(
    weights: Weights, plain: nn.Module, prepare: Prepare, image: Tensor, tmp_path: Path
) -> None:
    other = dict(RandomWeights(catalog.architecture("resnet18", classes=CLASSES), 1))
    both = wrapped("teacher.")(other) | wrapped("student.")(weights)
    torch.save({"state_dict": both}, tmp_path / "file")
    prepared = prepare(tmp_path / "file", "--key", "state_dict.student")
    assert torch.equal(prepared.answer, forward(plain, image))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("save", [torch.save, legacy, safetensors.torch.save_file])
def test_other_precisions_become_float32(
    dtype: torch.dtype,
    save: Callable[[object, Path], None],
    plain: nn.Module,
    prepare: Prepare,
    image: Tensor,
    tmp_path: Path,
) -> None:
    found = copy.deepcopy(plain).to(dtype)
    save(found.state_dict(), tmp_path / "file")
    prepared = prepare(tmp_path / "file")
    assert torch.equal(prepared.answer, forward(found.float(), image))
    assert prepared.model.manifest.dtype == "F32"
    names = {torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
    assert prepared.model.manifest.found_dtypes == (names[dtype],)


def test_mixed_precisions_become_float32(
    plain: nn.Module, prepare: Prepare, image: Tensor, tmp_path: Path
) -> None:
    plain.layer1.half()
    plain.layer2.double()
    plain.fc.bfloat16()
    torch.save(plain.state_dict(), tmp_path / "file")
    prepared = prepare(tmp_path / "file")
    assert torch.equal(prepared.answer, forward(plain.float(), image))
    assert prepared.model.manifest.found_dtypes == ("BF16", "F16", "F64")
    shown = CliRunner().invoke(app, ["inspect", "mine", "--weights", str(tmp_path / "weights")])
    assert "BF16, F16, F64" in shown.stdout


@pytest.mark.parametrize("strategy", ["cicada", "traditional"])
@pytest.mark.parametrize("weight_format", ["safetensors", "pth"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_chosen_precision_is_computed_in(
    dtype: torch.dtype,
    weight_format: str,
    strategy: str,
    weights: Weights,
    plain: nn.Module,
    prepare: Prepare,
    pipeline: Pipeline,
    image: Tensor,
    tmp_path: Path,
) -> None:
    torch.save(weights, tmp_path / "file")
    name = str(dtype).removeprefix("torch.")
    prepared = prepare(tmp_path / "file", "--dtype", name, "--format", weight_format)
    answer = asked(Store(tmp_path / "weights"), pipeline, image, strategy)
    expected = forward(plain.to(dtype), image.to(dtype)).float()
    assert torch.equal(answer, expected)
    assert prepared.model.manifest.sizes.weights == sum(
        tensor.nbytes for tensor in plain.state_dict().values()
    )


@pytest.mark.parametrize(
    "head",
    [
        lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(512, 4)),
        lambda: nn.Sequential(OrderedDict(drop=nn.Dropout(0.5), out=nn.Linear(512, 4))),
        lambda: nn.Sequential(nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Linear(512, 4))),
    ],
)
def test_a_resnet_s_replaced_head(
    head: Callable[[], nn.Module],
    plain: nn.Module,
    prepare: Prepare,
    image: Tensor,
    tmp_path: Path,
) -> None:
    plain.fc = head()
    torch.save(plain.state_dict(), tmp_path / "file")
    prepared = prepare(tmp_path / "file")
    assert torch.equal(prepared.answer, forward(plain, image))
    assert prepared.model.manifest.classes == 4
    assert "the head was replaced" in prepared.said
    assert "as fc.weight" in prepared.said


def replace_vit_heads(model: Any) -> None:
    model.heads = nn.Linear(768, 5)


def replace_vit_head(model: Any) -> None:
    model.heads.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(768, 5))


def replace_vgg_classifier(model: Any) -> None:
    model.classifier[6] = nn.Sequential(nn.Dropout(0.1), nn.Linear(4096, 5))


def wrap_vgg_features(model: Any) -> None:
    """As the ImageNet example of torch did for VGG: data parallel convolutions alone."""
    model.features = nn.Sequential(OrderedDict(module=model.features))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("vit_b_32", replace_vit_heads),
        ("vit_b_32", replace_vit_head),
        ("vgg11", replace_vgg_classifier),
        ("vgg11", wrap_vgg_features),
    ],
)
def test_the_other_families_replaced_heads_and_wrapped_parts(
    name: str,
    change: Callable[[nn.Module], None],
    prepare: Prepare,
    image: Tensor,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    size = SIDE if name.startswith("vit") else 224
    model = catalog.torchvision_model(name, classes=5, image_size=size)
    chain = catalog.architecture(name, classes=5, image_size=size)
    model.load_state_dict(dict(RandomWeights(chain, 0)))
    change(model)
    torch.save(model.state_dict(), tmp_path / "file")
    prepared = prepare(tmp_path / "file")
    assert torch.equal(prepared.answer, forward(model, image))
    assert prepared.model.manifest.architecture == name


@pytest.mark.parametrize("save", [torch.save, legacy, safetensors.torch.save_file])
def test_weights_that_are_no_numbers_are_named_and_kept(
    save: Callable[[object, Path], None],
    weights: Weights,
    prepare: Prepare,
    tmp_path: Path,
) -> None:
    broken = {key: tensor.clone() for key, tensor in weights.items()}
    broken["layer1.0.conv1.weight"][0, :2] = torch.nan
    broken["fc.bias"][1] = -torch.inf
    save(broken, tmp_path / "file")
    prepared = prepare(tmp_path / "file")
    assert (
        "NaN or infinite, so that answers may be: "
        "layer1.0.conv1.weight (18 values), fc.bias (1 values)"
    ) in prepared.said
    assert not torch.isfinite(prepared.answer).any()
