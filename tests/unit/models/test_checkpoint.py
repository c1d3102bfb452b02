import argparse
import os
import random
import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from models import catalog, checkpoint
from models.checkpoint import CheckpointError, Dimensions
from models.random_weights import RandomWeights


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return dict(RandomWeights(catalog.architecture("resnet18"), seed=0))


@pytest.fixture(scope="module")
def few(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in weights.items() if key.startswith("layer1")}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


Save = Callable[[dict[str, Tensor], Path], None]


def save_zip(weights: dict[str, Tensor], path: Path) -> None:
    torch.save(OrderedDict(weights), path)


def save_legacy(weights: dict[str, Tensor], path: Path) -> None:
    torch.save(weights, path, _use_new_zipfile_serialization=False)


def save_safetensors(weights: dict[str, Tensor], path: Path) -> None:
    safetensors.torch.save_file(weights, path)


def save_training(weights: dict[str, Tensor], path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], momentum=0.9, lr=0.1)
    optimizer.step()
    content = {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": weights,
        "best_acc1": torch.tensor(70.0),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, path)


def save_nested_twice(weights: dict[str, Tensor], path: Path) -> None:
    torch.save({"model": {"state_dict": weights, "step": 1}}, path)


def save_data_parallel(weights: dict[str, Tensor], path: Path) -> None:
    torch.save({f"module.{key}": tensor for key, tensor in weights.items()}, path)


def save_compiled_data_parallel(weights: dict[str, Tensor], path: Path) -> None:
    torch.save({f"_orig_mod.module.{key}": tensor for key, tensor in weights.items()}, path)


def save_parameters(weights: dict[str, Tensor], path: Path) -> None:
    torch.save(
        {k: nn.Parameter(t) if t.is_floating_point() else t for k, t in weights.items()}, path
    )


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors", "weights"])
@pytest.mark.parametrize(
    "save",
    [
        save_zip,
        save_legacy,
        save_safetensors,
        save_training,
        save_nested_twice,
        save_data_parallel,
        save_compiled_data_parallel,
        save_parameters,
    ],
)
def test_each_kind_of_file_is_read_whatever_its_name(
    tmp_path: Path, few: dict[str, Tensor], save: Save, name: str
) -> None:
    save(few, tmp_path / name)
    found = checkpoint.read(tmp_path / name)
    if save is save_safetensors:
        found = {key: found[key] for key in few}  # the library sorts by type and name
    assert_equal(found, few)


def test_of_several_state_dicts_none_is_guessed(tmp_path: Path, few: dict[str, Tensor]) -> None:
    other = {key: tensor + 1 for key, tensor in few.items()}
    path = tmp_path / "weights.pth"
    torch.save({"model": other, "ema": {"average": few}, "net": few}, path)
    found = r"3 state dicts, choose one with --key: model, ema\.average, net"
    with pytest.raises(CheckpointError, match=found):
        checkpoint.read(path)
    assert_equal(checkpoint.read(path, "model"), other)
    assert_equal(checkpoint.read(path, "ema.average"), few)
    with pytest.raises(CheckpointError, match="nothing under 'state_dict'"):
        checkpoint.read(path, "state_dict")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "a dict of 0 entries"),
        ({"epoch": 3, "lr": 0.1}, r"a dict of 2 entries \(epoch: int, lr: float\)"),
        ([1, 2], "a list"),
        (torch.ones(3), "a Tensor"),
        ({3: torch.ones(3, 3)}, "a tensor under 3, expected names"),
        ({"weight": torch.ones(3).to_sparse()}, "not a plain tensor"),
        ({"weight": torch.empty(3, 3, device="meta")}, "not a plain tensor"),
        ({"args": argparse.Namespace(lr=1)}, r"1 entries \(args: argparse\.Namespace\)"),
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_what_is_no_state_dict_is_named(
    tmp_path: Path, content: object, message: str, *, legacy: bool
) -> None:
    path = tmp_path / "weights.pth"
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_whole_pickled_module_beside_other_things_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"epoch": 3, "model": nn.Linear(2, 2)}, path)
    found = r"2 entries .*; a whole pickled module \(torch\.nn\.modules\.linear\.Linear\)"
    with pytest.raises(CheckpointError, match=found):
        checkpoint.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x10\0\0\0\0\0\0\0{not json at all", "not a sound safetensors file"),
        (b"\xff\xfe\xfd of no kind", "cannot be read as a checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_an_error_of_ours(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("save", [save_zip, save_legacy, save_safetensors])
@pytest.mark.parametrize("part", [0.001, 0.1, 0.5, 0.99])
def test_half_a_file_is_an_error_of_ours(
    tmp_path: Path, few: dict[str, Tensor], save: Save, part: float
) -> None:
    path = tmp_path / "weights"
    save(few, path)
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * part))
    with pytest.raises(CheckpointError, match=str(path)):
        checkpoint.read(path)


@pytest.mark.parametrize("save", [save_zip, save_legacy, save_safetensors])
def test_a_damaged_file_never_fails_in_another_way(tmp_path: Path, save: Save) -> None:
    save({"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(())}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "damaged"
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 4, 40))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged[: chance.choice((None, chance.randrange(len(damaged))))])
        try:
            tensors = checkpoint.read(path)
        except CheckpointError:
            refused += 1
        else:
            assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    assert refused > 100


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("function", [os.path.expanduser, exec, eval, getattr, subprocess.call])
def test_no_code_in_a_checkpoint_is_run_while_the_weights_beside_it_are_read(
    tmp_path: Path, few: dict[str, Tensor], function: Callable[..., Any], *, legacy: bool
) -> None:
    made = tmp_path / "made"
    arguments: dict[object, tuple[object, ...]] = {
        os.path.expanduser: ("~",),
        subprocess.call: (("touch", str(made)),),
        getattr: (made, "touch"),
    }
    called = Calls(function, *arguments.get(function, (f"open({str(made)!r}, 'w')",)))
    path = tmp_path / "weights.pth"
    content = {"state_dict": few, "extra": called}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    assert_equal(checkpoint.read(path), few)
    assert not made.exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (os.mkdir, r"posix\.mkdir, a call that no weights need"),
        (Path.mkdir, "a call of what another call gave, which no weights need"),
    ],
)
def test_a_call_that_cannot_be_passed_over_is_refused(
    tmp_path: Path, few: dict[str, Tensor], function: Callable[..., Any], message: str
) -> None:
    content = {"state_dict": few, "extra": Calls(function, tmp_path / "made")}
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(tmp_path / "weights.pth")
    assert not (tmp_path / "made").exists()


def test_a_call_in_the_place_of_the_weights_gives_none(tmp_path: Path) -> None:
    called = Calls(shutil.copyfile, __file__, str(tmp_path / "made"))
    torch.save({"state_dict": called}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"state_dict: shutil\.copyfile"):
        checkpoint.read(tmp_path / "weights.pth")
    assert not (tmp_path / "made").exists()


def test_a_dict_that_holds_itself_ends(tmp_path: Path, few: dict[str, Tensor]) -> None:
    content: dict[str, Any] = {"state_dict": few}
    content["self"] = content
    torch.save(content, tmp_path / "weights.pth")
    assert_equal(checkpoint.read(tmp_path / "weights.pth"), few)


def test_a_pickle_protocol_that_is_not_torch_s_own_is_named(
    tmp_path: Path, few: dict[str, Tensor]
) -> None:
    path = tmp_path / "weights.pth"
    torch.save(few, path, pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"expected the pickle_protocol that torch\.save has"):
        checkpoint.read(path)


def test_weights_that_fit_come_out_as_they_are(weights: dict[str, Tensor]) -> None:
    fitted = checkpoint.fit("f", catalog.architecture("resnet18"), weights)
    assert_equal(dict(fitted), weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    other = {key: t.to(dtype) if t.is_floating_point() else t.int() for key, t in weights.items()}
    fitted = dict(checkpoint.fit("f", catalog.architecture("resnet18"), other))
    model = catalog.torchvision_model("resnet18")
    model.load_state_dict(other)
    assert_equal(fitted, dict(model.state_dict()))


def test_absent_batch_counters_are_zero(weights: dict[str, Tensor]) -> None:
    old = {key: t for key, t in weights.items() if not key.endswith("num_batches_tracked")}
    fitted = checkpoint.fit("f", catalog.architecture("resnet18"), old)
    counter = fitted["layer1.0.bn1.num_batches_tracked"]
    assert torch.equal(counter, torch.zeros((), dtype=torch.int64))
    assert list(fitted) == list(weights)


def test_all_that_does_not_fit_is_listed(weights: dict[str, Tensor]) -> None:
    wrong = dict(weights)
    del wrong["conv1.weight"]
    wrong["extra"] = torch.ones(1)
    wrong["bn1.weight"] = torch.ones(65)
    wrong["bn1.bias"] = torch.ones(64, dtype=torch.int64)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.fit("file.pth", catalog.architecture("resnet18"), wrong)
    assert str(caught.value) == (
        "file.pth does not fit resnet18: 1 missing (conv1.weight); 1 unexpected (extra); "
        "2 misshapen (bn1.weight: found [65], expected [64], "
        "bn1.bias: found torch.int64, expected torch.float32)"
    )


def test_a_long_list_is_cut_and_counted(weights: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.fit("f", catalog.architecture("vgg11"), weights)
    message = str(caught.value)
    assert "22 missing (features.0.weight" in message
    counters = sum("num_batches_tracked" in key for key in weights)
    assert f"{len(weights) - counters} unexpected (conv1.weight" in message
    assert message.count(", ...") == 2


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet50", "fc.weight"),
        ("vgg11_bn", "classifier.6.weight"),
        ("vit_b_32", "heads.head.weight"),
    ],
)
def test_classes_come_from_the_head(name: str, head: str) -> None:
    tensors = {head: torch.empty(7, 3)}
    assert checkpoint.dimensions(name, tensors).classes == 7
    assert checkpoint.dimensions(name, {}) == Dimensions(classes=1000, image_size=224)


@pytest.mark.parametrize(("name", "image_size"), [("vit_b_16", 384), ("vit_h_14", 518)])
def test_a_vit_s_image_size_comes_from_its_positions(name: str, image_size: int) -> None:
    model = catalog.architecture(name, classes=5, image_size=image_size)
    shapes = {p.key: p.shape for layer in model.layers for p in layer.tensors}
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    assert checkpoint.dimensions(name, tensors) == Dimensions(5, image_size)


def test_a_vit_with_torchvision_s_earlier_names_is_read(tmp_path: Path) -> None:
    """torchvision's published ViT files have them: its modules rename them when they load."""
    current = dict(RandomWeights(catalog.architecture("vit_b_32"), 1))
    earlier = {
        key.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): tensor
        for key, tensor in current.items()
    }
    assert earlier.keys() != current.keys()
    expected = catalog.torchvision_model("vit_b_32")
    expected.load_state_dict(OrderedDict(earlier))  # strict, by torchvision's own renaming
    torch.save(earlier, tmp_path / "vit.pth")

    read = checkpoint.read(tmp_path / "vit.pth")
    found = checkpoint.named("vit.pth", "vit_b_32", read).tensors

    assert_equal(dict(sorted(found.items())), dict(sorted(expected.state_dict().items())))
