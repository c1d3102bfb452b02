from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor

from models import catalog, preparation
from models.manifest import Granularity, WeightFormat
from models.random_weights import RandomWeights
from models.store import PreparedModel, Store


def tensors_of(model: PreparedModel) -> dict[str, Tensor]:
    """All weight files of a model together, without the fillers."""
    tensors: dict[str, Tensor] = {}
    for layer in model.manifest.layers:
        if layer.file is None:
            continue
        path = model.path / layer.file
        if path.suffix == ".pth":
            tensors |= torch.load(path, weights_only=True)
        else:
            tensors |= safetensors.torch.load_file(path)
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("__pad.")}


@pytest.mark.parametrize("weight_format", ["safetensors", "pth"])
@pytest.mark.parametrize("granularity", ["stage", "block"])
@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "vit_b_32"])
def test_the_weight_files_together_are_torchvision_s_state_dict(
    tmp_path: Path, name: str, granularity: Granularity, weight_format: WeightFormat
) -> None:
    source = preparation.from_seed(1, name, granularity)
    written: list[int] = []
    model = preparation.prepare(Store(tmp_path), name, source, weight_format, written.append)
    found = tensors_of(model)
    torchvision_model = catalog.torchvision_model(name)
    torchvision_model.load_state_dict(found)
    for key, tensor in RandomWeights(source.architecture, 1).items():
        assert torch.equal(found[key], tensor)
    assert Store(tmp_path).verify(name) == []
    assert sum(written) == model.bytes >= source.bytes
    assert sum(tensor.nbytes for tensor in found.values()) == source.bytes
    chain = catalog.architecture(name, granularity=granularity)
    assert [layer.name for layer in model.manifest.layers] == [layer.name for layer in chain.layers]
    for entry, layer in zip(model.manifest.layers, chain.layers, strict=True):
        assert [tensor.name for tensor in entry.parameters] == [p.key for p in layer.tensors]
    parameters = [t for layer in model.manifest.layers for t in layer.parameters if t.parameter]
    assert sum(tensor.elements for tensor in parameters) == sum(
        parameter.numel() for parameter in torchvision_model.parameters()
    )


def test_what_the_manifest_says(tmp_path: Path) -> None:
    source = preparation.from_seed(7, "resnet50", "stage")
    model = preparation.prepare(Store(tmp_path), "mine", source, "pth")
    manifest = model.manifest
    assert (manifest.architecture, manifest.granularity) == ("resnet50", "stage")
    assert (manifest.weight_format, manifest.classes, manifest.image_size) == ("pth", 1000, 224)
    assert (manifest.source, manifest.preset) == ("random:7", "IMAGENET1K_V2")
    assert manifest.input is not None
    assert (manifest.input.resize, manifest.input.crop) == (232, 224)
    assert model.labels is not None
    categories = torchvision.models.ResNet50_Weights.DEFAULT.meta["categories"]
    assert list(model.labels) == categories


def test_a_checkpoint_with_a_head_of_its_own(tmp_path: Path) -> None:
    trained = torchvision.models.resnet18(num_classes=3)
    path = tmp_path / "trained.pth"
    torch.save(trained.state_dict(), path)
    source = preparation.from_checkpoint(path, "resnet18", "block")
    model = preparation.prepare(Store(tmp_path / "weights"), "pets", source, "safetensors")
    assert (model.manifest.classes, model.labels) == (3, None)
    assert model.manifest.source == "checkpoint:trained.pth"
    found = tensors_of(model)
    for key, tensor in trained.state_dict().items():
        assert torch.equal(found[key], tensor)


def test_a_vit_checkpoint_of_another_image_size(tmp_path: Path) -> None:
    trained = torchvision.models.vit_b_32(num_classes=2, image_size=96)
    path = tmp_path / "trained.pth"
    torch.save(trained.state_dict(), path)
    source = preparation.from_checkpoint(path, "vit_b_32", "block")
    assert (source.architecture.classes, source.architecture.image_size) == (2, 96)
    assert source.preset is not None
    assert source.preset.input.crop == 96
    model = preparation.prepare(Store(tmp_path / "weights"), "small", source, "safetensors")
    assert model.manifest.image_size == 96
    assert torch.equal(
        tensors_of(model)["encoder.pos_embedding"], trained.encoder.pos_embedding.detach()
    )


def test_the_same_seed_gives_the_same_version_and_another_does_not(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def version(seed: int, granularity: Granularity, weight_format: WeightFormat) -> str:
        source = preparation.from_seed(seed, "resnet18", granularity)
        return preparation.prepare(store, "resnet18", source, weight_format).version

    first = version(0, "block", "safetensors")
    others = {version(1, "block", "safetensors"), version(0, "stage", "safetensors")}
    assert first not in others | {version(0, "block", "pth")}
    assert version(0, "block", "safetensors") == first
