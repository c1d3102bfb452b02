"""MiniLoader (paper, section III-C): construction without initialization, and 1-bit placeholders."""

import torch

from models.layers import BuiltLayer, Layer


def load(layer: Layer) -> BuiltLayer:
    """Builds a layer without full-precision memory: each parameter of n elements is ceil(n/8) bytes.

    No constructor and no initializer runs, and nothing outside the new layer is touched, so other
    threads construct normally meanwhile.
    """
    built = layer.build()
    for slot in layer.parameter_slots:
        built.put(slot, torch.empty((slot.elements + 7) // 8, dtype=torch.uint8))
    return built


def restore(built: BuiltLayer) -> None:
    """Gives every parameter and buffer its shape and precision back, for weights to be copied into."""
    built.allocate()
