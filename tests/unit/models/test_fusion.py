"""Fused chains against torchvision's own models on the same random weights."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from models import catalog, fusion, optimization
from models.fusion import FoldedWeights, FusedConv2d
from models.layers import Architecture
from models.manifest import Granularity, MemoryFormat
from models.random_weights import RandomWeights

SIDE = 64
NAMES = ("resnet18", "resnet50", "resnext50_32x4d", "vgg11", "vgg11_bn")

each_format = pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fused(name: str, memory_format: MemoryFormat, granularity: Granularity) -> Architecture:
    return catalog.architecture(name, granularity=granularity, classes=10, fused=memory_format)


def run(chain: Architecture, weights: RandomWeights, image: Tensor) -> Tensor:
    folded = FoldedWeights(sorted(chain.keys), chain.folded, weights)
    with torch.inference_mode():
        return optimization._Resident(chain, folded).run(image)


def plain(name: str) -> tuple[nn.Module, RandomWeights]:
    weights = RandomWeights(catalog.architecture(name, classes=10), 3)
    model = catalog.torchvision_model(name, classes=10)
    model.load_state_dict(dict(weights))
    return model, weights


@each_format
@pytest.mark.parametrize("granularity", ["stage", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_chain_answers_as_torchvision_within_the_tolerance(
    name: str, granularity: Granularity, memory_format: MemoryFormat
) -> None:
    model, weights = plain(name)
    chain = fused(name, memory_format, granularity)
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    answers = [run(chain, weights, image[None]) for image in images]
    with torch.inference_mode():
        expected = [model(image[None]) for image in images]
    for found, right in zip(answers, expected, strict=True):
        assert (found - right).abs().max() <= optimization.TOLERANCE * right.abs().max()
    assert not torch.equal(answers[0], answers[1])


@each_format
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg11_bn"])
def test_without_onednn_the_answer_is_the_same_within_the_tolerance(
    name: str, memory_format: MemoryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "_ONEDNN", False)
    test_a_fused_chain_answers_as_torchvision_within_the_tolerance(name, "block", memory_format)


@pytest.mark.parametrize("name", NAMES)
def test_every_convolution_is_fused_and_no_normalization_is_left(name: str) -> None:
    chain = fused(name, "contiguous", "block")
    modules = [module for layer in chain.layers for _, module in layer.build().named_modules()]
    convolutions = [module for module in modules if isinstance(module, nn.Conv2d)]
    assert convolutions
    assert all(isinstance(module, FusedConv2d) for module in convolutions)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in modules)
    plain_chain = catalog.architecture(name, classes=10)
    assert [layer.name for layer in chain.layers] == [layer.name for layer in plain_chain.layers]
    gone = plain_chain.keys - chain.keys
    normalizations = {norm.name for norm in chain.folded.values()}
    assert {key.rpartition(".")[0] for key in gone} == normalizations


def test_channels_last_weights_are_so_in_the_chain() -> None:
    places = [
        place
        for layer in fused("resnet50", "channels_last", "block").layers
        for place in layer.tensors
    ]
    for place in places:
        larger_than_a_point = len(place.shape) == 4 and place.shape[2] > 1
        assert place.channels_last == larger_than_a_point, place.key
    contiguous = fused("resnet50", "contiguous", "block")
    assert not any(place.channels_last for layer in contiguous.layers for place in layer.tensors)


def test_a_transformer_has_nothing_to_fuse() -> None:
    chain = fused("vit_b_32", "channels_last", "block")
    assert not chain.fused
    assert chain.keys == catalog.architecture("vit_b_32", classes=10).keys
