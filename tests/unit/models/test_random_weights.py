import numpy as np
import pytest
import torch
from PIL import Image

from models import catalog
from models.random_weights import RandomWeights

NAMES = ("resnet18", "resnet50", "resnext50_32x4d", "vgg11", "vgg11_bn", "vit_b_32")


def test_keys_shapes_and_types_are_torchvision_s() -> None:
    for name in NAMES:
        expected = catalog.torchvision_model(name).state_dict()
        weights = RandomWeights(catalog.architecture(name), seed=0)
        assert set(weights) == set(expected)
        for key, tensor in expected.items():
            assert weights[key].shape == tensor.shape
            assert weights[key].dtype == tensor.dtype


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_is_constant(name: str) -> None:
    for key, tensor in RandomWeights(catalog.architecture(name), seed=0).items():
        assert tensor.isfinite().all(), key
        if tensor.dim():
            assert tensor.std() > 0, key
        else:
            assert tensor > 0, key


def test_a_tensor_depends_on_seed_and_key_alone() -> None:
    block = RandomWeights(catalog.architecture("resnet18", granularity="block"), seed=3)
    stage = RandomWeights(catalog.architecture("resnet18", granularity="stage"), seed=3)
    other = RandomWeights(catalog.architecture("resnet18"), seed=4)
    for key in reversed(list(block)):
        assert torch.equal(block[key], stage[key])
        assert not torch.equal(block[key], other[key])
    assert not torch.equal(block["layer1.0.conv1.weight"], block["layer1.0.conv2.weight"])


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    dict(RandomWeights(catalog.architecture("resnet18"), seed=0))
    assert torch.equal(torch.rand(3), expected)


def inputs(photo: Image.Image) -> torch.Tensor:
    """Two of noise, a photo and its mirror image."""
    noise = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(np.array(photo.convert("RGB").resize((224, 224)))).permute(2, 0, 1)
    normal = (pixels / 255 - 0.45) / 0.225
    return torch.cat([noise, torch.stack([normal, normal.flip(-1)])])


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_moderate_and_differ_between_images(name: str, photo: str) -> None:
    model = catalog.torchvision_model(name)
    model.load_state_dict(RandomWeights(catalog.architecture(name), seed=0))
    with Image.open(photo) as image, torch.inference_mode():
        logits = model(inputs(image))
    assert logits.isfinite().all()
    assert (logits.std(dim=1) > 0.5).all()
    assert (logits.std(dim=1) < 10).all()
    assert len(set(logits.argmax(dim=1).tolist())) >= 2
    for first in range(4):
        for second in range(first):
            difference = (logits[first] - logits[second]).std()
            assert difference > 0.2 * logits.std()
