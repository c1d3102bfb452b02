"""The weight store: prepared models in a folder. Reading, preparing, verifying and removing, without torch.

weights/resnet50 -> .versions/resnet50/3f9a0c1b2d4e    the link that makes a version the current one
weights/.versions/resnet50/3f9a0c1b2d4e/               a version: complete, and never changed
weights/.versions/.new-8c1f.../                        a version being prepared
weights/.versions/.old-77ab.../                        what is being deleted
weights/.versions/.lock                                held while links and folders change
"""

import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from models import mapped_memory
from models.errors import ModelError
from models.manifest import NAME_PATTERN, VERSION_PATTERN, LayerEntry, Manifest, is_model_name

_MANIFEST: Final = "manifest.json"
_LABELS: Final = "labels.json"
_LOCK: Final = ".lock"
_NEW: Final = ".new-"
_OLD: Final = ".old-"
_KEPT_VERSIONS: Final = 2
_CHUNK_BYTES: Final = 4 << 20


class StoreError(ModelError):
    """The store cannot do what was asked."""


class UnknownModel(StoreError):
    """No such model, or no such version of it."""


class CorruptModel(StoreError):
    """A prepared model that cannot be used; the message names model and file."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """One version of a model on disk; `path` is its folder, absolute."""

    name: str
    version: str
    path: Path
    manifest: Manifest
    labels: tuple[str, ...] | None

    @property
    def bytes(self) -> int:
        """Size of its weight files."""
        return sum(layer.bytes for layer in self.manifest.layers)


class Store:
    """The models below `root`, which need not exist yet.

    Any number of processes may read while others prepare and remove. What in the folder does not have
    the store's form (other folders, files, links elsewhere) is neither followed nor touched.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._folders = self.root / ".versions"

    def names(self) -> list[str]:
        """The models that can be opened, sorted."""
        return [name for name in self._linked() if self._is_sound(name)]

    def damaged(self) -> list[str]:
        """The models that are there but cannot be opened, sorted."""
        return [name for name in self._linked() if not self._is_sound(name)]

    def open(self, name: str, version: str | None = None) -> PreparedModel:
        """The model's current or given version; the link is resolved once.

        Raises UnknownModel, CorruptModel.
        """
        while True:
            current = self._existing(name)
            try:
                return self._open_version(name, version or current)
            except StoreError:
                if version or self._current(name) == current:
                    raise  # else it was replaced, twice, while it was read

    def versions(self, name: str) -> list[str]:
        """The model's versions, the current one first, then the newest. Raises UnknownModel."""
        current = self._existing(name)
        return sorted(
            self._version_folders(name),
            key=lambda version: (version == current, self._modified_ns(name, version)),
            reverse=True,
        )

    def verify(self, name: str) -> list[str]:
        """What is wrong with the files of the model's current version, a sentence each.

        Raises UnknownModel.
        """
        try:
            model = self.open(name)
        except CorruptModel as error:
            return [str(error)]
        return list(_findings(model.path, model.manifest))

    def remove(self, name: str) -> None:
        """Removes the model: its link first, so that it is gone at once, then its versions. Raises UnknownModel."""
        if self._current(name) is None and not self._has_versions(name):
            raise UnknownModel(f"there is no model {name!r}")
        with self._locked():
            if self._current(name) is not None:
                (self.root / name).unlink()
                _sync(self.root)
            if self._has_versions(name):
                self._discard(self._folders / name)

    def check_name(self, name: str) -> None:
        """Raises StoreError for a name that is none, or that something else in the folder occupies."""
        if not is_model_name(name):
            raise StoreError(f"{name!r} is no model name: expected {NAME_PATTERN}")
        path = self.root / name
        if os.path.lexists(path) and _link_version(path) is None:
            raise StoreError(f"{path} is in the way: it is not a model of this store")
        if os.path.lexists(self._folders / name) and not self._has_versions(name):
            raise StoreError(f"{self._folders / name} is in the way: it is not a folder")

    @contextmanager
    def writer(self, name: str) -> Iterator["Writer"]:
        """For preparing a version of `name`: write its files below the writer's `path`, then `publish`.

        What fails before the model's link is replaced leaves the store as it was. What a killed preparation
        left is removed here. Raises StoreError for a name that is none, or that something else occupies.
        """
        self.check_name(name)
        with self._locked():
            self._sweep()
            folder = self._folders / f"{_NEW}{secrets.token_hex(8)}"
            folder.mkdir()
            alive = _open_locked(folder / _LOCK)
        try:
            yield Writer(self, name, folder)
        finally:
            with self._locked():
                if folder.exists():
                    self._discard(folder)
            os.close(alive)

    def _publish(self, name: str, folder: Path, manifest: Manifest) -> PreparedModel:
        encoded = _encoded(manifest)
        version = _version(encoded)
        (folder / _MANIFEST).write_bytes(encoded)
        _sync_contents(folder)
        if manifest.weight_format != "pth":  # those are read, not mapped
            for layer in manifest.layers:
                if layer.file is not None:
                    mapped_memory.recache(folder / layer.file)
        target = self._folders / name / version
        with self._locked():
            self.check_name(name)
            previous = self._current(name)
            if os.path.lexists(target) and not _is_intact(name, target):
                self._discard(target)
            added = not os.path.lexists(target)
            if added:
                target.parent.mkdir(exist_ok=True)
                (folder / _LOCK).unlink()
                folder.rename(target)
            try:
                _sync(target.parent)
                self._link(name, version)
            except BaseException:
                if added and self._current(name) != version:
                    self._discard(target)
                raise
            self._prune(name, version, previous)
            return _read(name, target)

    def _link(self, name: str, version: str) -> None:
        new = self._folders / f"{_NEW}{secrets.token_hex(8)}"
        new.symlink_to(f".versions/{name}/{version}")
        try:
            new.replace(self.root / name)
        except BaseException:
            new.unlink()
            raise
        _sync(self.root)

    def _prune(self, name: str, current: str, previous: str | None) -> None:
        """Keeps the current version and the one before it, on which requests may still be running."""
        if previous in {None, current}:
            superseded = self.versions(name)[_KEPT_VERSIONS:]
        else:
            superseded = [
                version
                for version in self._version_folders(name)
                if version not in {current, previous}
            ]
        for version in superseded:
            self._discard(self._folders / name / version)

    def _discard(self, path: Path) -> None:
        """Deletes a folder so that it is gone at once, even if the process dies over it."""
        old = self._folders / f"{_OLD}{secrets.token_hex(8)}"
        path.rename(old)
        shutil.rmtree(old)

    def _sweep(self) -> None:
        """Deletes what killed processes left; only under the lock, where no one else is half-way."""
        for path in self._folders.iterdir():
            if path.name.startswith(_OLD) or (path.name.startswith(_NEW) and not _is_alive(path)):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time. The lock and its folder go when nothing else is left in it."""
        lock = self._folders / _LOCK
        while True:
            self._folders.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = _open_locked(lock)
            except FileNotFoundError:
                continue  # the folder went in between
            if _is_at(descriptor, lock):
                break
            os.close(descriptor)
        try:
            yield
        finally:
            self._tidy(lock)
            os.close(descriptor)

    def _tidy(self, lock: Path) -> None:
        for path in self._folders.iterdir():
            if is_model_name(path.name) and path.is_dir():
                with suppress(OSError):  # holds a version
                    path.rmdir()
        if next((path for path in self._folders.iterdir() if path != lock), None) is None:
            lock.unlink()
            self._folders.rmdir()

    def _linked(self) -> list[str]:
        try:
            found = sorted(path.name for path in self.root.iterdir() if is_model_name(path.name))
        except FileNotFoundError:
            return []
        return [name for name in found if self._current(name) is not None]

    def _is_sound(self, name: str) -> bool:
        try:
            self.open(name)
        except StoreError:
            return False
        return True

    def _current(self, name: str) -> str | None:
        return _link_version(self.root / name) if is_model_name(name) else None

    def _existing(self, name: str) -> str:
        current = self._current(name)
        if current is None:
            raise UnknownModel(f"there is no model {name!r}")
        return current

    def _open_version(self, name: str, version: str) -> PreparedModel:
        folder = self._folder(name, version)
        if folder is None:
            raise UnknownModel(f"model {name!r} has no version {version!r}")
        return _read(name, folder)

    def _folder(self, name: str, version: str) -> Path | None:
        if re.fullmatch(VERSION_PATTERN, version) is None:
            return None
        folder = self._folders / name / version
        return folder if _is_own_folder(folder.parent) and _is_own_folder(folder) else None

    def _has_versions(self, name: str) -> bool:
        return is_model_name(name) and _is_own_folder(self._folders / name)

    def _version_folders(self, name: str) -> list[str]:
        if not self._has_versions(name):
            return []
        try:
            found = [path.name for path in (self._folders / name).iterdir()]
        except FileNotFoundError:  # removed in between
            return []
        return [version for version in found if self._folder(name, version) is not None]

    def _modified_ns(self, name: str, version: str) -> int:
        try:
            return (self._folders / name / version).stat().st_mtime_ns
        except FileNotFoundError:  # removed in between
            return 0


class Writer:
    """A version being prepared: weight files are written below `path`."""

    def __init__(self, store: Store, name: str, path: Path) -> None:
        self._store = store
        self._name = name
        self.path = path

    def write_labels(self, labels: Sequence[str]) -> str:
        """Writes the class names; returns the hash that belongs into the manifest."""
        encoded = json.dumps(list(labels), ensure_ascii=False, indent=0).encode()
        (self.path / _LABELS).write_bytes(encoded)
        return hashlib.sha256(encoded).hexdigest()

    def publish(self, manifest: Manifest) -> PreparedModel:
        """Makes what was written the model's current version, all at once, durable on disk."""
        return self._store._publish(self._name, self.path, manifest)  # noqa: SLF001 - its other half


def _encoded(manifest: Manifest) -> bytes:
    """The one form in which a manifest is written and its version computed."""
    return json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False).encode()


def _version(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:12]


def _read(name: str, folder: Path) -> PreparedModel:
    try:
        status = (folder / _MANIFEST).lstat()
    except OSError as error:
        raise CorruptModel(f"model {name!r}: {_MANIFEST}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorruptModel(f"model {name!r}: {_MANIFEST}: is not a regular file")
    return _read_cached(name, folder, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read_cached(name: str, folder: Path, _inode: int, _modified_ns: int) -> PreparedModel:
    path = folder / _MANIFEST
    try:
        encoded = path.read_bytes()
        if _version(encoded) != folder.name:
            raise CorruptModel(f"model {name!r}: {_MANIFEST}: was changed since it was prepared")
        manifest = Manifest.model_validate_json(encoded)
        labels = _read_labels(folder, manifest)
    except OSError as error:
        file = Path(error.filename or path).name  # an error of reading names no file
        raise CorruptModel(f"model {name!r}: {file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptModel(f"model {name!r}: {_MANIFEST}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise CorruptModel(f"model {name!r}: {_LABELS}: {error}") from error
    return PreparedModel(name, folder.name, folder, manifest, labels)


def _read_labels(folder: Path, manifest: Manifest) -> tuple[str, ...] | None:
    if manifest.labels is None:
        return None
    if not (folder / manifest.labels).is_file():
        raise ValueError("is missing, or is not a file")
    encoded = (folder / manifest.labels).read_bytes()
    if hashlib.sha256(encoded).hexdigest() != manifest.labels_sha256:
        raise ValueError("was changed since it was prepared")
    labels = json.loads(encoded)
    if len(labels) != manifest.classes or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"expected a list of {manifest.classes} strings")
    return tuple(labels)


def _is_intact(name: str, folder: Path) -> bool:
    try:
        model = _read(name, folder)
    except CorruptModel:
        return False
    return next(_findings(folder, model.manifest), None) is None


def _findings(folder: Path, manifest: Manifest) -> Iterator[str]:
    try:
        _read_labels(folder, manifest)
    except (OSError, ValueError) as error:
        yield f"{_LABELS}: {error}"
    for layer in manifest.layers:
        try:
            finding = _finding(folder, layer)
        except OSError as error:
            finding = f"{layer.file}: {error.strerror}"
        if finding is not None:
            yield finding


def _finding(folder: Path, layer: LayerEntry) -> str | None:
    if layer.file is None:
        return None
    status = (folder / layer.file).lstat()
    if not stat.S_ISREG(status.st_mode):
        return f"{layer.file}: is not a regular file"
    if status.st_size != layer.bytes:
        return f"{layer.file}: has {status.st_size} bytes, expected {layer.bytes}"
    found = _file_sha256(folder / layer.file)
    if found != layer.sha256:
        return f"{layer.file}: has sha256 {found}, expected {layer.sha256}"
    return None


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _link_version(link: Path) -> str | None:
    """The version that a model's link names; None for anything that is not such a link."""
    try:
        target = link.readlink().as_posix()
    except OSError:
        return None
    match = re.fullmatch(rf"\.versions/{re.escape(link.name)}/({VERSION_PATTERN})", target)
    return match[1] if match else None


def _is_own_folder(path: Path) -> bool:
    """Whether a folder is there, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _open_locked(path: Path, *, wait: bool = True) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the opened file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_alive(folder: Path) -> bool:
    """Whether the process that prepares in this folder still holds its lock."""
    if not (folder / _LOCK).is_file():
        return False
    try:
        os.close(_open_locked(folder / _LOCK, wait=False))
    except BlockingIOError:
        return True
    return False


def _sync_contents(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
