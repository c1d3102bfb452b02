"""Which architecture a state dict is of, going by its keys and shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from models import catalog, checkpoint
from models.checkpoint import CheckpointError
from models.layers import TensorPlace

_NEAR: Final = 0.5
"""Of a state dict's keys, that must have their place in an architecture for it to be suggested."""


@dataclass(frozen=True, slots=True)
class Nearness:
    """How far a state dict is from an architecture of any number of classes and image size."""

    name: str
    misfits: int
    """Keys that are missing, unexpected or of another shape; 0: it fits."""
    share: float
    """Of the state dict's keys, those that fit."""


def recognize(path: Path | str, tensors: Mapping[str, Tensor]) -> str:
    """The one architecture that the tensors fit. Raises CheckpointError that names the nearest."""
    known = nearest(path, tensors)
    fitting = [near.name for near in known if not near.misfits]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CheckpointError(f"{path} fits {', '.join(fitting)}: choose one with --architecture")
    if known:
        near = known[0]
        trouble = checkpoint.named(path, near.name, tensors).head_trouble
        raise CheckpointError(
            f"{path} fits no known architecture; the nearest is {near.name}, {near.misfits} keys apart: "
            + (trouble or f"--architecture {near.name} says which")
        )
    raise CheckpointError(
        f"{path} is near no known architecture, it has the keys {_first(tensors)}; "
        f"known are {', '.join(catalog.NAMES)}, and any other by the code that makes it: --factory"
    )


def suggestion(path: Path | str, tensors: Mapping[str, Tensor], instead_of: str) -> str | None:
    """A nearer architecture than the one given, in words that follow an error; None if there is none."""
    known = nearest(path, tensors)
    if not known or known[0].name == instead_of:
        return None
    given = next((near.misfits for near in known if near.name == instead_of), None)
    if given is not None and given <= known[0].misfits:
        return None
    if known[0].misfits:
        return f"the nearest architecture is {known[0].name}, {known[0].misfits} keys apart"
    return f"it fits {known[0].name}: give that as --architecture"


def nearest(path: Path | str, tensors: Mapping[str, Tensor]) -> list[Nearness]:
    """The architectures that the tensors are near to, the nearest first."""
    known = [_nearness(path, name, tensors) for name in catalog.NAMES]
    near = [nearness for nearness in known if nearness.share >= _NEAR]
    return sorted(near, key=lambda nearness: nearness.misfits)


def _nearness(path: Path | str, name: str, tensors: Mapping[str, Tensor]) -> Nearness:
    named = checkpoint.named(path, name, tensors).tensors
    places = catalog.places(name)
    own = _own_dimensions(places)
    misfits = dict(checkpoint.misfits(places, named))
    far = sum(len(misfits.get(kind, ())) for kind in ("missing", "unexpected"))
    placed = [key for key in named if key in places]
    fitting = sum(_fits(places[key], named[key], own) for key in placed)
    return Nearness(name, far + len(placed) - fitting, fitting / max(len(named), 1))


def _own_dimensions(places: Mapping[str, TensorPlace]) -> Mapping[str, int]:
    """The dimension in which each tensor may differ from torchvision's: classes, a ViT's positions."""
    head = checkpoint.head(places)
    return {f"{head}.weight": 0, f"{head}.bias": 0, "encoder.pos_embedding": 1}


def _fits(place: TensorPlace, tensor: Tensor, own: Mapping[str, int]) -> bool:
    if place.key.endswith("num_batches_tracked"):
        return tensor.numel() == 1
    found, expected = list(tensor.shape), list(place.shape)
    if place.key in own and len(found) == len(expected):
        found[own[place.key]] = expected[own[place.key]]
    return found == expected and tensor.is_floating_point() == place.dtype.is_floating_point


def _first(tensors: Mapping[str, Tensor]) -> str:
    keys = list(tensors)
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
