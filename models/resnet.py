"""ResNet, ResNeXt and Wide ResNet as chains of layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from models.layers import Layer
from models.manifest import Granularity


def layers(model: ResNet, granularity: Granularity) -> Iterator[Layer]:
    """The chain of a torchvision ResNet; its flattening before the classifier belongs to `fc`."""
    for name in ("conv1", "bn1", "relu", "maxpool"):
        yield _layer(name, getattr(model, name))
    for name in ("layer1", "layer2", "layer3", "layer4"):
        stage = getattr(model, name)
        if granularity == "stage":
            yield _layer(name, stage)
        else:
            yield from (
                _layer(f"{name}.{block}", module) for block, module in stage.named_children()
            )
    yield _layer("avgpool", model.avgpool)
    yield Layer("fc", model.fc, "fc.", run=_classify, initialize=_initialize)


def _layer(name: str, root: nn.Module) -> Layer:
    return Layer(name, root, f"{name}.", initialize=_initialize)


def _classify(fc: nn.Module, pooled: Tensor) -> Tensor:
    logits: Tensor = fc(torch.flatten(pooled, 1))
    return logits


def _initialize(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 1)
            nn.init.constant_(module.bias, 0)
