"""torchvision without torch's compiler, which it takes one function of: with it, importing torchvision takes a
second and 150 MB more, in every handler.

While torchvision is imported, that function is a stand-in, which imports the compiler if it is ever called:
where torch is told to be deterministic, and regions of images are pooled. Whoever wants the compiler gets it, a
torchvision that takes more of it among them.
"""

import functools
import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

_TORCHVISION: Final = "torchvision"
_COMPILER: Final = "torch._dynamo"
_UTILITIES: Final = "torch._dynamo.utils"


def is_compile_supported(device_type: str) -> bool:
    """torch._dynamo.utils' own."""
    utilities = importlib.import_module(_UTILITIES)
    supported: bool = utilities.is_compile_supported(device_type)
    return supported


def arrange() -> None:
    """From now on; a torchvision that is there already stays as it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        _target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _TORCHVISION:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module("torch")
        stand_ins = {} if _COMPILER in sys.modules else _stand_ins()
        sys.modules.update(stand_ins)
        try:
            self._loader.exec_module(module)
        finally:
            _remove(stand_ins)
            module.__loader__ = self._loader  # which knows the source, as others expect of it
            if module.__spec__ is not None:
                module.__spec__.loader = self._loader


def _stand_ins() -> dict[str, ModuleType]:
    compiler, utilities = ModuleType(_COMPILER), ModuleType(_UTILITIES)
    stand_ins = {_COMPILER: compiler, _UTILITIES: utilities}
    vars(compiler).update(utils=utilities, __path__=[])
    vars(utilities).update(is_compile_supported=is_compile_supported)
    for name, stand_in in stand_ins.items():
        vars(stand_in).update(__getattr__=functools.partial(_of_the_compiler, stand_ins, name))
    return stand_ins


def _of_the_compiler(stand_ins: dict[str, ModuleType], module: str, name: str) -> Any:
    """What the stand-ins have not, of the compiler itself, which takes their place."""
    if name.startswith("__"):
        raise AttributeError(name)  # the import system looks for some that modules may lack
    _remove(stand_ins)
    return getattr(importlib.import_module(module), name)


def _remove(stand_ins: dict[str, ModuleType]) -> None:
    for name, stand_in in stand_ins.items():
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
