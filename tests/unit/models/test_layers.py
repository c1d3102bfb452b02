"""Chains of layers against torchvision's whole models: outputs bit for bit, initialization in distribution."""

import gc
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from models import catalog
from models.layers import Architecture, BuiltLayer
from models.manifest import Granularity
from models.random_weights import RandomWeights

CLASSES = 10
FAMILIES = {"resnet18": 96, "resnext50_32x4d": 64, "vgg11": 64, "vgg11_bn": 64, "vit_b_32": 224}
"""A small model of each family and the side of an image for it."""
SAMPLE = 200_000
"""So many elements of a parameter are looked at: enough for a per cent."""


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    gc.collect()  # hundreds of megabytes of the family just tested


@pytest.fixture(scope="module")
def model(name: str) -> nn.Module:
    """torchvision's model as its constructor initializes it."""
    torch.manual_seed(3)
    return catalog.torchvision_model(name, classes=CLASSES)


@pytest.fixture(scope="module")
def randomized(name: str, model: nn.Module) -> nn.Module:
    """The same with every parameter and buffer random: with zeros and ones much goes unnoticed."""
    del model  # asked for so that its tests, which come first, see it as it was constructed
    whole = catalog.torchvision_model(name, classes=CLASSES)
    whole.load_state_dict(dict(RandomWeights(catalog.architecture(name, classes=CLASSES), 5)))
    return whole


def forward(chain: Architecture, state: dict[str, Tensor], image: Tensor) -> Tensor:
    value = image
    for layer in chain.layers:
        built = layer.build()
        built.bind(state)
        value = built.execute(value)
    return value


@pytest.mark.parametrize("granularity", ["stage", "block"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_chains_output_is_torchvisions_bit_for_bit(
    name: str, randomized: nn.Module, granularity: Granularity, batch: int
) -> None:
    side = FAMILIES[name]
    image = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(batch))
    chain = catalog.architecture(name, granularity=granularity, classes=CLASSES)
    with torch.inference_mode():
        expected = randomized(image)
        found = forward(chain, randomized.state_dict(), image)

    assert found.shape == (batch, CLASSES)
    assert torch.equal(found, expected)
    assert expected.std() > 0


def initialized(name: str, granularity: Granularity) -> Iterator[BuiltLayer]:
    torch.manual_seed(4)
    for layer in catalog.architecture(name, granularity=granularity, classes=CLASSES).layers:
        built = layer.build()
        built.allocate()
        built.initialize()
        yield built


def shape_of_distribution(tensor: Tensor) -> str:
    """`constant`, `uniform` (nothing beyond sqrt(3) deviations) or `tailed`."""
    spread = tensor.std(correction=0)
    if spread == 0:
        return "constant"
    return "uniform" if (tensor - tensor.mean()).abs().max() < 1.8 * spread else "tailed"


@pytest.mark.parametrize("granularity", ["stage", "block"])
def test_initialization_is_torchvisions_in_distribution(
    name: str, model: nn.Module, granularity: Granularity
) -> None:
    expected = model.state_dict()
    seen = set()
    with torch.inference_mode():
        for built in initialized(name, granularity):
            for key, slot in built.layer.slots:
                found = built._structure.at(slot)
                assert found is not None
                seen.add(key)
                assert_alike(key, found, expected[key])
    assert seen == set(expected)


def assert_alike(key: str, found: Tensor, expected: Tensor) -> None:
    """Equal where torchvision's is one value; else of the same mean, deviation and kind.

    Both are samples of n: their means differ by about std * sqrt(2/n), their deviations by std / sqrt(n).
    """
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    found, expected = found.flatten()[:SAMPLE], expected.flatten()[:SAMPLE]
    if expected.numel() < 2 or shape_of_distribution(expected.double()) == "constant":
        assert torch.equal(found, expected), key
        return
    found, expected, count = found.double(), expected.double(), expected.numel()
    spread = expected.std().item()
    assert abs(found.mean() - expected.mean()).item() < 6 * spread * math.sqrt(2 / count), key
    assert found.std().item() == pytest.approx(spread, rel=6 / math.sqrt(count)), key
    if count >= 500:
        assert shape_of_distribution(found) == shape_of_distribution(expected), key


def test_allocation_gives_every_parameter_and_buffer_its_own_memory() -> None:
    layer = catalog.architecture("resnet18").layers[4]
    assert layer.name == "layer1.0"
    built = layer.build()
    assert built.parameter_bytes() == 0

    built.allocate()

    tensors = [built._structure.at(slot) for _, slot in layer.slots]
    assert all(tensor is not None for tensor in tensors)
    addresses = {tensor.data_ptr() for tensor in tensors if tensor is not None}
    assert len(addresses) == len(tensors)
    parameters = [place for place in layer.tensors if place.parameter]
    assert built.parameter_bytes() == sum(4 * math.prod(place.shape) for place in parameters)
    assert [(tuple(t.shape), t.dtype) for t in tensors if t is not None] == [
        (place.shape, place.dtype) for place in layer.tensors
    ]


def test_memory_that_parameters_share_is_counted_once() -> None:
    layer = catalog.architecture("resnet18").layers[1]
    built = layer.build()
    shared = torch.ones(64)
    for slot in layer.parameter_slots:
        built.put(slot, shared)
    assert built.parameter_bytes() == 64 * 4


def test_binding_copies_nothing_and_copying_binds_nothing() -> None:
    layer = catalog.architecture("resnet18").layers[1]
    given = {place.key: torch.full(place.shape, 5, dtype=place.dtype) for place in layer.tensors}
    bound, copied = layer.build(), layer.build()
    bound.bind(given)
    copied.allocate()
    copied.copy(given)
    for key, slot in layer.slots:
        assert bound._structure.at(slot) is given[key]
        found = copied._structure.at(slot)
        assert found is not None
        assert found.data_ptr() != given[key].data_ptr()
        assert torch.equal(found, given[key])


def test_copying_into_nothing_is_a_mistake() -> None:
    layer = catalog.architecture("resnet18").layers[0]
    with pytest.raises(RuntimeError, match=r"conv1\.weight has no memory"):
        layer.build().copy({"conv1.weight": torch.ones(64, 3, 7, 7)})


def test_one_requests_layer_is_not_the_nexts() -> None:
    layer = catalog.architecture("resnet18").layers[0]
    first, second = layer.build(), layer.build()
    first.bind({"conv1.weight": torch.ones(64, 3, 7, 7)})
    assert second.parameter_bytes() == 0
