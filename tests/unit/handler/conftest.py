"""A small prepared model in both weight formats, which the tests of real requests share."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from models import catalog, pretrained
from models.manifest import InputSpec
from models.preparation import Source, prepare
from models.pretrained import Preset
from models.random_weights import RandomWeights
from models.store import Store

CLASSES = 10
SIDE = 64


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """A team of OpenMP spins beside whatever else the machine runs; test_openmp starts one, in a process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """`resnet18-safetensors` and `resnet18-pth`: random weights, 10 classes, images of 64 x 64."""
    store = Store(tmp_path_factory.mktemp("weights"))
    chain = catalog.architecture("resnet18", classes=CLASSES)
    usual = pretrained.preset("resnet18", 224).input
    spec = InputSpec.model_validate(usual.model_dump() | {"resize": SIDE, "crop": SIDE})
    source = Source("random:0", chain, RandomWeights(chain, 0), Preset("", spec))
    prepare(store, "resnet18-safetensors", source, "safetensors")
    prepare(store, "resnet18-pth", source, "pth")
    return store


@pytest.fixture(scope="session")
def resnet18() -> nn.Module:
    """torchvision's own model with the weights of the store."""
    model = catalog.torchvision_model("resnet18", classes=CLASSES)
    weights = RandomWeights(catalog.architecture("resnet18", classes=CLASSES), 0)
    model.load_state_dict(dict(weights))
    return model


@pytest.fixture(scope="session")
def image() -> torch.Tensor:
    """An input of the model, 1 x 3 x 64 x 64."""
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def expected(resnet18: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """The logits of torchvision's forward."""
    with torch.inference_mode():
        logits: torch.Tensor = resnet18(image)
    return logits
