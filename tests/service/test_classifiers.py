"""torchvision's classifiers, each prepared and served by a handler process: the answers are torchvision's, bit for bit.

Here one of each family; all eighty with `make classifiers`, which is `pytest --every-classifier` on this file.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from bench.worker import Worker
from models import catalog, preparation
from models.random_weights import RandomWeights
from models.store import Store

Logits = Callable[..., Tensor]
SEED = 11
THREADS = 2

pytestmark = pytest.mark.usefixtures("_two_threads")


def family(name: str) -> str:
    """torchvision's module that makes it."""
    module: str = torchvision.models.get_model_builder(name).__module__
    return module.rpartition(".")[2]


def size(name: str) -> int:
    """Its number of parameters."""
    parameters: int = torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"]
    return parameters


SMALL_TO_BIG = sorted(catalog.NAMES, key=size)
SMALLEST = list({family(name): name for name in reversed(SMALL_TO_BIG)}.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-classifier")
        metafunc.parametrize("name", SMALL_TO_BIG if every else SMALLEST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifiers")


@pytest.fixture(scope="module")
def handler(folder: Path) -> Iterator[Worker]:
    with Worker.handler(folder, THREADS) as handler:
        yield handler


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """The handler's; it is emptied after each test: all models together take 22 GB."""
    store = Store(folder)
    yield store
    for name in store.names():
        store.remove(name)


def test_the_families_are_all_of_torchvisions() -> None:
    assert len(SMALL_TO_BIG) >= 80
    assert {family(name) for name in SMALLEST} == {family(name) for name in SMALL_TO_BIG}
    assert len(SMALLEST) == 17


@pytest.mark.timeout(900)
def test_its_answers_are_torchvisions(
    store: Store, handler: Worker, photo: Path, name: str, logits: Logits
) -> None:
    weights = dict(RandomWeights(catalog.architecture(name), SEED))
    source = replace(preparation.from_seed(SEED, name, "block"), weights=weights)
    prepared = preparation.prepare(store, name, source, "safetensors")
    plain = with_weights(catalog.torchvision_model(name), weights)
    noise = random_images(prepared.manifest.image_size)
    with torch.inference_mode():
        of_photo, of_noise = (
            plain(photo_tensor(name, prepared.manifest.preset, photo)),
            plain(noise),
        )
    del weights, source, plain
    assert of_photo.isfinite().all()
    assert of_photo.std() > 0
    assert not torch.equal(of_photo, of_noise)

    described = {"kind": "tensor", "datatype": "FP32", "shape": list(noise.shape)}
    for strategy in ("cicada", "traditional"):
        found = logits(handler, name, strategy, described, noise.numpy().tobytes())
        assert torch.equal(found, of_noise), strategy
    found = logits(handler, name, "cicada", {"kind": "image"}, photo.read_bytes())
    assert torch.equal(found, of_photo)


def with_weights(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The state dict's metadata say which version of a model it is."""
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for key, tensor in weights.items():
        state[key] = tensor
    model.load_state_dict(state)
    return model


def random_images(side: int) -> Tensor:
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(SEED))


def photo_tensor(name: str, preset: str, photo: Path) -> Tensor:
    transforms: Any = torchvision.models.get_model_weights(name)[preset].transforms()
    with Image.open(photo) as opened:
        prepared: Tensor = transforms(opened.convert("RGB"))
    return prepared.unsqueeze(0)
