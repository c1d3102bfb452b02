"""MiniLoader (paper, section III-C): construction without initialization, and 1-bit placeholders."""

from models.layers import BuiltLayer, Layer


def load(layer: Layer) -> tuple[BuiltLayer, int]:
    """Builds a layer without full-precision memory: each parameter of n elements is ceil(n/8) bytes.

    No constructor and no initializer runs, and nothing outside the new layer is touched, so other
    threads construct normally meanwhile. Returns with it how many bytes its placeholders take, which
    are one piece of memory.
    """
    built = layer.build()
    return built, built.put_placeholders()


def restore(built: BuiltLayer) -> None:
    """Gives every parameter and buffer its shape and precision back, for weights to be copied into."""
    built.allocate()
