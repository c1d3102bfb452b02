"""What a module's plain attributes refer to of its own tree: modules, their methods, their tensors.

A copy of the tree must refer to its own parts instead: a recurrent layer keeps a list of its weights, and
modules are found in plain lists, in partial functions and as owners of methods that are kept as hooks.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

Get = Callable[[Sequence[nn.Module]], Any]
_DEEPEST: Final = 4
"""Levels of containers within containers that are looked into."""


class Resolver(NamedTuple):
    """How a value is made that refers to the modules built, by their numbers.

    late: it refers to tensors, which are there only when the module is called.
    """

    get: Get
    late: bool


Places = dict[int, Resolver]
"""By the identity of what may be referred to."""


def to_module(number: int) -> Resolver:
    return Resolver(lambda built: built[number], late=False)


def to_tensor(number: int, table: str, attribute: str) -> Resolver:
    return Resolver(lambda built: built[number].__dict__[table][attribute], late=True)


def resolver(value: object, places: Places, depth: int = 0) -> Resolver | None:
    """None for a value that refers to nothing in `places`."""
    if id(value) in places:
        return places[id(value)]
    contained = _contained(value) if depth < _DEEPEST else None
    if contained is None:
        return None
    parts, rebuild = contained
    found = [resolver(part, places, depth + 1) for part in parts]
    if not any(found):
        return None
    getters: list[Get] = [
        _constant(part) if resolve is None else resolve.get
        for part, resolve in zip(parts, found, strict=True)
    ]
    late = any(resolve is not None and resolve.late for resolve in found)
    return Resolver(lambda built: rebuild([get(built) for get in getters]), late)


def referred(value: object, depth: int = 0) -> Iterator[nn.Module | Tensor]:
    """The modules and tensors that a plain attribute's value refers to."""
    if isinstance(value, nn.Module | Tensor):
        yield value
        return
    contained = _contained(value) if depth < _DEEPEST else None
    for part in contained[0] if contained else ():
        yield from referred(part, depth + 1)


def _constant(value: object) -> Get:
    return lambda _: value


def _contained(value: object) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What a value holds, and how one of its kind is made of other such parts."""
    if isinstance(value, MethodType):
        function = value.__func__
        return [value.__self__], lambda parts: MethodType(function, parts[0])
    if type(value) is functools.partial:
        return [value.func, value.args, value.keywords], lambda parts: functools.partial(
            parts[0], *parts[1], **parts[2]
        )
    if type(value) is dict or type(value) is OrderedDict:
        keys, kind = list(value), type(value)
        return list(value.values()), lambda parts: kind(zip(keys, parts, strict=True))
    if type(value) is list or type(value) is tuple or type(value) is set:
        return list(value), type(value)
    return None
