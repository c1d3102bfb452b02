"""What of a model's version is kept between requests: structure and places of weights, no weights."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import torch

from handler import openmp
from handler.errors import ModelFault
from handler.retrieval import FileLayout, TensorView
from models import blocked, catalog, own
from models.errors import ModelError
from models.gates import GatedForward
from models.layers import Architecture, Cut, Layer, TensorPlace
from models.manifest import LayerEntry, TensorEntry
from models.store import PreparedModel
from models.weight_files import DATA_TYPES

_DTYPES: Final = {name: dtype for dtype, name in DATA_TYPES.items()}
_CONSTRUCTION_ERRORS: Final = (AssertionError, OverflowError, RuntimeError, TypeError, ValueError)
"""What torchvision's constructors raise for sizes that they cannot be built for."""


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    layer: Layer
    entry: LayerEntry
    layout: FileLayout | None
    """Of its file, if that is to be mapped."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a version's files become its architecture's layers."""

    layers: tuple[PlannedLayer, ...]
    dtype: torch.dtype
    """In which the layers compute: their input's, and their output's."""
    gated: GatedForward | None
    """The forward that comes to the layers by itself; without it, each takes the one before's output."""

    def build_ahead(self) -> None:
        """Builds the modules of the next request, without weights, so that it has but to take them."""
        for planned in self.layers:
            planned.layer.build_ahead()
        if self.gated is not None:
            self.gated.build_ahead()

    def place_ahead(self) -> None:
        """Makes the tensors of the next request, on addresses that are reserved until it comes."""
        for layout in self._layouts():
            layout.place_ahead()

    def give_up_places(self) -> None:
        """Gives the addresses back."""
        for layout in self._layouts():
            layout.give_up()

    def discard(self) -> None:
        """Lets go of what was built ahead, part of which would stay until a collection."""
        if self.gated is not None:
            self.gated.discard()

    def _layouts(self) -> Iterator[FileLayout]:
        return (planned.layout for planned in self.layers if planned.layout is not None)

    @property
    def names(self) -> list[str]:
        return [planned.layer.name for planned in self.layers]

    @property
    def layer_bytes(self) -> list[int]:
        return [planned.entry.bytes for planned in self.layers]


class Plans:
    """The plans of the versions served lately. Raises ModelFault for a manifest that fits no architecture.

    Only the last one that was asked for may hold addresses: another's request is to find as many as there are.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._plans: OrderedDict[str, Plan] = OrderedDict()

    def of(self, model: PreparedModel) -> Plan:
        key = str(model.path)
        if self._plans and (last := next(reversed(self._plans))) != key:
            self._plans[last].give_up_places()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _plan(model)
        self._plans.move_to_end(key)
        if len(self._plans) > self._most:
            self._plans.popitem(last=False)[1].discard()
        return plan


def _plan(model: PreparedModel) -> Plan:
    manifest = model.manifest
    _check_onednn(model)
    try:
        architecture = _architecture(model)
    except ModelError as error:
        raise ModelFault(f"model {model.name!r}: {error}") from error
    except _CONSTRUCTION_ERRORS as error:
        what = f"{manifest.architecture} for images of {manifest.image_size} pixels"
        raise ModelFault(f"model {model.name!r}: its manifest says {what}: {error}") from error
    found = [entry.name for entry in manifest.layers]
    expected = [layer.name for layer in architecture.layers]
    if found != expected:
        raise ModelFault(
            f"model {model.name!r}: its manifest has the layers {found}, "
            f"expected those of {manifest.architecture}: {expected}"
        )
    return Plan(
        tuple(
            _planned(model, layer, entry)
            for layer, entry in zip(architecture.layers, manifest.layers, strict=True)
        ),
        architecture.dtype,
        architecture.gated,
    )


def _check_onednn(model: PreparedModel) -> None:
    """A version of oneDNN reads the layouts that it made itself."""
    optimization = model.manifest.optimization
    wanted = None if optimization is None else optimization.onednn
    found = blocked.onednn_version()
    if wanted not in {None, found}:
        raise ModelFault(
            f"model {model.name!r}: its weights are laid out for oneDNN {wanted}, "
            f"found {found or 'none'}: prepare it again here"
        )


def _architecture(model: PreparedModel) -> Architecture:
    manifest = model.manifest
    if manifest.factory is not None:
        with openmp.watched(f"the code of model {model.name!r}"):
            return own.recorded(manifest)
    return catalog.architecture(
        manifest.architecture,
        granularity=manifest.granularity,
        classes=manifest.classes,
        image_size=manifest.image_size,
        fused=None if manifest.optimization is None else manifest.optimization.memory_format,
        dtype=_DTYPES[manifest.dtype],
        options=manifest.options,
        cuts=[Cut(layer.name, layer.parts, layer.until) for layer in manifest.layers],
    )


def _order(place: TensorPlace | TensorEntry) -> str:
    return "channels last" if place.channels_last else "contiguous"


def _planned(model: PreparedModel, layer: Layer, entry: LayerEntry) -> PlannedLayer:
    found = [
        (tensor.name, tensor.shape, _DTYPES[tensor.dtype], _order(tensor))
        for tensor in entry.parameters
    ]
    expected = [(place.key, place.shape, place.dtype, _order(place)) for place in layer.tensors]
    if found != expected:
        wrong = next(pair for pair in zip_longest(found, expected) if pair[0] != pair[1])
        raise ModelFault(
            f"model {model.name!r}: layer {layer.name} has the tensor {wrong[0]}, expected {wrong[1]}"
        )
    if model.manifest.weight_format == "pth" or entry.file is None:
        return PlannedLayer(layer, entry, None)
    views = [
        TensorView(
            tensor.name,
            _DTYPES[tensor.dtype],
            tensor.shape,
            tensor.offset // _DTYPES[tensor.dtype].itemsize,
            tensor.channels_last,
            tensor.blocked,
        )
        for tensor in entry.parameters
    ]
    try:
        return PlannedLayer(layer, entry, FileLayout(views, entry.bytes))
    except ValueError as error:
        raise ModelFault(f"model {model.name!r}: {error}") from error
