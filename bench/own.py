"""The user's own prepared models in the latency benchmark: the example that they were prepared with goes in."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench import stand_in
from bench.worker import Worker
from handler import memory
from models import examples, factories, own
from models.errors import ModelError
from models.gates import call_with
from models.manifest import Manifest
from models.store import PreparedModel, Store


class NotOwn(ModelError):
    """The prepared model is torchvision's: `--models` measures those."""


def manifest_of(store: Path, model: str) -> Manifest:
    """Raises StoreError, NotOwn."""
    manifest = Store(store).open(model).manifest
    if manifest.factory is None:
        raise NotOwn(f"model {model!r} is not made by a factory, expected it among --models")
    return manifest


def body(manifest: Manifest) -> bytes:
    """The example's tensors, one after another."""
    given = examples.tensors(manifest.inputs)
    tensors = given.values() if isinstance(given, Mapping) else given
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return b"".join(tensor.numpy().tobytes() for tensor in several)


def described(manifest: Manifest) -> dict[str, Any]:
    """The frame's `input` for that body."""
    shapes = [list(spec.shape) for spec in manifest.inputs]
    if manifest.input is not None:
        return {"kind": "tensor", "datatype": "FP32", "shape": shapes[0]}
    return {"kind": "tensors", "shapes": shapes}


@dataclass(frozen=True, slots=True)
class Resident:
    """The factory's module kept in memory, in a process of its own, which makes the same example itself."""

    worker: Worker
    name: str = "resident"
    format: str | None = None
    granularity: str | None = None

    def run(self, _value: bytes) -> float:
        header, _ = self.worker.exchange({"type": "infer", "input": {"shape": [0]}}, b"")
        duration: float = header["duration_ms"]
        return duration


def resident(store: Path, model: str, threads: int, stack: ExitStack) -> Resident:
    arguments = [
        *("--threads", str(threads)),
        *("--architecture", model),
        *("--checkpoints", str(store)),
    ]
    return Resident(stack.enter_context(Worker("bench.own", arguments)))


def make(model: str, store: Path) -> stand_in.Contender:
    """The plain module, constructed and loaded as anyone would."""
    prepared = Store(store).open(model)
    manifest = prepared.manifest
    if manifest.factory is None:
        raise NotOwn(model)
    plain = factories.load_function(manifest.factory, own.FACTORY)(**manifest.options).eval()
    kept, aliases = _tensors(prepared), own.recorded(manifest).aliases
    plain.load_state_dict({key: kept[aliases.get(key, key)] for key in plain.state_dict()})
    del kept
    example = examples.tensors(manifest.inputs)
    memory.give_back()

    def forward(value: Tensor) -> Tensor:
        del value  # every input is the example, which need not be one tensor
        return next(tensor for _, tensor in own.named(call_with(plain, example)))

    return forward


def _tensors(model: PreparedModel) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for layer in model.manifest.layers:
        if layer.file is None:
            continue
        path = model.path / layer.file
        if model.manifest.weight_format == "pth":
            tensors |= torch.load(path, weights_only=True)
        else:
            tensors |= load_file(path)
    return tensors


if __name__ == "__main__":
    stand_in.serve(make)
