"""torchvision's pretrained weights: their names, preprocessing, labels, and download."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.hub
import torchvision

from models import catalog
from models import download as downloading
from models.download import OnProgress
from models.errors import ModelError
from models.manifest import InputSpec


class PretrainedError(ModelError):
    """Weights that torchvision does not have, or that are not as it published them."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How images are prepared, and under which of torchvision's weights that is defined."""

    name: str
    input: InputSpec


def weights(architecture: str, name: str = "DEFAULT") -> Any:
    """torchvision's weights of that name. Raises UnknownArchitecture, PretrainedError."""
    member = any_weights(architecture, name)
    if member.meta["categories"] is None:
        raise PretrainedError(
            f"{architecture}'s {member.name} have no classifier, so they give no labels"
        )
    return member


def any_weights(architecture: str, name: str) -> Any:
    """The same, also those without a classifier. Raises UnknownArchitecture, PretrainedError."""
    known = _all_weights(architecture)
    member = getattr(known, name, None)
    if not isinstance(member, known):
        names = ", ".join(member.name for member in known)
        raise PretrainedError(f"{architecture} has no weights {name!r}, expected one of {names}")
    return member


def preset(architecture: str, image_size: int) -> Preset:
    """The preprocessing of torchvision's default weights, or of the first that take that image size.

    Where none does (a ViT built for another size), the default's with its sizes in proportion.
    """
    for member in _by_preference(architecture):
        found = preset_of(member)
        if found.input.crop == image_size:
            return found
    default = preset_of(_all_weights(architecture).DEFAULT)
    resize = round(_shorter_side(default.input) * image_size / default.input.crop)
    scaled = default.input.model_copy(update={"resize": resize, "crop": image_size})
    return Preset(f"{default.name}, scaled to {image_size}", scaled)


def preset_of(member: Any) -> Preset:
    """The preprocessing that belongs to the weights."""
    transform = member.transforms()
    return Preset(
        member.name,
        InputSpec(
            resize=transform.resize_size[0],
            crop=transform.crop_size[0],
            mean=tuple(transform.mean),
            std=tuple(transform.std),
            interpolation=transform.interpolation.value,
            antialias=bool(transform.antialias),
        ),
    )


def categories(architecture: str, classes: int) -> list[str] | None:
    """ImageNet's class names as torchvision has them, for a head of 1000 classes."""
    if classes != 1000:
        return None
    names: list[str] = list(_all_weights(architecture).DEFAULT.meta["categories"])
    return names


def download(member: Any, on_progress: OnProgress = lambda _done, _total: None) -> Path:
    """The weights' file in torch.hub's cache, downloaded unless it is there, its hash checked.

    Raises DownloadError, PretrainedError, and OSError when the cache cannot be written.
    """
    file_name = Path(urlparse(member.url).path).name
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name
    expected = _hash_in_name(file_name)
    if not path.exists():
        downloading.download(member.url, path, expected, on_progress)
    elif not _sha256(path).startswith(expected):
        raise PretrainedError(f"{path} is not what torchvision published: delete it and try again")
    return path


def _all_weights(architecture: str) -> Any:
    if architecture not in catalog.NAMES:
        raise catalog.UnknownArchitecture(architecture)
    return torchvision.models.get_model_weights(architecture)


def _by_preference(architecture: str) -> Iterator[Any]:
    known = _all_weights(architecture)
    yield known.DEFAULT
    yield from known


def _hash_in_name(file_name: str) -> str:
    """The start of the file's sha256, which torchvision writes into its name."""
    match = re.search(r"-([a-f0-9]+)\.", file_name)
    return match[1] if match else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shorter_side(spec: InputSpec) -> int:
    return spec.resize if isinstance(spec.resize, int) else min(spec.resize)
