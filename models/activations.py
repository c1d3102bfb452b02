"""How much memory a model's activations take, found without running it: the chain on tensors of no memory."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import weightless
from models.layers import Architecture

_CHANNELS: Final = 3


def peak_bytes(architecture: Architecture, inputs: Any = None) -> int:
    """The most bytes that are alive at once while inputs go through the model, themselves included.

    Counted over the storages that operators return, weights left out; kernels' own scratch memory is
    not seen. It grows with the number of images in a request, and depends on nothing but the
    architecture: the same on every machine.

    inputs: by default one image.
    """
    side = architecture.image_size
    image = torch.empty((1, _CHANNELS, side, side), dtype=architecture.dtype, device="meta")
    given = image if inputs is None else inputs
    if inputs is None:
        return _peak_bytes(architecture, given, "meta")
    try:
        return _peak_bytes(architecture, given, "meta")
    except Exception:  # noqa: BLE001 - of any kind: the forward may look at values
        return _peak_bytes(architecture, given, "cpu")


def _peak_bytes(architecture: Architecture, inputs: Any, device: str) -> int:
    layers = weightless.built(architecture, device)
    weights = {
        _identity(tensor)
        for layer in layers
        for tensor in (*layer.root.parameters(), *layer.root.buffers())
    }
    # Not in inference mode, where compound operators reach a dispatch mode whole.
    with torch.no_grad(), _Living(weights) as living:
        weightless.run(architecture, layers, inputs, device=device)
    peak: int = living.peak_bytes
    return peak


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that operators on this thread return, until they are let go."""

    def __init__(self, left_out: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left_out = left_out
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}  # type: ignore[no-untyped-call]
        alive_bytes = sum(size for _, size in self._alive.values())
        self.peak_bytes = max(self.peak_bytes, alive_bytes)
        return returned

    def _note(self, tensor: Tensor) -> None:
        identity = _identity(tensor)
        if identity not in self._left_out and identity not in self._alive:
            storage = tensor.untyped_storage()
            self._alive[identity] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]


def _identity(tensor: Tensor) -> int:
    """Two tensors share memory when this is alike; tensors without memory all have the address 0."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - torch has no public name for it
    return identity
