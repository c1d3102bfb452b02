"""A user's checkpoint file -> a state dict that fits an architecture exactly."""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from models import catalog
from models.errors import ModelError
from models.layers import Architecture, TensorPlace

StateDict = Mapping[str, Tensor]

_NESTING_KEYS: Final = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "net",
    "network",
    "weights",
)
_PREFIXES: Final = ("module.", "_orig_mod.")
"""What wrappers put before every key: data parallel, compilation."""
_EARLIER_NAMES: Final = (
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)
"""A ViT's keys before torchvision 0.13 (pytorch/vision pull request 6053); its published files still
have them, and its modules rename them when they load."""
_COUNTER: Final = "num_batches_tracked"
_LISTED: Final = 10


class CheckpointError(ModelError):
    """A weights file that cannot be used; the message names file, found and expected."""


def read(path: Path, key: str | None = None) -> dict[str, Tensor]:
    """The state dict in a file of torch.save or safetensors, told apart by content.

    No code in the file is run. Tensors are mapped from the file where its format allows, not read.
    `key` says where in the file it lies (`ema.state_dict`), which is needed if there are several.
    Raises CheckpointError, and OSError if the file cannot be opened.
    """
    start = _start(path)
    if not start:
        raise CheckpointError(f"{path} is empty, expected a state dict")
    if _is_safetensors(start, path):
        return _with_current_names(_without_prefixes(_read_safetensors(path)))
    content = _load(path, mapped=start.startswith(b"PK\x03\x04"))
    return _with_current_names(_without_prefixes(_state_dict(path, content, key)))


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(16)


def _is_safetensors(start: bytes, path: Path) -> bool:
    """By its form: eight bytes of header length, then a JSON object."""
    header_bytes = int.from_bytes(start[:8], "little")
    return start[8:9] == b"{" and header_bytes <= path.stat().st_size - 8


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("__pad.")}


def _load(path: Path, *, mapped: bool) -> Any:
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Validating sparse tensor")
            # torch.load maps by name only, and takes files named so for safetensors whatever they hold.
            mapped = mapped and path.suffix != ".safetensors"
            content = str(path) if mapped else file
            return torch.load(content, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        pickled = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = f"it holds {pickled[1]}" if pickled else "it is not one"
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of tensors alone: {found}; "
            "expected what torch.save(model.state_dict(), file) or safetensors writes"
        ) from error
    except Exception as error:  # damaged bytes fail in torch wherever they lead it: IndexError, ...
        reason = str(error).partition("\n")[0].removesuffix(".") or type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint, it is damaged or of another kind: {reason}"
        ) from error


def _state_dict(path: Path, content: object, key: str | None) -> dict[str, Tensor]:
    if key is not None:
        return _checked(path, _at(path, content, key))
    candidates = dict(_candidates(content))
    if not candidates:
        raise CheckpointError(
            f"{path} holds {_describe(content)}, expected a state dict, plain or under one of "
            f"{', '.join(_NESTING_KEYS)}"
        )
    if len(candidates) > 1:
        raise CheckpointError(
            f"{path} holds {len(candidates)} state dicts, choose one with --key: {', '.join(candidates)}"
        )
    return _checked(path, next(iter(candidates.values())))


def _at(path: Path, content: object, key: str) -> Mapping[str, object]:
    for part in key.split("."):
        if not isinstance(content, Mapping) or part not in content:
            raise CheckpointError(f"{path} has nothing under {key!r}: found {_describe(content)}")
        content = content[part]
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} has {_describe(content)} under {key!r}, expected a state dict"
        )
    return content


def _candidates(content: object, place: str = "") -> Iterator[tuple[str, Mapping[str, object]]]:
    """The dicts that hold tensors, each under its place in the file; the innermost count."""
    if not isinstance(content, Mapping):
        return
    nested = [
        candidate
        for key in _NESTING_KEYS
        if key in content
        for candidate in _candidates(content[key], f"{place}.{key}" if place else key)
    ]
    yield from nested
    if not nested and any(isinstance(value, Tensor) for value in content.values()):
        yield place, content


def _checked(path: Path, candidate: Mapping[str, object]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, value in candidate.items():
        if not isinstance(value, Tensor) or not isinstance(key, str):
            raise CheckpointError(
                f"{path} has {type(value).__name__} under {key!r}, expected tensors alone"
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise CheckpointError(f"{path}: {key} is not a plain tensor with values")
        tensors[key] = value
    return tensors


def _describe(content: object) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    keys = [str(key) for key in content]
    shown = ", ".join(keys[:_LISTED])
    return f"a dict of {len(keys)} entries ({shown}{', ...' if len(keys) > _LISTED else ''})"


def _without_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if tensors and all(key.startswith(prefix) for key in tensors):
            return _without_prefixes({key.removeprefix(prefix): tensors[key] for key in tensors})
    return tensors


def _with_current_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_current_name(key): tensor for key, tensor in tensors.items()}


def _current_name(key: str) -> str:
    for earlier, current in _EARLIER_NAMES:
        key = earlier.sub(current, key)
    return key


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What an architecture of one name is built for."""

    classes: int = 1000
    image_size: int = 224


def dimensions(name: str, tensors: StateDict) -> Dimensions:
    """Classes from the head's shape, a ViT's image size from its position embedding's length.

    What the tensors do not tell stays as torchvision has it; `fit` then says what is missing.
    Raises UnknownArchitecture.
    """
    usual = catalog.architecture(name)
    places = [place for layer in usual.layers for place in layer.tensors]
    head = [place for place in places if place.parameter and len(place.shape) == 2][-1]
    return Dimensions(
        classes=_length(tensors.get(head.key), dim=0) or usual.classes,
        image_size=_vit_image_size(usual, tensors) or usual.image_size,
    )


def _length(tensor: Tensor | None, *, dim: int) -> int | None:
    return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else None


def _vit_image_size(usual: Architecture, tensors: StateDict) -> int | None:
    if not usual.name.startswith("vit"):
        return None
    patch_side = _length(tensors.get("conv_proj.weight"), dim=3)
    positions = _length(tensors.get("encoder.pos_embedding"), dim=1)
    if patch_side is None or positions is None or positions < 2:
        return None
    patches_per_side = math.isqrt(positions - 1)
    return patches_per_side * patch_side or None


class Fitted(Mapping[str, Tensor]):
    """A state dict in the architecture's types; a tensor is converted when asked for, and not kept."""

    def __init__(self, places: Mapping[str, TensorPlace], tensors: StateDict) -> None:
        self._places = places
        self._tensors = tensors

    def __getitem__(self, key: str) -> Tensor:
        place = self._places[key]
        if key not in self._tensors:
            return torch.zeros(place.shape, dtype=place.dtype)
        return self._tensors[key].detach().to(place.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def fit(path: Path | str, architecture: Architecture, tensors: StateDict) -> Fitted:
    """The tensors as the architecture wants them; `path` is for the message.

    Strict: every key must be there and no other. Only batch counters, which checkpoints of before
    2018 lack and inference never reads, are filled in with zero. Raises CheckpointError.
    """
    places = {place.key: place for layer in architecture.layers for place in layer.tensors}
    absent = (key for key in places if key not in tensors)
    misfits = {
        "missing": [key for key in absent if not key.endswith(_COUNTER)],
        "unexpected": [key for key in tensors if key not in places],
        "misshapen": [
            misfit for key, place in places.items() for misfit in _misfit(place, tensors.get(key))
        ],
    }
    found = [f"{len(keys)} {kind} ({_listed(keys)})" for kind, keys in misfits.items() if keys]
    if found:
        raise CheckpointError(f"{path} does not fit {architecture.name}: {'; '.join(found)}")
    return Fitted(places, tensors)


def _misfit(place: TensorPlace, tensor: Tensor | None) -> Iterator[str]:
    if tensor is None:
        return
    if tuple(tensor.shape) != place.shape:
        yield f"{place.key}: found {list(tensor.shape)}, expected {list(place.shape)}"
    elif place.dtype.is_floating_point != tensor.is_floating_point():
        yield f"{place.key}: found {tensor.dtype}, expected {place.dtype}"


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")
