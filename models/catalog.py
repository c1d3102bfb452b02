"""The architectures that Cicada knows, by torchvision's names."""

import difflib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torchvision
from pydantic import JsonValue
from torch import Tensor, nn

from models import fusion, general, resnet, vgg, vit
from models.blueprint import structure_only
from models.errors import ModelError
from models.layers import Architecture, Cut, Layer, TensorPlace
from models.manifest import Granularity, MemoryFormat

Chain = Callable[[Any, Granularity], Iterator[Layer]]

_FAMILIES: Final[dict[Chain, tuple[str, ...]]] = {
    resnet.layers: (
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "resnext50_32x4d",
        "resnext101_32x8d",
        "resnext101_64x4d",
        "wide_resnet50_2",
        "wide_resnet101_2",
    ),
    vgg.layers: (
        "vgg11",
        "vgg11_bn",
        "vgg13",
        "vgg13_bn",
        "vgg16",
        "vgg16_bn",
        "vgg19",
        "vgg19_bn",
    ),
    vit.layers: ("vit_b_16", "vit_b_32", "vit_h_14", "vit_l_16", "vit_l_32"),
}
"""Those with chains of their own. The general way serves them too, with the same bits, but slower: the medians of the
ratios to the resident forward, five starts in turn, were 1.056 instead of 1.044 for resnet50, 0.998 instead of 0.982
for vit_b_16 and the same for vgg16. And it finds no layer that has no weights, so that of a ResNet's ten stages in
the paper six are left; and what runs as a module's own forward cannot be fused (`models/fusion.py`)."""
_CHAINS: Final[dict[str, Chain]] = {
    name: chain for chain, names in _FAMILIES.items() for name in names
}

NAMES: Final[tuple[str, ...]] = tuple(torchvision.models.list_models(module=torchvision.models))
"""torchvision's classifiers. Those of the families above have chains of their own; the others are cut
by the general way."""
PAPER: Final[tuple[str, ...]] = (
    "resnet50",
    "resnet101",
    "resnet152",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "vit_b_16",
    "vit_b_32",
    "vit_l_16",
)
"""The ten models of the paper's evaluation."""


class UnknownArchitecture(ModelError):
    """No architecture of that name; the message suggests the nearest."""

    def __init__(self, name: str) -> None:
        near = difflib.get_close_matches(name, NAMES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(NAMES)}"
        super().__init__(f"there is no architecture {name!r}: {hint}")


_OPTIONS: Final[Mapping[str, Mapping[str, JsonValue]]] = {
    name: {"aux_logits": False, "init_weights": False} for name in ("googlenet", "inception_v3")
}
"""Of builders: these two's further heads serve training alone."""
_TRAINING_ONLY: Final = ("aux1.", "aux2.", "AuxLogits.")
"""How the keys of those heads begin, which checkpoints of the two may have."""


def options_of(name: str, *, pretrained: bool = False) -> dict[str, JsonValue]:
    """What torchvision's builder of that name is given besides classes and image size.

    pretrained: for torchvision's own weights, which want images normalized as they were trained on.
    """
    options = dict(_OPTIONS.get(name, {}))
    return options | {"transform_input": True} if options and pretrained else options


def without_training_heads(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the heads that serve training alone."""
    heads = _TRAINING_ONLY if name in _OPTIONS else ()
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(heads)}


def usual_image_size(name: str) -> int:
    """Side in pixels of the images for which torchvision's default weights are. Raises UnknownArchitecture."""
    _check(name)
    if name in _CHAINS:
        return 224
    side: int = torchvision.models.get_model_weights(name).DEFAULT.transforms().crop_size[0]
    return side


def torchvision_model(
    name: str,
    *,
    classes: int = 1000,
    image_size: int = 224,
    options: Mapping[str, JsonValue] | None = None,
) -> nn.Module:
    """torchvision's own model in `eval()`, weights as its constructor initializes them.

    `image_size` matters to ViT and MaxViT alone; the other families take any size.
    """
    _check(name)
    given: dict[str, Any] = {**options_of(name), **(options or {})}
    if name.startswith("vit"):
        given["image_size"] = image_size
    elif name.startswith("maxvit"):
        given["input_size"] = (image_size, image_size)
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=classes, **given
    )
    return model.eval()


@functools.cache
def places(name: str) -> Mapping[str, TensorPlace]:
    """The keys of torchvision's state dict with their shapes and types, as it has them by default.

    Raises UnknownArchitecture.
    """
    with structure_only():
        model = torchvision_model(name)
    parameters = {key for key, _ in model.named_parameters()}
    return {
        key: TensorPlace(key, tuple(tensor.shape), tensor.dtype, key in parameters)
        for key, tensor in model.state_dict().items()
    }


def _check(name: str) -> None:
    if name not in NAMES:
        raise UnknownArchitecture(name)


def architecture(
    name: str,
    *,
    granularity: Granularity = "block",
    classes: int = 1000,
    image_size: int | None = None,
    fused: MemoryFormat | None = None,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, JsonValue] | None = None,
    cuts: Sequence[Cut] | None = None,
) -> Architecture:
    """torchvision's `name` as layers. It holds structure, no weights, so it may be kept.

    image_size: the usual one if it is not given.
    fused: with convolutions that are fused with what follows them, their weights in that memory format;
        a model that is cut by the general way stays as it is.
    cuts: where the general way cuts it; found anew if they are not given.

    Raises UnknownArchitecture, and what torchvision's constructors raise for sizes and options that they
    cannot be built for.
    """
    side = usual_image_size(name) if image_size is None else image_size
    encoded = json.dumps({**options_of(name), **(options or {})}, sort_keys=True)
    found = None if cuts is None or name in _CHAINS else tuple(cuts)
    return _architecture(name, granularity, classes, side, fused, dtype, encoded, found)


@functools.lru_cache(maxsize=16)
def _architecture(
    name: str,
    granularity: Granularity,
    classes: int,
    image_size: int,
    fused: MemoryFormat | None,
    dtype: torch.dtype,
    options: str,
    cuts: tuple[Cut, ...] | None,
) -> Architecture:
    def make() -> nn.Module:
        given = json.loads(options)
        return torchvision_model(name, classes=classes, image_size=image_size, options=given)

    if name in _CHAINS:
        with structure_only():
            model = make()
        taken = {} if fused is None else fusion.fuse(model, fused)
        chain = tuple(_CHAINS[name](model.to(dtype), granularity))
        return Architecture(
            name,
            granularity,
            classes,
            image_size,
            chain,
            dtype=dtype,
            folded=taken,
            fused=fusion.is_fused(model),
        )
    model = general.structure(make, name).to(dtype)
    if cuts is None:
        image = torch.empty(1, 3, image_size, image_size, dtype=dtype)
        cuts = general.cuts(model, granularity, image)
    return general.architecture(
        name,
        model,
        cuts,
        granularity=granularity,
        classes=classes,
        image_size=image_size,
        options=json.loads(options),
        dtype=dtype,
    )
