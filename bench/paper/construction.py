"""What one model costs to construct and to keep, measured in a process of its own (the paper's Figs. 4 and 5).

`python -m bench.paper.construction MODEL ROUNDS` prints one JSON object.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from bench.paper.stores import SEED
from handler import memory
from handler.timeline import now_ns
from models import catalog
from models.blueprint import structure_only
from models.layers import Layer
from models.random_weights import RandomWeights

_MS: Final = 1e6


def measured(model: str, rounds: int) -> dict[str, Any]:
    """In a new process: what others left in the allocator would hide what the model takes."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.paper.construction", model, str(rounds)],
        capture_output=True,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def tell(model: str, rounds: int) -> dict[str, Any]:
    """resident_bytes: private memory that the loaded model added.

    constructor_ms: torchvision's constructor as it is. instantiation_ms: the same without memory for
    parameters and without initializers. Per layer of the paper's granularity: instantiation from a
    blueprint, as this product does it, registration and initialization.
    """
    chain = catalog.architecture(model, granularity="stage")
    built = catalog.torchvision_model(model)  # lazily loaded parts of torch are there from now on
    parameters = sum(p.numel() * p.element_size() for p in built.parameters())
    del built
    before = _settled()
    kept = _loaded(model)
    resident = _settled() - before
    del kept
    return {
        "model": model,
        "resident_bytes": resident,
        "parameter_bytes": parameters,
        "constructor_ms": _times(lambda: catalog.torchvision_model(model), rounds),
        "instantiation_ms": _times(lambda: _structure(model), rounds),
        "layers": [_layer(layer, rounds) for layer in chain.layers],
    }


def _settled() -> int:
    memory.give_back()
    return memory.anonymous_bytes()


def _loaded(model: str) -> nn.Module:
    made = catalog.torchvision_model(model)
    made.load_state_dict(dict(RandomWeights(catalog.architecture(model), SEED)))
    return made


def _structure(model: str) -> nn.Module:
    with structure_only():
        return catalog.torchvision_model(model)


def _times(work: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = now_ns()
        work()
        times.append((now_ns() - start) / _MS)
    return times


def _layer(layer: Layer, rounds: int) -> dict[str, Any]:
    """Medians, milliseconds."""
    phases: dict[str, list[float]] = {"instantiation": [], "registration": [], "initialization": []}
    for _ in range(rounds):
        moments = [now_ns()]
        built = layer.build()
        moments.append(now_ns())
        built.allocate()
        moments.append(now_ns())
        with torch.no_grad():
            built.initialize()
        moments.append(now_ns())
        for times, start, end in zip(phases.values(), moments[:-1], moments[1:], strict=True):
            times.append((end - start) / _MS)
        del built  # in its own time: giving a VGG's memory back takes 30 ms
    medians = {f"{name}_ms": statistics.median(times) for name, times in phases.items()}
    return {"layer": layer.name, **medians}


if __name__ == "__main__":
    json.dump(tell(sys.argv[1], int(sys.argv[2])), sys.stdout)
