"""A module's own forward, run over layers that may not be there yet: it waits at each as it comes to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn

from models import slim
from models.ahead import Ahead
from models.blueprint import Blueprint, Slot, Structure

Enter = Callable[[int], Sequence[int]]
"""Waits until a layer's weights are applied; returns the layers that were let go meanwhile."""
_TABLES: Final = ("_modules", "_parameters", "_buffers")
_Path = tuple[str, ...]


class LayerGone(RuntimeError):
    """The forward comes back to a layer that was let go: later than it did when the model was prepared.

    Of torchvision's models only, and in little memory: a user's layers stay until the request's end.
    """


class Loaded(Protocol):
    """A layer of one request, its weights applied."""

    @property
    def root(self) -> nn.Module: ...

    def put(self, slot: Slot, tensor: Tensor) -> None: ...


class SharedTensor(NamedTuple):
    """A tensor of a layer that lies in the file of an earlier one, its owner."""

    slot: Slot
    owner: int
    key: str


@dataclass(frozen=True, slots=True)
class Part:
    """What of a module belongs to one layer, by dotted names: subtrees, and tensors on the modules above.

    shared: its tensors that lie in an earlier layer's file.
    until: the layer in whose execution the forward, on the example, comes to this one for the last time; on
    other inputs a user's may come back to it later.
    """

    names: tuple[str, ...]
    shared: tuple[SharedTensor, ...]
    until: int


class Gate(dict[str, Any]):
    """A module's table of children, parameters or buffers, some of which belong to layers.

    Whoever takes such an entry out comes to its layer first. `nn.Module` looks every attribute up in its
    tables, so that a forward reaches no layer unnoticed, whatever it does; within a layer tables are plain.
    """

    __slots__ = ("_arrive", "_layers")

    def __init__(
        self, table: Mapping[str, Any], layers: Mapping[str, int], arrive: Callable[[int], None]
    ) -> None:
        super().__init__(table)
        self._layers = layers
        self._arrive = arrive

    def __getitem__(self, name: str) -> Any:
        layer = self._layers.get(name)
        if layer is not None:
            self._arrive(layer)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Once its layer is there, which would come in the value's place."""
        self.get(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.get(name)
        super().__delitem__(name)

    def close(self) -> None:
        """It is used no more; its module may be held by itself, and is to hold no weights then."""
        self.clear()
        del self._arrive

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is `get`

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        """One after another: a loop over children comes to each in its turn."""
        return (self[name] for name in self)

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)


class _Place(NamedTuple):
    """Entries of a gate that are one layer's, and the module and table of its tree from which they come."""

    gate: int
    owner: _Path
    table: str
    names: tuple[str, ...]


class GatedForward:
    """The modules above a model's layers, of which every request gets its own; it holds no weights.

    A layer's subtrees have their topmost modules here, without contents: to name a module, as
    `self.head(self.body(x))` does first of all, is not yet to use it.
    """

    __slots__ = ("_ahead", "_blueprint", "_gates", "_places", "parts")

    def __init__(self, module: nn.Module, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        layer_of = {
            path: layer
            for layer, part in enumerate(parts)
            for name in part.names
            for path in contents(module, name)
        }
        self._blueprint = Blueprint(module, absent=layer_of, slimmed=slim.suits(module))
        self._gates: list[tuple[int, str, dict[str, int]]] = []
        self._places: list[list[_Place]] = [[] for _ in parts]
        self._ahead = Ahead[Passage]()
        for above, number in self._blueprint.numbers.items():
            for table in _TABLES:
                self._add_gate(module.get_submodule(above), above, number, table, layer_of)

    def _add_gate(
        self, module: nn.Module, above: str, number: int, table: str, layer_of: Mapping[str, int]
    ) -> None:
        prefix = f"{above}." if above else ""
        layers = {
            name: layer_of[prefix + name]
            for name in module.__dict__[table]
            if prefix + name in layer_of
        }
        if not layers:
            return
        owner = tuple(above.split(".")) if above else ()
        for layer in set(layers.values()):
            names = tuple(name for name in layers if layers[name] == layer)
            self._places[layer].append(_Place(len(self._gates), owner, table, names))
        self._gates.append((number, table, layers))

    def build_ahead(self) -> None:
        """Builds the modules of the next passage now."""
        self._ahead.prepare(self._passage)

    def discard(self) -> None:
        """Lets go of what was built ahead."""
        if (passage := self._ahead.discard()) is not None:
            passage.leave()

    def passage(self) -> "Passage":
        """One forward over modules that nobody else has."""
        return self._ahead.take(self._passage)

    def _passage(self, prepared: Callable[[nn.Module], None] = lambda _: None) -> "Passage":
        structure = self._blueprint.build()
        prepared(structure.root)
        return Passage(self.parts, self._places, structure, self._gates)

    def __call__(
        self,
        loaded: Callable[[int], Loaded],
        enter: Enter,
        inputs: Any,
        prepared: Callable[[nn.Module], None] = lambda _: None,
    ) -> Any:
        """The output of one passage, which is left with it. Raises LayerGone.

        prepared: is given the modules above the layers before there are gates in them.
        """
        passage = self._passage(prepared)
        try:
            return passage.run(loaded, enter, inputs)
        finally:
            passage.leave()


class Passage:
    """One forward of a model's own, to be run once and then left."""

    __slots__ = (
        "_enter",
        "_gates",
        "_left",
        "_loaded",
        "_parts",
        "_placed",
        "_places",
        "_structure",
    )

    def __init__(
        self,
        parts: Sequence[Part],
        places: Sequence[Sequence[_Place]],
        structure: Structure,
        gates: Sequence[tuple[int, str, dict[str, int]]],
    ) -> None:
        self._parts = parts
        self._places = places
        self._structure = structure
        self._placed: set[int] = set()
        self._left: set[int] = set()
        self._gates = [
            _with_gate(structure.modules[number], table, layers, self._arrive)
            for number, table, layers in gates
        ]

    def run(self, loaded: Callable[[int], Loaded], enter: Enter, inputs: Any) -> Any:
        """The module's output. Raises LayerGone.

        loaded: gives a layer that was entered.
        """
        self._loaded = loaded
        self._enter = enter
        try:
            return call_with(self._structure.root, inputs)
        finally:
            del self._loaded, self._enter  # which may hold this passage

    def leave(self) -> None:
        """Takes from the modules all that they hold: they hold each other, and with that the weights, which
        would stay until a collection.
        """
        for gate in self._gates:
            gate.close()
        self._gates = []
        self._structure.empty()

    def _arrive(self, layer: int) -> None:
        first = layer not in self._placed
        if first:
            for tensor in self._parts[layer].shared:
                self._arrive(tensor.owner)
        for gone in self._enter(layer):
            self._left.add(gone)
            for place in self._places[gone]:
                self._gates[place.gate].update(dict.fromkeys(place.names))
        if layer in self._left:
            raise LayerGone(
                f"the forward comes back to {self._parts[layer].names[0]} after its weights were let go, "
                "which it did not for the example that the model was prepared with"
            )
        if first:
            self._placed.add(layer)
            self._place(layer)

    def _place(self, layer: int) -> None:
        """Puts what the layer has into the tables of the modules above."""
        built = self._loaded(layer)
        for tensor in self._parts[layer].shared:
            owner = self._loaded(tensor.owner).root
            built.put(tensor.slot, _entry(owner, tuple(tensor.key.split("."))))
        for place in self._places[layer]:
            entries = _module(built.root, place.owner).__dict__[place.table]
            # `update` is a dictionary's own, which comes to no layer.
            self._gates[place.gate].update({name: entries[name] for name in place.names})


def contents(module: nn.Module, name: str) -> Iterator[str]:
    """The entries of a subtree's topmost module, by dotted names; of a tensor, its own."""
    owner, _, attribute = name.rpartition(".")
    part = module.get_submodule(owner)._modules.get(attribute)
    if part is None:
        yield name
        return
    for table in _TABLES:
        for entry, value in part.__dict__[table].items():
            if value is not None and entry not in part._non_persistent_buffers_set:
                yield f"{name}.{entry}"


def call_with(root: nn.Module, inputs: Any) -> Any:
    """Calls a module with one input, a sequence of them in order, or a mapping of them by name."""
    if isinstance(inputs, Mapping):
        return root(**inputs)
    if isinstance(inputs, tuple | list):
        return root(*inputs)
    return root(inputs)


def _with_gate(
    module: nn.Module, table: str, layers: Mapping[str, int], arrive: Callable[[int], None]
) -> Gate:
    state = module.__dict__
    gate = state[table] = Gate(state[table], layers, arrive)
    return gate


def _entry(root: nn.Module, path: _Path) -> Any:
    """The module or tensor at a path of a layer's tree."""
    owner = _module(root, path[:-1])
    for table in _TABLES:
        if path[-1] in owner.__dict__[table]:
            return owner.__dict__[table][path[-1]]
    raise KeyError(".".join(path))


def _module(root: nn.Module, path: _Path) -> nn.Module:
    for name in path:
        root = root.__dict__["_modules"][name]
    return root
