"""VGG, with and without batch normalization, as a chain of layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchvision.models.vgg import VGG

from models.layers import Layer, call
from models.manifest import Granularity


def layers(model: VGG, granularity: Granularity) -> Iterator[Layer]:
    """The chain of a torchvision VGG; its flattening before the classifier belongs to `classifier`.

    As blocks, a convolution of `features` is a layer with what follows it up to the next one, named
    after the convolution; a linear layer of `classifier` likewise.
    """
    if granularity == "stage":
        yield _layer("features", model.features, "features.")
        yield _layer("avgpool", model.avgpool, "avgpool.")
        yield Layer(
            "classifier", model.classifier, "classifier.", run=_classify, initialize=_initialize
        )
        return
    for name, group in _groups(model.features, nn.Conv2d):
        yield _layer(f"features.{name}", group, "features.")
    yield _layer("avgpool", model.avgpool, "avgpool.")
    for number, (name, group) in enumerate(_groups(model.classifier, nn.Linear)):
        run = _classify if number == 0 else call
        yield Layer(f"classifier.{name}", group, "classifier.", run=run, initialize=_initialize)


def _groups(chain: nn.Module, head: type[nn.Module]) -> Iterator[tuple[str, nn.Sequential]]:
    """The chain cut before each module of the class `head`, each part under its first module's name."""
    group = nn.Sequential()
    first = ""
    for name, module in chain.named_children():
        if isinstance(module, head) and len(group):
            yield first, group
            group = nn.Sequential()
        first = first if len(group) else name
        group.add_module(name, module)
    yield first, group


def _layer(name: str, root: nn.Module, prefix: str) -> Layer:
    return Layer(name, root, prefix, initialize=_initialize)


def _classify(group: nn.Module, pooled: Tensor) -> Tensor:
    return call(group, torch.flatten(pooled, 1))


def _initialize(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.constant_(module.bias, 0)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 1)
            nn.init.constant_(module.bias, 0)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
            nn.init.constant_(module.bias, 0)
