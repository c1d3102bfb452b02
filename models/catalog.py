"""The architectures that Cicada knows, by torchvision's names."""

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torchvision
from torch import nn

from models import fusion, resnet, vgg, vit
from models.blueprint import structure_only
from models.errors import ModelError
from models.layers import Architecture, Layer, TensorPlace
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
_CHAINS: Final[dict[str, Chain]] = {
    name: chain for chain, names in _FAMILIES.items() for name in names
}

NAMES: Final[tuple[str, ...]] = tuple(_CHAINS)
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


def torchvision_model(name: str, *, classes: int = 1000, image_size: int = 224) -> nn.Module:
    """torchvision's own model in `eval()`, weights as its constructor initializes them.

    `image_size` matters to ViT alone; the other families take any size.
    """
    if name not in _CHAINS:
        raise UnknownArchitecture(name)
    options = {"image_size": image_size} if name.startswith("vit") else {}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=classes, **options
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


@functools.lru_cache(maxsize=16)
def architecture(
    name: str,
    *,
    granularity: Granularity = "block",
    classes: int = 1000,
    image_size: int = 224,
    fused: MemoryFormat | None = None,
    dtype: torch.dtype = torch.float32,
) -> Architecture:
    """The chain of layers of torchvision's `name`. It holds structure, no weights, so it may be kept.

    fused: with convolutions that are fused with what follows them, their weights in that memory format.

    Raises UnknownArchitecture.
    """
    with structure_only():
        model = torchvision_model(name, classes=classes, image_size=image_size)
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
