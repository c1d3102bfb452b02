"""The structure of a module tree, from which copies are built in microseconds and without memory for weights."""

import copy
import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models import references, slim

_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})

_CONTAINERS: Final = (dict, OrderedDict, list, set)

_FILLS: Final = frozenset(
    {
        Tensor.uniform_,
        Tensor.normal_,
        Tensor.fill_,
        Tensor.zero_,
        Tensor.erfinv_,
        Tensor.mul_,
        Tensor.add_,
        Tensor.clamp_,
        Tensor.copy_,
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.constant_,
        nn.init.trunc_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
    }
)

_set_attribute: Final = object.__setattr__
"""Not as a module does it, which looks for parameters in what it is given."""


class _StructureOnly(TorchFunctionMode):
    """Constructors run, but `torch.empty` takes no memory and nothing is computed on what it gave.

    Parameters come from `torch.empty`, so they land on the meta device; buffers come from `torch.zeros`
    and the like, so they keep their real values. A function mode holds for the thread that entered it,
    other threads construct normally meanwhile.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in _FILLS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


def structure_only() -> AbstractContextManager[Any]:
    """Within it, this thread's module constructors take no memory for parameters and fill none."""
    return _StructureOnly()


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a parameter or buffer in a built tree."""

    table: int
    """Its number in `Structure.tables`."""
    attribute: str
    name: str
    """Dotted, from the tree's root, as in a state dict."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    persistent: bool
    memory_format: torch.memory_format
    same_as: str | None = None
    """The name of an earlier slot whose tensor this one holds too (tied weights)."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree just built: its root, and each module's tables of parameters and of buffers, in turn."""

    root: nn.Module
    tables: list[dict[str, Tensor | None]]
    modules: Sequence[nn.Module]
    """All of the tree, by their numbers in the blueprint."""

    def put(self, slot: Slot, tensor: Tensor) -> None:
        self.tables[slot.table][slot.attribute] = tensor

    def at(self, slot: Slot) -> Tensor | None:
        return self.tables[slot.table][slot.attribute]

    def empty(self) -> None:
        """Takes from modules that are used no more all that they hold, which may be each other, and themselves:
        weights would stay until a collection.
        """
        for module in self.modules:
            module.__dict__.clear()


class Blueprint:
    """A module tree without its weights: per module its class, plain attributes, and empty tables.

    `build` runs no constructor (0.3 ms for ResNet-50's 151 modules, where the constructors on the meta
    device take 37 ms). Parameters and persistent buffers are None in what it builds; buffers that no
    state dict carries are copies of what the constructor made. A module that stands in several places
    is built once, and its tensors have one slot each, under their first name.

    absent: dotted names of subtrees that are left out; their places hold None.
    slimmed: whether slim modules are built (`models/slim.py`), for a model that suits.
    """

    __slots__ = ("_links", "_nodes", "_referring", "numbers", "slots")

    def __init__(
        self, root: nn.Module, absent: Collection[str] = (), *, slimmed: bool = False
    ) -> None:
        named: dict[str, nn.Module] = {}
        links: list[tuple[int, str, int]] = []
        _walk(root, "", absent, named, {}, links)
        self.numbers = {name: number for number, name in enumerate(named)}
        self._links = tuple(
            (parent, tuple((attribute, child) for _, attribute, child in group))
            for parent, group in itertools.groupby(sorted(links, key=_parent), _parent)
        )
        self.slots: tuple[Slot, ...] = tuple(_slots(named))
        places = _places(named)
        self._nodes = tuple(_Node(module, places, slimmed=slimmed) for module in named.values())
        self._referring = tuple(
            (number, node) for number, node in enumerate(self._nodes) if node.refers
        )

    def build(self) -> Structure:
        """A tree that nobody else has."""
        tables: list[dict[str, Tensor | None]] = []
        built = [node.build(tables) for node in self._nodes]
        for parent, children in self._links:
            modules = built[parent].__dict__["_modules"]
            for attribute, child in children:
                modules[attribute] = built[child]
        for number, node in self._referring:
            node.refer(built[number], built)
        return Structure(built[0], tables, built)


def _parent(link: tuple[int, str, int]) -> int:
    return link[0]


class _Node:
    __slots__ = (
        "_attributes",
        "_buffers",
        "_children",
        "_class",
        "_kept",
        "_late",
        "_mutable",
        "_parameters",
        "_references",
    )

    def __init__(self, module: nn.Module, places: references.Places, *, slimmed: bool) -> None:
        self._class, attributes = (
            slim.plain_attributes(module) if slimmed else (type(module), vars(module))
        )
        plain = {name: value for name, value in attributes.items() if name not in _TABLES}
        found = {name: references.resolver(value, places) for name, value in plain.items()}
        self._references = tuple(
            (name, resolve.get) for name, resolve in found.items() if resolve and not resolve.late
        )
        self._late = tuple(
            (name, resolve.get) for name, resolve in found.items() if resolve and resolve.late
        )
        plain = {name: None if found[name] else value for name, value in plain.items()}
        # An empty table is made anew by its class: copying one costs ten times as much, and a module has
        # a dozen (its hooks).
        self._mutable = tuple(
            (name, functools.partial(copy.copy, value) if value else type(value))
            for name, value in plain.items()
            if type(value) in _CONTAINERS
        )
        self._attributes = plain
        self._children: dict[str, nn.Module | None] = dict.fromkeys(module._modules)
        self._parameters: dict[str, Tensor | None] = dict.fromkeys(module._parameters)
        self._buffers: dict[str, Tensor | None] = dict.fromkeys(module._buffers)
        self._kept = tuple(
            (name, buffer.clone())
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        )

    @property
    def refers(self) -> bool:
        return bool(self._references or self._late)

    def build(self, tables: list[dict[str, Tensor | None]]) -> nn.Module:
        """The module, whose tables of parameters and of buffers are added to those given."""
        # Not by the class's own `__new__`: that of a traced module makes a class, and loses its forward.
        module: nn.Module = object.__new__(self._class)
        state = self._attributes.copy()
        for name, fresh in self._mutable:
            state[name] = fresh()
        state["_parameters"] = parameters = self._parameters.copy()
        state["_buffers"] = buffers = self._buffers.copy()
        state["_modules"] = self._children.copy()
        for name, buffer in self._kept:
            buffers[name] = buffer.clone()
        tables.append(parameters)
        tables.append(buffers)
        _set_attribute(module, "__dict__", state)
        return module

    def refer(self, module: nn.Module, built: Sequence[nn.Module]) -> None:
        """Makes plain attributes refer to what was built, where the source's referred to its own parts.

        Tensors are not there yet, so what refers to them (the list of weights that a recurrent layer
        keeps) is made when the module is called.
        """
        state = module.__dict__
        for name, resolve in self._references:
            state[name] = resolve(built)
        if self._late:
            late = self._late

            def refer_to_tensors(_module: nn.Module, _inputs: Any) -> None:
                for name, resolve in late:
                    state[name] = resolve(built)

            module.register_forward_pre_hook(refer_to_tensors, prepend=True)


def _walk(
    module: nn.Module,
    name: str,
    absent: Collection[str],
    named: dict[str, nn.Module],
    numbers: dict[int, int],
    links: list[tuple[int, str, int]],
) -> int:
    """Collects the tree's modules, each once, parents first; returns this one's number."""
    number = numbers[id(module)] = len(named)
    named[name] = module
    for attribute, child in module._modules.items():
        path = f"{name}.{attribute}" if name else attribute
        if child is None or path in absent:
            continue
        known = numbers.get(id(child))
        if known is None:
            known = _walk(child, path, absent, named, numbers, links)
        links.append((number, attribute, known))
    return number


def _places(named: Mapping[str, nn.Module]) -> references.Places:
    places: references.Places = {}
    for number, module in enumerate(named.values()):
        places[id(module)] = references.to_module(number)
        for table in ("_parameters", "_buffers"):
            for attribute, tensor in module.__dict__[table].items():
                if tensor is not None:
                    places.setdefault(id(tensor), references.to_tensor(number, table, attribute))
    return places


def _slots(named: Mapping[str, nn.Module]) -> Iterator[Slot]:
    first: dict[int, str] = {}
    for number, (prefix, module) in enumerate(named.items()):
        for attributes, parameter in ((module._parameters, True), (module._buffers, False)):
            for attribute, tensor in attributes.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                earlier = first.setdefault(id(tensor), name)
                yield Slot(
                    table=2 * number + (not parameter),
                    attribute=attribute,
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    parameter=parameter,
                    persistent=parameter or attribute not in module._non_persistent_buffers_set,
                    memory_format=_memory_format(tensor),
                    same_as=None if earlier == name else earlier,
                )


def _memory_format(tensor: Tensor) -> torch.memory_format:
    if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format
