"""Every architecture's chain against torchvision's own model."""

import pytest
import torchvision

from models import catalog
from models.blueprint import structure_only
from models.catalog import UnknownArchitecture
from models.manifest import Granularity

VGG_FEATURES = {
    "vgg11": [0, 3, 6, 8, 11, 13, 16, 18],
    "vgg16_bn": [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40],
}


def names(architecture: str, granularity: Granularity) -> list[str]:
    return [
        layer.name for layer in catalog.architecture(architecture, granularity=granularity).layers
    ]


FAMILIES = ("resnet", "vgg", "vision_transformer")
EXPLICIT = [
    name
    for name in torchvision.models.list_models(module=torchvision.models)
    if torchvision.models.get_model_builder(name).__module__.rpartition(".")[2] in FAMILIES
]
"""Those that have chains of their own."""


def test_it_knows_every_classifier_that_torchvision_has() -> None:
    assert set(catalog.NAMES) == set(torchvision.models.list_models(module=torchvision.models))
    assert len(catalog.NAMES) == len(set(catalog.NAMES)) >= 80
    assert set(catalog.PAPER) < set(EXPLICIT) < set(catalog.NAMES)
    assert len(catalog.PAPER) == 10


@pytest.mark.parametrize("name", EXPLICIT)
@pytest.mark.parametrize("granularity", ["stage", "block"])
def test_the_chains_tensors_are_torchvisions_state_dict(
    name: str, granularity: Granularity
) -> None:
    assert_the_layers_are_the_state_dict(name, granularity)


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(set(catalog.NAMES) - set(EXPLICIT)))
@pytest.mark.parametrize("granularity", ["stage", "block"])
def test_whatever_is_cut_by_the_general_way_keeps_torchvisions_state_dict(
    name: str, granularity: Granularity
) -> None:
    assert_the_layers_are_the_state_dict(name, granularity)


def assert_the_layers_are_the_state_dict(name: str, granularity: Granularity) -> None:
    with structure_only():  # a RegNet's constructor computes, so the meta device will not do
        model = catalog.torchvision_model(name)
    parameters = {key for key, _ in model.named_parameters()}
    expected = {
        key: (tuple(tensor.shape), tensor.dtype, key in parameters)
        for key, tensor in model.state_dict().items()
    }

    chain = catalog.architecture(name, granularity=granularity)

    places = [place for layer in chain.layers for place in layer.tensors]
    assert len(places) == len(expected), "each is in one layer"
    assert {place.key: (place.shape, place.dtype, place.parameter) for place in places} == expected
    assert chain.keys == expected.keys()
    assert len({layer.name for layer in chain.layers}) == len(chain.layers)


@pytest.mark.parametrize("name", [n for n in EXPLICIT if "res" in n])
def test_the_stages_of_a_resnet_are_the_papers(name: str) -> None:
    assert names(name, "stage") == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
        "avgpool",
        "fc",
    ]


@pytest.mark.parametrize("name", [n for n in EXPLICIT if "vgg" in n])
def test_the_stages_of_a_vgg_are_the_papers(name: str) -> None:
    assert names(name, "stage") == ["features", "avgpool", "classifier"]


@pytest.mark.parametrize("name", [n for n in EXPLICIT if "vit" in n])
def test_the_stages_of_a_vit_are_the_papers(name: str) -> None:
    assert names(name, "stage") == ["conv_proj", "class_token", "encoder", "heads"]


def test_the_blocks_of_a_resnet_are_its_residual_blocks() -> None:
    found = names("resnet50", "block")
    assert len(found) == 22
    blocks = [
        (stage + 1, block) for stage, count in enumerate((3, 4, 6, 3)) for block in range(count)
    ]
    assert found == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
        *(f"layer{stage}.{block}" for stage, block in blocks),
        "avgpool",
        "fc",
    ]


@pytest.mark.parametrize("name", VGG_FEATURES)
def test_the_blocks_of_a_vgg_are_its_convolutions_and_linear_layers(name: str) -> None:
    assert names(name, "block") == [
        *(f"features.{number}" for number in VGG_FEATURES[name]),
        "avgpool",
        *(f"classifier.{number}" for number in (0, 3, 6)),
    ]


def test_the_blocks_of_a_vit_are_its_encoder_blocks() -> None:
    assert names("vit_b_16", "block") == [
        "conv_proj",
        "class_token",
        "encoder.pos_embedding",
        *(f"encoder.layers.encoder_layer_{number}" for number in range(12)),
        "encoder.ln",
        "heads",
    ]


def test_classes_and_image_size_change_what_depends_on_them() -> None:
    chain = catalog.architecture("vit_b_16", classes=7, image_size=384)
    shapes = {place.key: place.shape for layer in chain.layers for place in layer.tensors}
    assert shapes["heads.head.weight"] == (7, 768)
    assert shapes["encoder.pos_embedding"] == (1, (384 // 16) ** 2 + 1, 768)
    assert (chain.name, chain.granularity, chain.classes, chain.image_size) == (
        "vit_b_16",
        "block",
        7,
        384,
    )
    fc = catalog.architecture("resnet18", classes=3).layers[-1]
    assert [place.shape for place in fc.tensors] == [(3, 512), (3,)]


def test_architectures_are_kept_since_they_hold_no_weights() -> None:
    assert catalog.architecture("resnet18") is catalog.architecture("resnet18")


@pytest.mark.parametrize(
    ("asked", "told"),
    [("resnet-50", "did you mean .*resnet50"), ("ViT_B_16", "vit_b_16"), ("xyz", "known are")],
)
def test_an_unknown_name_is_told_with_the_nearest(asked: str, told: str) -> None:
    for ask in (catalog.architecture, catalog.torchvision_model):
        with pytest.raises(UnknownArchitecture, match=told):
            ask(asked)


def test_torchvisions_model_is_ready_for_inference() -> None:
    model = catalog.torchvision_model("resnet18", classes=4)
    assert not model.training
    assert model.get_parameter("fc.bias").shape == (4,)
