"""Keys as files have them -> the architecture's, on tensors without memory."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from models import catalog, checkpoint, key_names, recognition
from models.checkpoint import CheckpointError
from models.key_names import Named


def shapes_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: tensor.to("meta") for key, tensor in model.state_dict().items()}


def shapes(name: str, classes: int = 7) -> dict[str, Tensor]:
    chain = catalog.architecture(name, classes=classes)
    return {
        place.key: torch.empty(place.shape, device="meta")
        for layer in chain.layers
        for place in layer.tensors
    }


def named(name: str, tensors: Mapping[str, Tensor]) -> Named:
    return checkpoint.named("file", name, key_names.without_outer_wrappers(tensors))


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "vit_b_32"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda key: key,
        lambda key: f"module.{key}",
        lambda key: f"_orig_mod.module.{key}",
        lambda key: f"module.model._orig_mod.{key}",
        lambda key: f"model.module.net.{key}",
        lambda key: f"_forward_module.model._fsdp_wrapped_module.{key}",
        lambda key: key.replace(".", "._orig_mod.", 1),
        lambda key: key.replace(".0.", "._checkpoint_wrapped_module.0.", 1),
    ],
)
def test_wrappers_go_in_any_order_and_place(name: str, wrap: Callable[[str], str]) -> None:
    tensors = shapes(name)
    found = named(name, {wrap(key): tensor for key, tensor in tensors.items()})
    assert found.tensors == tensors
    assert not found.head


def test_a_key_of_no_model_keeps_its_name() -> None:
    tensors = shapes("resnet18")
    wrapped = {f"model.{key}": tensor for key, tensor in tensors.items()}
    found = named("resnet18", wrapped | {"criterion.weight": torch.empty(7)})
    assert set(found.tensors) == set(tensors) | {"criterion.weight"}
    assert found.prefix == "model."


def test_two_keys_never_become_one() -> None:
    tensors = shapes("resnet18")
    twice = tensors | {"fc.module.weight": torch.empty(1)}
    assert named("resnet18", twice).tensors == twice


def test_two_models_in_one_dict_are_not_chosen_from() -> None:
    tensors = shapes("resnet18")
    both = {f"{who}.{key}": t for who in ("teacher", "student") for key, t in tensors.items()}
    with pytest.raises(CheckpointError, match="2 models, choose one with --key: student, teacher"):
        named("resnet18", both)


def test_a_prefix_is_not_taken_from_another_architecture() -> None:
    tensors = {f"model.{key}": tensor for key, tensor in shapes("vgg11").items()}
    assert named("resnet18", tensors).prefix == ""


def linear(place: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A linear layer's tensors, without values."""
    return {
        f"{place}.weight": torch.empty(shape, device="meta"),
        f"{place}.bias": torch.empty(shape[0], device="meta"),
    }


@pytest.mark.parametrize(
    ("name", "head", "replacements"),
    [
        ("resnet18", "fc", {"fc.1": (7, 512)}),
        ("resnet18", "fc", {"fc.out.linear": (7, 512)}),
        ("vgg11", "classifier.6", {"classifier.6.0": (7, 4096)}),
        ("vit_b_32", "heads.head", {"heads": (7, 768)}),
        ("vit_b_32", "heads.head", {"heads.0": (7, 768)}),
        ("vit_b_32", "heads.head", {"heads.head.1": (7, 768)}),
    ],
)
def test_a_replaced_head_of_one_linear_layer_is_the_head(
    name: str, head: str, replacements: dict[str, tuple[int, int]]
) -> None:
    own = shapes(name)
    tensors = {key: tensor for key, tensor in own.items() if not key.startswith(f"{head}.")}
    for place, shape in replacements.items():
        tensors |= linear(place, shape)
    found = named(name, tensors)
    assert set(found.tensors) == set(own)
    assert set(found.head.values()) == {f"{head}.weight", f"{head}.bias"}
    assert checkpoint.dimensions(name, found.tensors).classes == 7


@pytest.mark.parametrize(
    "head",
    [
        nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 7)),
        nn.Sequential(nn.BatchNorm1d(512), nn.Linear(512, 7)),
        nn.Sequential(nn.Linear(512, 7), nn.PReLU()),
    ],
)
def test_another_head_is_not_taken_for_it_and_the_reason_is_said(head: nn.Module) -> None:
    model = catalog.torchvision_model("resnet18")
    model.fc = head
    found = named("resnet18", shapes_of(model))
    assert not found.head
    assert found.head_trouble is not None
    assert found.head_trouble.startswith("in the place of its linear layer fc the file has fc.")


class FastaiPool(nn.Module):
    """As fastai's AdaptiveConcatPool2d, which has no weights."""


def fastai(model: nn.Module) -> nn.Module:
    """What fastai's vision_learner makes of a ResNet: its body, and a head of two linear layers."""
    return nn.Sequential(
        nn.Sequential(*list(model.children())[:-2]),
        nn.Sequential(
            FastaiPool(),
            nn.Flatten(),
            nn.BatchNorm1d(1024),
            nn.Dropout(0.25),
            nn.Linear(1024, 512, bias=False),
            nn.ReLU(),
            nn.BatchNorm1d(512),
            nn.Dropout(0.5),
            nn.Linear(512, 7, bias=False),
        ),
    )


def test_fastai_s_head_is_not_taken_for_the_architecture_s_and_the_reason_is_said() -> None:
    tensors = shapes_of(fastai(catalog.torchvision_model("resnet34")))
    assert {"0.0.weight", "0.4.0.conv1.weight", "1.8.weight"} < set(tensors)
    found = named("resnet34", tensors)
    assert found.prefix == "0."
    assert not found.head
    assert found.head_trouble is not None
    assert "in the place of its linear layer fc the file has 1.2.weight" in found.head_trouble
    message = (
        r"nearest is resnet34, \d+ keys apart: in the place of its linear layer fc .*--factory"
    )
    with pytest.raises(CheckpointError, match=message):
        recognition.recognize("export.pth", tensors)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("resnet50", {"head.fc": (7, 2048)}),  # MMPretrain
        ("resnet18", {"linear": (7, 512)}),
        ("resnet18", {"classifier.1": (7, 512)}),
        ("vit_b_16", {"head": (7, 768)}),
        ("convnext_tiny", {"head.1": (7, 768)}),
        ("efficientnet_b0", {"classifier": (7, 1280)}),
        ("mobilenet_v2", {"classifier": (7, 1280)}),
        ("mobilenet_v2", {"classifier.1.1": (7, 1280)}),
        ("densenet121", {"classifier.1": (7, 1024)}),
        ("swin_t", {"head.0": (7, 768)}),
        ("regnet_y_400mf", {"fc.1": (7, 440)}),
        ("shufflenet_v2_x1_0", {"fc.1": (7, 1024)}),
    ],
)
def test_one_linear_layer_beside_or_within_a_trainer_s_backbone_is_the_head(
    name: str, heads: dict[str, tuple[int, int]]
) -> None:
    own = shapes(name)
    head = checkpoint.head(catalog.places(name))
    tensors = {f"backbone.{key}": t for key, t in own.items() if not key.startswith(f"{head}.")}
    for place, shape in heads.items():
        inner = place.partition(".")[0] in {key.partition(".")[0] for key in own}
        prefix = f"backbone.{place}" if inner else place
        tensors |= linear(prefix, shape)
    found = named(name, tensors)
    assert set(found.tensors) == set(own)
    assert set(found.head.values()) == {f"{head}.weight", f"{head}.bias"}


def test_a_layer_on_top_of_a_model_that_has_its_head_is_not_taken_for_it() -> None:
    own = shapes("resnet18")
    tensors = {f"backbone.{key}": tensor for key, tensor in own.items()}
    more = {"classifier.weight": torch.empty(3, 7), "classifier.bias": torch.empty(3)}
    found = named("resnet18", tensors | more)
    assert not found.head
    assert set(found.tensors) == set(own) | set(more)


def test_a_trainer_s_own_head_beside_a_model_without_one() -> None:
    own = shapes("resnet18")
    tensors = {f"backbone.{key}": t for key, t in own.items() if not key.startswith("fc.")}
    heads = {"classifier.weight": own["fc.weight"], "classifier.bias": own["fc.bias"]}
    found = named("resnet18", tensors | heads)
    assert found.tensors == own
    assert found.head == {"classifier.weight": "fc.weight", "classifier.bias": "fc.bias"}
    assert (
        "classifier.weight"
        in named("resnet18", tensors | heads | {"loss.m": own["fc.weight"]}).tensors
    )


def test_a_feature_extractor_of_a_resnet_s_children() -> None:
    model = catalog.torchvision_model("resnet18", classes=7)
    extractor = nn.ModuleDict(
        {
            "feature_extractor": nn.Sequential(*list(model.children())[:-1]),
            "classifier": nn.Linear(512, 7),
        }
    )
    assert "feature_extractor.4.0.conv1.weight" in extractor.state_dict()
    found = named("resnet18", shapes_of(extractor))
    assert set(found.tensors) == set(model.state_dict())
    whole = named("resnet18", shapes_of(nn.Sequential(*model.children())))
    assert set(whole.tensors) == set(model.state_dict())
