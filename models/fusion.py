"""Convolutions fused with the normalization before and the addition and activation after them, opt-in.

Normalization in `eval()` multiplies and shifts each channel, so a convolution's weights can do it; oneDNN
adds the residual and rectifies while it writes a convolution's result. The answer is then equal within
1e-4 of the largest logit, no longer bit for bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vgg import VGG

from models.manifest import MemoryFormat

Activation = Literal["none", "relu"]
# What torch's own compiler makes of a convolution and what follows it.
_ONEDNN: Final = hasattr(torch.ops.mkldnn, "_convolution_pointwise")


@dataclass(frozen=True, slots=True)
class Normalization:
    """One that a convolution has taken over: its name in torchvision's model, and its epsilon."""

    name: str
    epsilon: float


class FusedConv2d(nn.Conv2d):
    """A convolution and the activation after it."""

    activation: Activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:  # noqa: A002
        """With a residual, it is added before the activation, and the result takes its memory."""
        return self._alone(input) if residual is None else self._added(input, residual)

    def _alone(self, value: Tensor) -> Tensor:
        if not _ONEDNN or value.is_meta:
            return self._activated(super().forward(value))
        output: Tensor = torch.ops.mkldnn._convolution_pointwise(  # noqa: SLF001 - has no other name
            value, self.weight, self.bias, *self._geometry(), self.activation, [], ""
        )
        return output

    def _added(self, value: Tensor, residual: Tensor) -> Tensor:
        if not _ONEDNN or value.is_meta:
            return self._activated(residual.add_(super().forward(value)))
        output: Tensor = torch.ops.mkldnn._convolution_pointwise_.binary(
            residual,
            value,
            self.weight,
            self.bias,
            *self._geometry(),
            "add",
            1.0,
            self.activation,
            [],
            "",
        )
        return output

    def _activated(self, value: Tensor) -> Tensor:
        return value.relu_() if self.activation == "relu" else value

    def _geometry(self) -> tuple[Any, Any, Any, int]:
        return self.padding, self.stride, self.dilation, self.groups


class FusedBottleneck(Bottleneck):  # type: ignore[misc]
    """torchvision's, without normalizations; `relu` is part of the convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        value: Tensor = self.conv3(self.conv2(self.conv1(x)), residual)
        return value


class FusedBasicBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's, without normalizations; `relu` is part of the convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        value: Tensor = self.conv2(self.conv1(x), residual)
        return value


def fuse(model: nn.Module, memory_format: MemoryFormat) -> dict[str, Normalization]:
    """Rewrites a torchvision model's structure; returns what each convolution, by name, took over.

    The model's weights mean nothing afterwards; `FoldedWeights` has those that fit. A model of another
    family than ResNet and VGG is left as it is.
    """
    taken: dict[str, Normalization] = {}
    if isinstance(model, ResNet):
        _fuse_resnet(model, taken)
    elif isinstance(model, VGG):
        _fuse_chain(model.features, "features.", taken)
    if memory_format == "channels_last" and is_fused(model):
        model.to(memory_format=torch.channels_last)
    return taken


def is_fused(model: nn.Module) -> bool:
    return any(isinstance(module, FusedConv2d) for module in model.modules())


def _fuse_resnet(model: ResNet, taken: dict[str, Normalization]) -> None:
    _fuse_pair(model, "", "conv1", "bn1", "relu", taken)
    model.relu = nn.Identity()
    for name, block in model.named_modules():
        if isinstance(block, Bottleneck):
            block.__class__ = FusedBottleneck
            last = 3
        elif isinstance(block, BasicBlock):
            block.__class__ = FusedBasicBlock
            last = 2
        else:
            continue
        for number in range(1, last + 1):
            _fuse_pair(block, f"{name}.", f"conv{number}", f"bn{number}", "relu", taken)
        block.relu = nn.Identity()
        if block.downsample is not None:
            _fuse_pair(block.downsample, f"{name}.downsample.", "0", "1", "none", taken)


def _fuse_chain(chain: nn.Module, prefix: str, taken: dict[str, Normalization]) -> None:
    """Each convolution of a chain of convolution, perhaps normalization, and ReLU."""
    modules = list(chain.named_children())
    for (name, module), (after, following), (last, _) in _threes(modules):
        if not isinstance(module, nn.Conv2d):
            continue
        if isinstance(following, nn.BatchNorm2d):
            _fuse_pair(chain, prefix, name, after, "relu", taken)
            chain.set_submodule(last, nn.Identity())
        else:
            _fuse_convolution(module, "relu")
            chain.set_submodule(after, nn.Identity())


def _threes(modules: list[tuple[str, nn.Module]]) -> Iterator[tuple[tuple[str, nn.Module], ...]]:
    """Each with the two after it; the last of a VGG's `features` are no convolutions."""
    return zip(modules, modules[1:], modules[2:], strict=False)


def _fuse_pair(
    parent: nn.Module,
    prefix: str,
    convolution: str,
    normalization: str,
    activation: Activation,
    taken: dict[str, Normalization],
) -> None:
    _fuse_convolution(parent.get_submodule(convolution), activation)
    replaced: Any = parent.get_submodule(normalization)
    taken[prefix + convolution] = Normalization(prefix + normalization, replaced.eps)
    parent.set_submodule(normalization, nn.Identity())


def _fuse_convolution(convolution: Any, activation: Activation) -> None:
    convolution.__class__ = FusedConv2d
    convolution.activation = activation
    if convolution.bias is None:
        convolution.bias = nn.Parameter(
            convolution.weight.new_empty(convolution.out_channels), requires_grad=False
        )


class FoldedWeights(Mapping[str, Tensor]):
    """A fused model's state dict, each tensor made when asked for from the plain model's.

    keys: of the fused model. taken: what `fuse` returned. plain: the weights of the model as it was.
    """

    def __init__(
        self, keys: list[str], taken: Mapping[str, Normalization], plain: Mapping[str, Tensor]
    ) -> None:
        self._keys = keys
        self._taken = taken
        self._plain = plain

    def __getitem__(self, key: str) -> Tensor:
        module, _, attribute = key.rpartition(".")
        normalization = self._taken.get(module)
        if normalization is None:
            return self._plain[key]
        weight, bias = self._folded(module, normalization)
        return weight if attribute == "weight" else bias

    def _folded(self, module: str, normalization: Normalization) -> tuple[Tensor, Tensor]:
        """In double precision, so that folding costs no more than one rounding."""
        weight = self._plain[f"{module}.weight"]
        scale, shift, mean, variance = (
            self._plain[f"{normalization.name}.{attribute}"].double()
            for attribute in ("weight", "bias", "running_mean", "running_var")
        )
        bias = self._plain[f"{module}.bias"].double() if f"{module}.bias" in self._plain else None
        folded = fuse_conv_bn_weights(
            weight.double(), bias, mean, variance, normalization.epsilon, scale, shift
        )
        weight_and_bias = [tensor.detach().to(weight.dtype) for tensor in folded]
        return weight_and_bias[0], weight_and_bias[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
