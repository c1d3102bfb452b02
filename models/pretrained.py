"""torchvision's pretrained weights: their names, preprocessing, labels, and download."""

import hashlib
import re
import socket
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

import torch.hub
import torchvision

from models import catalog
from models.errors import ModelError
from models.manifest import InputSpec

_CHUNK_BYTES: Final = 4 << 20
_STALL_S: Final = 30.0


class PretrainedError(ModelError):
    """Weights that torchvision does not have, or that could not be downloaded."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How images are prepared, and under which of torchvision's weights that is defined."""

    name: str
    input: InputSpec


def weights(architecture: str, name: str = "DEFAULT") -> Any:
    """torchvision's weights of that name. Raises UnknownArchitecture, PretrainedError."""
    known = _all_weights(architecture)
    member = getattr(known, name, None)
    if not isinstance(member, known):
        names = ", ".join(member.name for member in known)
        raise PretrainedError(f"{architecture} has no weights {name!r}, expected one of {names}")
    if member.meta["categories"] is None:
        raise PretrainedError(
            f"{architecture}'s {member.name} have no classifier, so they give no labels"
        )
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
    resize = round(default.input.resize * image_size / default.input.crop)
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


def download(member: Any) -> Path:
    """The weights' file, downloaded by torch.hub into its cache unless it is there, its hash checked.

    Raises PretrainedError, and OSError when the cache cannot be written.
    """
    file_name = Path(urlparse(member.url).path).name
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name
    expected = _hash_in_name(file_name)
    if path.exists():
        if not _sha256(path).startswith(expected):
            raise PretrainedError(
                f"{path} is not what torchvision published: delete it and try again"
            )
        return path
    try:
        with _stalling_at_most(_STALL_S):
            torch.hub.download_url_to_file(
                member.url, str(path), expected or None, progress=sys.stderr.isatty()
            )
    except (urllib.error.URLError, ConnectionError, TimeoutError, RuntimeError) as error:
        raise PretrainedError(f"{member.url} could not be downloaded: {_reason(error)}") from error
    return path


@contextmanager
def _stalling_at_most(seconds: float) -> Iterator[None]:
    """torch.hub sets no time limit, and a host that answers nothing would hold it for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause)


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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
