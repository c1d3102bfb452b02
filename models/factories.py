"""The user's own code: a file or a package, found again wherever the model is served."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from models.errors import ModelError
from models.manifest import UserCode

OURS: Final = ("bench", "handler", "models", "runtime")
"""Cicada's own packages: a user's of the same name would meet them."""
_ALIAS: Final = "cicada_user_"


class UserCodeError(ModelError):
    """The user's module or function cannot be had; the message says why."""


def function_code(target: str, what: str) -> UserCode:
    """A function as a manifest records it. Raises UserCodeError.

    target: `FILE.py:function` or `package.module:function`. what: its part in this, for the message.
    """
    place, function = _split(target, what)
    found = module_code(place, what)
    return found.model_copy(update={"target": f"{found.target}:{function}"})


def module_code(place: str, what: str) -> UserCode:
    """A module as a manifest records it, a file by its absolute path. Raises UserCodeError.

    place: `FILE.py` or `package.module`.
    """
    if _is_file(place):
        path = Path(place).absolute()
        return UserCode(target=str(path), sha256=_hash(path, what))
    _check_name(place, what)
    return UserCode(target=place)


def with_distribution(code: UserCode) -> UserCode:
    """The code with the distribution that brings its package here."""
    return code.model_copy(update={"distribution": _distribution(code)})


def findings(code: UserCode, what: str) -> Iterator[str]:
    """Whether another distribution, or version of it, brings the package here than was recorded."""
    if code.distribution is None:
        return
    found = _distribution(code)
    if found != code.distribution:
        yield (
            f"{what} {code.target} was of {code.distribution} when the model was prepared, "
            f"found {found or 'none'}"
        )


def load_function(code: UserCode, what: str) -> Callable[..., Any]:
    """Raises UserCodeError where it cannot be had, or its file was changed since it was recorded."""
    place, name = _split(code.target, what)
    module = load_module(code.model_copy(update={"target": place}), what)
    return function_of(module, name, f"{what} {place}")


def function_of(module: ModuleType, name: str, what: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        held = "nothing" if found is None else f"a {type(found).__name__}"
        raise UserCodeError(f"{what} has {held} named {name}, expected a function")
    function: Callable[..., Any] = found
    return function


def load_module(code: UserCode, what: str) -> ModuleType:
    """Raises UserCodeError, as above."""
    place = code.target
    if code.sha256 is not None and _hash(Path(place), what) != code.sha256:
        raise UserCodeError(f"{what} {place} was changed since the model was prepared with it")
    try:
        return _from_file(Path(place)) if _is_file(place) else _from_package(place, what)
    except (UserCodeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it is the user's code that runs, and it may even exit
        raise UserCodeError(f"{what} {place} cannot be imported: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """What the user's code raised; of an import that may have met a package of ours instead of theirs, that too."""
    sentence = f"{type(error).__name__}: {error}"
    package = _package(error.name or "") if isinstance(error, ImportError) else ""
    if package not in OURS:
        return sentence
    return f"{sentence}; if {package} is a package of yours, rename it: Cicada has one of that name"


def _distribution(code: UserCode) -> str | None:
    """Name and version; None for a file, and for a package that none or several bring."""
    if _is_file(code.target):
        return None
    package = _package(code.target.partition(":")[0])
    names = set(importlib.metadata.packages_distributions().get(package, ()))
    if len(names) != 1:
        return None
    name = names.pop()
    return f"{name} {importlib.metadata.version(name)}"


def _from_file(path: Path) -> ModuleType:
    """A file's module, under a name of its own: a `models.py` does not meet our `models`.

    What lies beside it can be imported, after everything that is installed.
    """
    name = _ALIAS + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{path} is no Python file, expected one ending in .py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str, what: str) -> ModuleType:
    _check_name(name, what)
    return importlib.import_module(name)


def _check_name(name: str, what: str) -> None:
    package = _package(name)
    if package in OURS:
        raise UserCodeError(
            f"{what} {name}: {package} is the name of a package of Cicada's own, which yours would meet; "
            "rename it, or give the path of its file"
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserCodeError(f"{what} is {name!r}, expected FILE.py or package.module")


def _package(name: str) -> str:
    return name.partition(".")[0]


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _split(target: str, what: str) -> tuple[str, str]:
    place, colon, function = target.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise UserCodeError(
            f"{what} is {target!r}, expected FILE.py:function or package.module:function"
        )
    return place, function


def _hash(path: Path, what: str) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserCodeError(f"{what} {path}: {error.strerror}") from error
