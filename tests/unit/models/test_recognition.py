"""Which architecture a state dict is of; the tensors have shapes only."""

import pytest
import torch
from torch import Tensor

from models import catalog, recognition
from models.checkpoint import CheckpointError


def shapes(name: str, classes: int = 7, image_size: int = 224) -> dict[str, Tensor]:
    chain = catalog.architecture(name, classes=classes, image_size=image_size)
    return {
        place.key: torch.empty(place.shape, dtype=place.dtype, device="meta")
        for layer in chain.layers
        for place in layer.tensors
    }


@pytest.mark.parametrize("name", catalog.NAMES)
def test_each_architecture_is_recognized_and_no_other_fits(name: str) -> None:
    tensors = shapes(name)
    assert recognition.recognize("f", tensors) == name
    fitting = [near.name for near in recognition.nearest("f", tensors) if not near.misfits]
    assert fitting == [name]


def test_neither_prefix_nor_head_nor_counters_nor_image_size_hide_it() -> None:
    tensors = {
        f"model.{key.replace('fc.', 'fc.1.')}": tensor
        for key, tensor in shapes("resnet50").items()
        if "num_batches" not in key
    }
    assert recognition.recognize("f", tensors) == "resnet50"
    assert recognition.recognize("f", shapes("vit_b_16", image_size=384)) == "vit_b_16"


def test_the_nearest_is_suggested_where_none_fits() -> None:
    tensors = shapes("resnet34")
    del tensors["layer3.1.conv1.weight"]
    with pytest.raises(CheckpointError, match="the nearest is resnet34, 1 keys apart"):
        recognition.recognize("file.pth", tensors)


def test_what_is_near_none_is_told_so() -> None:
    with pytest.raises(CheckpointError, match="near no known architecture, it has the keys a, b"):
        recognition.recognize("f", {"a": torch.ones(1), "b": torch.ones(1)})


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("resnet50", "it fits resnet18: give that as --architecture"),
        ("vgg16", "it fits resnet18: give that as --architecture"),
        ("resnet18", None),
    ],
)
def test_advice_after_a_misfit(given: str, advice: str | None) -> None:
    assert recognition.suggestion("f", shapes("resnet18"), instead_of=given) == advice
