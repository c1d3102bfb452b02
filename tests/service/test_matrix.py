"""The paper's ten models: every strategy, format and granularity answers bit for bit as torchvision does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Final

import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor

from bench.worker import Worker
from handler.strategies import STRATEGIES
from models import catalog, preparation
from models.manifest import Granularity, WeightFormat
from models.random_weights import RandomWeights
from models.store import Store

Asked = tuple[dict[str, Any], bytes, Tensor]
"""An input as a request describes it, its body, and torchvision's logits."""

FORMATS: Final[tuple[WeightFormat, ...]] = ("safetensors", "pth")
Logits = Callable[..., Tensor]
SEED = 7
THREADS = 2

pytestmark = pytest.mark.usefixtures("_two_threads")
SMALL_TO_BIG = (
    *("resnet50", "resnet101", "resnet152", "vit_b_16", "vit_b_32"),
    *("vgg11", "vgg13", "vgg16", "vgg19", "vit_l_16"),
)


def test_the_matrix_is_over_the_papers_models() -> None:
    assert sorted(SMALL_TO_BIG) == sorted(catalog.PAPER)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALL_TO_BIG)
def test_logits_equal_torchvisions(name: str, tmp_path: Path, photo: Path, logits: Logits) -> None:
    weights = dict(RandomWeights(catalog.architecture(name), SEED))
    model = catalog.torchvision_model(name)
    model.load_state_dict(weights, strict=True)
    noise = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(SEED))
    with torch.inference_mode():
        of_photo = model(photo_tensor(name, photo))
        of_noise = model(noise)
    del model
    assert not torch.equal(of_photo, of_noise)
    assert of_photo.isfinite().all()

    tensor = {"kind": "tensor", "datatype": "FP32", "shape": list(noise.shape)}
    asked: list[Asked] = [
        ({"kind": "image"}, photo.read_bytes(), of_photo),
        (tensor, noise.numpy().tobytes(), of_noise),
    ]
    store = Store(tmp_path)
    preparing = Lock()

    def check(handler: Worker, granularity: Granularity) -> None:
        for weight_format in FORMATS:
            model = f"{granularity}-{weight_format}"
            with preparing:
                source = replace(preparation.from_seed(SEED, name, granularity), weights=weights)
                preparation.prepare(store, model, source, weight_format)
            for strategy in STRATEGIES:
                for described, body, expected in asked:
                    found = logits(handler, model, strategy, described, body)
                    assert torch.equal(found, expected), (model, strategy, described)
            store.remove(model)

    # Initialization keeps one core at work: a handler for each granularity keeps the other.
    with (
        Worker.handler(tmp_path, THREADS) as first,
        Worker.handler(tmp_path, THREADS) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        for done in [pool.submit(check, first, "stage"), pool.submit(check, second, "block")]:
            done.result()


def photo_tensor(name: str, photo: Path) -> Tensor:
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    with Image.open(photo) as opened:
        prepared: Tensor = preset(opened.convert("RGB"))
    return prepared.unsqueeze(0)
