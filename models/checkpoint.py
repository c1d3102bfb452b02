"""A user's checkpoint file -> a state dict that fits an architecture exactly."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from models import catalog, file_kinds, key_names, unpickling
from models.alignment import aligned
from models.errors import ModelError
from models.layers import Architecture, TensorPlace

StateDict = Mapping[str, Tensor]

_NO_WEIGHTS: Final = (
    "optim",
    "sched",
    "lr_sched",
    "scaler",
    "grad_scaler",
    "callbacks",
    "loops",
    "hyper_parameters",
    "hparams",
    "args",
    "rng",
)
"""How keys start under which trainers keep tensors that are no model's."""
_TOP: Final = "."
"""What `--key` calls the file's outermost dict."""
_COUNTER: Final = "num_batches_tracked"
_POSITIONS: Final = "encoder.pos_embedding"
"""A ViT's, whose length is that of its image's patches."""
_LISTED: Final = 10
_CHUNK_ELEMENTS: Final = 1 << 20


class CheckpointError(ModelError):
    """A weights file that cannot be used; the message names file, found and expected."""


@dataclass(slots=True)
class Findings:
    """What of a checkpoint was taken otherwise than as it stands there: nothing is guessed silently."""

    beside: dict[str, str] = field(default_factory=dict)
    """Entries of the state dict that are no tensors, and what they are."""
    prefix: str = ""
    head: Mapping[str, str] = field(default_factory=dict)
    """The head's keys by those in the file, where it was replaced."""
    recognized: str = ""
    """The architecture, where no one named it."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """How many values are NaN or infinite, by the tensor's key."""

    def sentences(self) -> Iterator[str]:
        if self.recognized:
            yield f"the keys and shapes are those of {self.recognized}"
        if self.beside:
            entries = [f"{key} ({kind})" for key, kind in self.beside.items()]
            yield f"left out, since they are no tensors: {_listed(entries)}"
        if self.prefix:
            yield f"every key was taken without its {self.prefix!r}"
        if self.head:
            names = [f"{found} as {name}" for found, name in self.head.items()]
            yield (
                f"the head was replaced: {_listed(names)}; "
                "what else is there has no weights and is taken for dropout, which changes no answer"
            )
        if self.not_finite:
            tensors = [f"{key} ({count} values)" for key, count in self.not_finite.items()]
            yield f"NaN or infinite, so that answers may be: {_listed(tensors)}"


def read(path: Path, key: str | None = None, findings: Findings | None = None) -> dict[str, Tensor]:
    """The state dict in a file of torch.save or safetensors, told apart by content.

    No code in the file is run. Tensors are mapped from the file, not read, and may lie at addresses that
    their type does not allow: see models/alignment.py.
    `key` says where in the file it lies (`ema.state_dict`), which is needed if there are several; it may
    end in what precedes the wanted keys. Raises CheckpointError, and OSError if the file cannot be opened.
    """
    start = file_kinds.start_of(path)
    if file_kinds.is_safetensors(start):
        content: object = _read_safetensors(path, start)
    else:
        content = _load(path, start)
    chosen = _chosen(path, content, key)
    return key_names.without_outer_wrappers(_tensors(path, chosen, findings or Findings()))


def _read_safetensors(path: Path, start: bytes) -> dict[str, Tensor]:
    found, expected = path.stat().st_size, file_kinds.safetensors_bytes(path, start)
    if expected is not None and found < expected:
        raise CheckpointError(
            f"{path} is cut short, as of half a download: it has {found} bytes, "
            f"its safetensors header says {expected} or more"
        )
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("__pad.")}


def _load(path: Path, start: bytes) -> Any:
    kind = file_kinds.recognized(path, start)
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}")
    try:
        return unpickling.load(path, _form(start))
    except unpickling.Unreadable as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error


def _form(start: bytes) -> unpickling.Form:
    if file_kinds.is_zip(start):
        return "zip"
    mappable = file_kinds.is_torch_pickle(start) and sys.byteorder == "little"
    return "legacy" if mappable else "unknown"


def _chosen(path: Path, content: object, key: str | None) -> Mapping[str, object]:
    """The dict with the weights. Raises CheckpointError if there is none, or no way to tell which."""
    if key is not None:
        return _at(path, content, key)
    found = dict(_candidates(content))
    candidates = {place: held for place, held in found.items() if _has_matrix(held)} or found
    if not candidates:
        raise CheckpointError(f"{path} holds {_describe(content)}, expected a state dict")
    if len(candidates) > 1:
        raise CheckpointError(
            f"{path} holds {len(candidates)} state dicts, choose one with --key: {', '.join(candidates)}"
        )
    return next(iter(candidates.values()))


def _at(path: Path, content: object, key: str) -> Mapping[str, object]:
    found = content if key == _TOP else _below(content, key)
    if found is None:
        raise CheckpointError(f"{path} has nothing under {key!r}: found {_describe(content)}")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} has {_describe(found)} under {key!r}, expected a state dict")
    return found


def _below(content: object, key: str) -> object | None:
    """What lies under the key, whose parts are keys of dicts, may have dots, and may end in a prefix."""
    if not isinstance(content, Mapping):
        return None
    if key in content:
        return content[key]  # type: ignore[no-any-return]
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        outer, inner = ".".join(parts[:length]), ".".join(parts[length:])
        found = _below(content[outer], inner) if outer in content else None
        if found is not None:
            return found
    prefix = f"{key}."
    return {
        name.removeprefix(prefix): value
        for name, value in content.items()
        if isinstance(name, str) and name.startswith(prefix)
    } or None


def _candidates(
    content: object, place: str = "", within: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The dicts that hold tensors, each under its place in the file.

    within: the dicts around it, since a pickle may hold a dict that holds itself.
    """
    if not isinstance(content, Mapping) or id(content) in within:
        return
    if any(isinstance(value, Tensor) for value in content.values()):
        yield place or _TOP, content
    for key, value in content.items():
        if isinstance(key, str) and not key.startswith(_NO_WEIGHTS):
            inner = f"{place}.{key}" if place else key
            yield from _candidates(value, inner, within | {id(content)})


def _has_matrix(content: Mapping[str, object]) -> bool:
    """Whether one of its tensors has two dimensions: single figures and vectors lie beside weights too."""
    return any(isinstance(value, Tensor) and value.dim() > 1 for value in content.values())


def _tensors(path: Path, chosen: Mapping[str, object], findings: Findings) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, value in chosen.items():
        if not isinstance(value, Tensor):
            findings.beside[str(key)] = _kind(value)
            continue
        if not isinstance(key, str):
            raise CheckpointError(f"{path} has a tensor under {key!r}, expected names as keys")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise CheckpointError(f"{path}: {key} is not a plain tensor with values")
        tensors[key] = value.detach()
    if not tensors:
        raise CheckpointError(f"{path} holds {_describe(chosen)}, expected a state dict")
    return tensors


def _describe(content: object) -> str:
    if unpickling.is_module(content):
        name = unpickling.stands_for(content)
        return (
            f"a whole pickled module ({name}), whose code is not run; "
            "save model.state_dict() instead"
        )
    if not isinstance(content, Mapping) or unpickling.stands_for(content):
        return f"a {_kind(content)}"
    entries = [f"{key}: {_kind(value)}" for key, value in content.items()]
    modules = [value for value in content.values() if unpickling.is_module(value)]
    within = f"; {_describe(modules[0])}" if modules else ""
    return f"a dict of {len(entries)} entries ({_listed(entries)}){within}"


def _kind(value: object) -> str:
    return unpickling.stands_for(value) or type(value).__name__


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What an architecture of one name is built for."""

    classes: int = 1000
    image_size: int = 224


def head(places: Mapping[str, TensorPlace]) -> str:
    """The path of the last layer with a matrix, whose rows are the classes."""
    last = [place.key for place in places.values() if place.parameter and len(place.shape) > 1][-1]
    return last.rpartition(".")[0]


def named(path: Path | str, name: str, tensors: StateDict) -> key_names.Named:
    """The tensors under the names of torchvision's `name`. Raises CheckpointError, UnknownArchitecture."""
    places = catalog.places(name)
    try:
        return key_names.named(tensors, places.keys(), head(places))
    except key_names.SeveralModels as error:
        raise CheckpointError(
            f"{path} holds {len(error.prefixes)} models, choose one with --key: {error}"
        ) from error


def dimensions(name: str, tensors: StateDict) -> Dimensions:
    """Classes from the head's shape, a ViT's image size from its position embedding's length.

    What the tensors do not tell stays as torchvision has it; `fit` then says what is missing.
    Raises UnknownArchitecture.
    """
    places = catalog.places(name)
    usual = Dimensions(image_size=catalog.usual_image_size(name))
    return Dimensions(
        classes=_length(tensors.get(f"{head(places)}.weight"), dim=0) or usual.classes,
        image_size=_vit_image_size(places, tensors) or usual.image_size,
    )


def has_fixed_image_size(name: str) -> bool:
    """Whether weights of this architecture are for images of one size: a ViT's positions are."""
    return _POSITIONS in catalog.places(name)


def _length(tensor: Tensor | None, *, dim: int) -> int | None:
    return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else None


def _vit_image_size(places: Mapping[str, TensorPlace], tensors: StateDict) -> int | None:
    if _POSITIONS not in places:
        return None
    patch_side = _length(tensors.get("conv_proj.weight"), dim=3)
    positions = _length(tensors.get(_POSITIONS), dim=1)
    if patch_side is None or positions is None or positions < 2:
        return None
    patches_per_side = math.isqrt(positions - 1)
    return patches_per_side * patch_side or None


class Fitted(Mapping[str, Tensor]):
    """A state dict in the architecture's types; a tensor is converted when asked for, and not kept."""

    def __init__(
        self,
        path: Path | str,
        places: Mapping[str, TensorPlace],
        tensors: StateDict,
        findings: Findings | None = None,
    ) -> None:
        self._path = path
        self._places = places
        self._tensors = tensors
        self._findings = findings or Findings()

    def __getitem__(self, key: str) -> Tensor:
        """Raises CheckpointError for values that the type cannot hold."""
        place = self._places[key]
        tensor = self._tensors.get(key)
        if key.endswith(_COUNTER):
            return _counter(place, tensor)
        if tensor is None:
            raise KeyError(key)
        tensor = aligned(tensor)
        converted = tensor.to(place.dtype).resolve_neg()
        count = _not_finite(converted)
        if count and count != _not_finite(tensor):
            raise CheckpointError(
                f"{self._path}: {key} has values that {place.dtype} cannot hold; "
                "choose another with --dtype"
            )
        if count:
            self._findings.not_finite[key] = count
        return converted

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _counter(place: TensorPlace, tensor: Tensor | None) -> Tensor:
    """A batch counter, which inference never reads: 0 if the checkpoint has none that is a number."""
    if tensor is None:
        return torch.zeros(place.shape, dtype=place.dtype)
    tensor = aligned(tensor)
    if not bool(torch.isfinite(tensor).all()):
        return torch.zeros(place.shape, dtype=place.dtype)
    return tensor.to(place.dtype).reshape(place.shape)


def _not_finite(tensor: Tensor) -> int:
    """How many values are NaN or infinite; in pieces, to take no memory of the tensor's size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0
    if tensor.itemsize > 1:  # the least and greatest value of 8-bit types are not implemented
        least, greatest = torch.aminmax(tensor)  # NaN if any value is
        if math.isfinite(least) and math.isfinite(greatest):
            return 0
    pieces = torch.split(tensor.reshape(-1), _CHUNK_ELEMENTS)
    return sum(int(piece.numel() - torch.isfinite(piece).sum()) for piece in pieces)


def fit(
    path: Path | str,
    architecture: Architecture,
    tensors: StateDict,
    findings: Findings | None = None,
) -> Fitted:
    """The tensors as the architecture wants them; `path` is for the message.

    Strict: every key must be there and no other. Only batch counters, which checkpoints of before
    2018 lack and inference never reads, may be absent or too many. Raises CheckpointError.
    """
    places = {place.key: place for layer in architecture.layers for place in layer.tensors}
    found = [f"{len(keys)} {kind} ({_listed(keys)})" for kind, keys in misfits(places, tensors)]
    if found:
        raise CheckpointError(f"{path} does not fit {architecture.name}: {'; '.join(found)}")
    return Fitted(path, places, tensors, findings)


def misfits(
    places: Mapping[str, TensorPlace], tensors: StateDict
) -> Iterator[tuple[str, list[str]]]:
    """The keys that do not fit, by what is wrong with them."""
    absent = (key for key in places if key not in tensors)
    kinds = {
        "missing": [key for key in absent if not key.endswith(_COUNTER)],
        "unexpected": [
            key for key in tensors if key not in places and not key.endswith(f".{_COUNTER}")
        ],
        "misshapen": [
            misfit for key, place in places.items() for misfit in _misfit(place, tensors.get(key))
        ],
    }
    yield from ((kind, keys) for kind, keys in kinds.items() if keys)


def _misfit(place: TensorPlace, tensor: Tensor | None) -> Iterator[str]:
    if tensor is None:
        return
    if place.key.endswith(_COUNTER):
        if tensor.numel() != 1:
            yield f"{place.key}: found {list(tensor.shape)}, expected one number"
    elif tuple(tensor.shape) != place.shape:
        yield f"{place.key}: found {list(tensor.shape)}, expected {list(place.shape)}"
    elif place.dtype.is_floating_point != tensor.is_floating_point():
        yield f"{place.key}: found {tensor.dtype}, expected {place.dtype}"


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")
