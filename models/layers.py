"""Layer and Architecture: a network as a chain of layers, each built, loaded and run as a whole."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from models import slim
from models.ahead import Ahead
from models.blueprint import Blueprint, Slot, Structure
from models.fusion import Normalization
from models.gates import GatedForward
from models.manifest import BlockedLayout, Granularity

Run = Callable[[nn.Module, Any], Any]
Initializer = Callable[[nn.Module], None]


def call(root: nn.Module, value: Tensor) -> Tensor:
    output: Tensor = root(value)
    return output


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A parameter or persistent buffer of a layer, under its key in torchvision's state dict."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    memory_format: torch.memory_format = torch.contiguous_format
    """The order in which its values lie in memory and in a mapped file."""
    blocked: BlockedLayout | None = None
    """oneDNN's own order, in a mapped file alone."""

    @property
    def channels_last(self) -> bool:
        return self.memory_format == torch.channels_last


class Layer:
    """One step of a model's chain. It holds structure only, no weights.

    name: its place in torchvision's model, `layer3.4`, `relu`, `class_token`.
    root: the layer's module tree, as the model's constructor made it.
    prefix: what precedes the tree's own names in torchvision's state dict, `layer3.4.`.
    run: how the tree turns the preceding layer's output into its own.
    initialize: torchvision's own initialization of these modules, after their constructors'.
    elsewhere: names within the tree of tensors that lie in another layer's file.
    slimmed: whether the model suits slim modules; None: the tree is all that has a say in it.
    """

    __slots__ = (
        "_ahead",
        "_blueprint",
        "_initialize",
        "_run",
        "bindings",
        "elsewhere",
        "name",
        "parameter_slots",
        "placeholder_places",
        "placeholder_sizes",
        "prefix",
        "slots",
        "tensors",
        "tied",
    )

    def __init__(
        self,
        name: str,
        root: nn.Module,
        prefix: str,
        *,
        run: Run = call,
        initialize: Initializer = lambda _: None,
        elsewhere: Collection[str] = (),
        slimmed: bool | None = None,
    ) -> None:
        self.name = name
        self.prefix = prefix
        suits = slim.suits(root) if slimmed is None else slimmed
        self._blueprint = Blueprint(root, slimmed=suits)
        self._run = run
        self._initialize = initialize
        persistent = [
            slot
            for slot in self._blueprint.slots
            if slot.persistent and slot.name not in elsewhere and slot.same_as not in elsewhere
        ]
        own = [slot for slot in persistent if slot.same_as is None]
        self.slots: tuple[tuple[str, Slot], ...] = tuple((prefix + slot.name, slot) for slot in own)
        self.tied = tuple(
            (prefix + slot.same_as, slot) for slot in persistent if slot.same_as is not None
        )
        self.elsewhere = tuple(
            slot for slot in self._blueprint.slots if slot.persistent and slot not in persistent
        )
        self.bindings = tuple(
            (key, slot.table, slot.attribute) for key, slot in (*self.slots, *self.tied)
        )
        self.parameter_slots = tuple(slot for slot in own if slot.parameter)
        self.placeholder_places = [(slot.table, slot.attribute) for slot in self.parameter_slots]
        self.placeholder_sizes = [(slot.elements + 7) // 8 for slot in self.parameter_slots]
        self._ahead = Ahead[_Contents]()
        self.tensors: tuple[TensorPlace, ...] = tuple(
            TensorPlace(key, slot.shape, slot.dtype, slot.parameter, slot.memory_format)
            for key, slot in self.slots
        )

    def build_ahead(self) -> None:
        """Does the work of the next `build` now."""
        self._ahead.prepare(self._contents)

    def build(self) -> "BuiltLayer":
        """The layer's structure, its parameters and persistent buffers absent."""
        return BuiltLayer(self, self._ahead.take(self._contents), self._run, self._initialize)

    def _contents(self) -> "_Contents":
        return _Contents(self._blueprint.build(), _without_memory(self.placeholder_sizes))


class _Contents(NamedTuple):
    """What of a built layer can be made ahead."""

    structure: Structure
    placeholders: Sequence[Tensor]


class BuiltLayer:
    """A layer of one request, from its construction until the request's end."""

    __slots__ = ("_initialize", "_placeholders", "_run", "_structure", "layer")

    def __init__(
        self, layer: Layer, contents: _Contents, run: Run, initialize: Initializer
    ) -> None:
        self.layer = layer
        self._structure, self._placeholders = contents
        self._run = run
        self._initialize = initialize

    @property
    def root(self) -> nn.Module:
        return self._structure.root

    def put(self, slot: Slot, tensor: Tensor) -> None:
        self._structure.put(slot, tensor)

    def put_placeholders(self) -> int:
        """Puts a tensor of ceil(n/8) bytes in the place of each parameter of n elements.

        Returns how many bytes they take, which are one piece of memory and are taken now.
        """
        placeholders, self._placeholders = self._placeholders, ()
        if not placeholders:
            return 0
        held_bytes = sum(self.layer.placeholder_sizes)
        placeholders[0].untyped_storage().resize_(held_bytes)
        tables = self._structure.tables
        for (table, attribute), tensor in zip(
            self.layer.placeholder_places, placeholders, strict=True
        ):
            tables[table][attribute] = tensor
        return held_bytes

    def parameter_bytes(self) -> int:
        """Bytes of memory that the parameters (not the buffers) have at this moment."""
        held = {}
        for slot in self.layer.parameter_slots:
            tensor = self._structure.at(slot)
            if tensor is not None:
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())

    def allocate(self) -> None:
        """Gives every parameter and buffer memory of its full shape and precision."""
        made: dict[str, Tensor] = {}
        for key, slot in self.layer.slots:
            made[key] = _allocated(slot)
            self.put(slot, made[key])
        for key, slot in self.layer.tied:
            self.put(slot, made[key])
        for slot in self.layer.elsewhere:
            self.put(
                slot, _allocated(slot)
            )  # for its module's own reset; the tensor itself comes later

    def initialize(self) -> None:
        """Runs each module's own reset, then torchvision's initialization of this layer.

        Modules above the layers of a model that is cut by the general way are not among them: what lies
        directly on these stays as it was allocated until its weights come.
        """
        for module in reversed(list(self._structure.root.modules())):
            reset = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if reset is not None:
                reset()
        self._initialize(self._structure.root)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts the tensors, by key, in the parameters' and buffers' places; nothing is copied."""
        tables = self._structure.tables
        for key, table, attribute in self.layer.bindings:
            tables[table][attribute] = tensors[key]

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors, by key, into the memory that the parameters and buffers have."""
        for key, slot in self.layer.slots:
            target = self._structure.at(slot)
            if target is None:
                raise RuntimeError(f"{key} has no memory to copy into")
            target.copy_(tensors[key])

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Its modules under their names in torchvision's model."""
        for name, module in self._structure.root.named_modules():
            yield (self.layer.prefix + name).removesuffix("."), module

    def execute(self, value: Any) -> Any:
        return self._run(self._structure.root, value)

    def empty(self) -> None:
        """Lets go of its modules' contents at once: what holds itself would stay until a collection."""
        self._structure.empty()


def _without_memory(sizes: Sequence[int]) -> Sequence[Tensor]:
    """Tensors of so many bytes, one behind the other in a storage that is yet to get its memory."""
    whole = torch.empty(sum(sizes), dtype=torch.uint8)
    parts = whole.split_with_sizes(sizes)
    whole.untyped_storage().resize_(0)
    return parts


def _allocated(slot: Slot) -> Tensor:
    tensor = torch.empty(slot.shape, dtype=slot.dtype, memory_format=slot.memory_format)
    return nn.Parameter(tensor, requires_grad=False) if slot.parameter else tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A layer as the manifest records it: its name, what of the module it has, its last use."""

    name: str
    parts: tuple[str, ...]
    until: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network by name, as a chain whose output equals torchvision's `eval()` forward bit for bit.

    Unless it is fused (`models/fusion.py`): then the output is equal within 1e-4 of the largest logit.
    """

    name: str
    granularity: Granularity
    classes: int
    image_size: int
    """Side in pixels of the square input for which it was built."""
    layers: tuple[Layer, ...]
    folded: Mapping[str, Normalization] = field(default_factory=dict)
    """Of a fused one: by each convolution's name the normalization that it has taken over."""
    fused: bool = False
    """Whether there was anything to fuse."""
    dtype: torch.dtype = torch.float32
    """In which its layers compute; every floating-point parameter and buffer has it. A model of the user's has its
    own types, and this for the images it may take."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """What its builder was given besides classes and image size."""
    gated: GatedForward | None = None
    """The forward that comes to the layers by itself; without it, each takes the one before's output."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further keys that a state dict has for the same tensor, each with the one under which it is kept."""
    cuts: tuple[Cut, ...] = ()
    """Of a model that is cut by the general way."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """Persistent buffers that a constructor fills with what its forward relies on, tables of indices above
    all; of a model that is cut by the general way."""

    def forward(self, built: Sequence[BuiltLayer], inputs: Any) -> Any:
        """The output of layers whose weights are all applied."""
        if self.gated is not None:
            return self.gated(built.__getitem__, lambda _: (), inputs)
        for layer in built:
            inputs = layer.execute(inputs)
        return inputs

    @property
    def keys(self) -> frozenset[str]:
        """All keys of torchvision's state dict."""
        return frozenset(place.key for layer in self.layers for place in layer.tensors)
