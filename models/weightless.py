"""A model's forward without its weights: on tensors that have a shape and no memory, where that can be."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from models.gates import Enter
from models.layers import Architecture, BuiltLayer

MADE_UP: Final = 0.02
"""What weights are where a forward needs values: it must come through, no matter with what output."""


def built(architecture: Architecture, device: str = "meta") -> list[BuiltLayer]:
    """The layers with weights that have a shape, and made-up values if the device has any."""
    return [_filled(layer.build(), device) for layer in architecture.layers]


def _filled(layer: BuiltLayer, device: str) -> BuiltLayer:
    made: dict[str, Tensor] = {}
    for key, slot in layer.layer.slots:
        value = MADE_UP if slot.dtype.is_floating_point else 0
        made[key] = torch.empty(
            slot.shape, dtype=slot.dtype, memory_format=slot.memory_format, device=device
        ).fill_(value)
        layer.put(slot, made[key])
    for key, slot in layer.layer.tied:
        layer.put(slot, made[key])
    move(layer.root, device)
    return layer


def move(root: nn.Module, device: str) -> None:
    """Moves the buffers and constants that no state dict carries."""
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for name, constant in list(vars(module).items()):
            if isinstance(constant, Tensor):
                setattr(module, name, constant.to(device))


def run(
    architecture: Architecture,
    layers: Sequence[BuiltLayer],
    inputs: Any,
    enter: Enter = lambda _: (),
    device: str = "meta",
) -> Any:
    """The output of layers built here, of which only the shape means something."""
    value = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), inputs)
    if architecture.gated is not None:
        return architecture.gated(
            layers.__getitem__, enter, value, prepared=lambda root: move(root, device)
        )
    for layer in layers:  # which holds no input longer than its layer needs it
        value = layer.execute(value)
    return value
