"""Weights from a checkpoint, a seed or torchvision -> a version of a model in the store."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from models import activations, catalog, checkpoint, optimization, pretrained, weight_files
from models.layers import Architecture, TensorPlace
from models.manifest import (
    BlockedLayout,
    Granularity,
    LayerEntry,
    Manifest,
    Optimization,
    WeightFormat,
    layer_file_name,
)
from models.pretrained import Preset
from models.random_weights import RandomWeights
from models.store import PreparedModel, Store


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that fit an architecture, where they come from, and how images are prepared for them."""

    name: str
    architecture: Architecture
    weights: Mapping[str, Tensor]
    preset: Preset
    optimization: Optimization | None = None
    layouts: Mapping[str, BlockedLayout] = field(default_factory=dict)
    """Of the weights that are blocked, by key."""

    @property
    def bytes(self) -> int:
        """Of all tensors; the weight files are larger by their headers."""
        return sum(_bytes(place) for layer in self.architecture.layers for place in layer.tensors)


def from_checkpoint(
    path: Path, architecture: str, granularity: Granularity, key: str | None = None
) -> Source:
    """A user's file. Raises CheckpointError, UnknownArchitecture, OSError."""
    chain, weights = _fitted(path, architecture, granularity, key)
    preset = pretrained.preset(architecture, chain.image_size)
    return Source(f"checkpoint:{path.name}", chain, weights, preset)


def from_seed(seed: int, architecture: str, granularity: Granularity) -> Source:
    """Random weights. Raises UnknownArchitecture."""
    chain = catalog.architecture(architecture, granularity=granularity)
    preset = pretrained.preset(architecture, chain.image_size)
    return Source(f"random:{seed}", chain, RandomWeights(chain, seed), preset)


def from_torchvision(weights_name: str, architecture: str, granularity: Granularity) -> Source:
    """Trained weights, downloaded if need be. Raises PretrainedError, UnknownArchitecture, OSError."""
    member = pretrained.weights(architecture, weights_name)
    chain, weights = _fitted(pretrained.download(member), architecture, granularity)
    return Source(f"pretrained:{member.name}", chain, weights, pretrained.preset_of(member))


def optimized(source: Source, weight_format: WeightFormat, threads: int) -> Source:
    """The same with fused convolutions where they are faster here; else the source as it is."""
    chosen = optimization.choose(source.architecture, source.weights, weight_format, threads)
    if chosen is None:
        return source
    return replace(
        source,
        architecture=chosen.candidate.architecture,
        weights=chosen.candidate.weights,
        layouts=chosen.candidate.layouts,
        optimization=chosen.optimization,
    )


def prepare(
    store: Store,
    name: str,
    source: Source,
    weight_format: WeightFormat,
    on_written: Callable[[int], None] = lambda _: None,
) -> PreparedModel:
    """Writes the weights layer by layer and makes them the model's current version.

    `on_written` is told the bytes of each piece written. Raises StoreError and OSError, and then leaves
    the store as it was.
    """
    chain = source.architecture
    with store.writer(name) as writer:
        layers = tuple(_layer_entries(writer.path, source, weight_format, on_written))
        labels = pretrained.categories(chain.name, chain.classes)
        return writer.publish(
            Manifest(
                format_version=1,
                architecture=chain.name,
                image_size=chain.image_size,
                granularity=chain.granularity,
                weight_format=weight_format,
                classes=chain.classes,
                input=source.preset.input,
                preset=source.preset.name,
                labels="labels.json" if labels else None,
                labels_sha256=writer.write_labels(labels) if labels else None,
                activation_bytes=activations.peak_bytes(chain),
                optimization=source.optimization,
                source=source.name,
                layers=layers,
            )
        )


def _fitted(
    path: Path, architecture: str, granularity: Granularity, key: str | None = None
) -> tuple[Architecture, Mapping[str, Tensor]]:
    tensors = checkpoint.read(path, key)
    found = checkpoint.dimensions(architecture, tensors)
    chain = catalog.architecture(
        architecture, granularity=granularity, classes=found.classes, image_size=found.image_size
    )
    return chain, checkpoint.fit(path, chain, tensors)


def _layer_entries(
    folder: Path, source: Source, weight_format: WeightFormat, on_written: Callable[[int], None]
) -> Iterator[LayerEntry]:
    for index, layer in enumerate(source.architecture.layers):
        if not layer.tensors:
            yield LayerEntry(
                index=index, name=layer.name, file=None, bytes=0, sha256=None, parameters=()
            )
            continue
        file_name = layer_file_name(index, layer.name, weight_format)
        places = [replace(place, blocked=source.layouts.get(place.key)) for place in layer.tensors]
        written = weight_files.write(
            folder / file_name, weight_format, places, source.weights, on_written
        )
        yield LayerEntry(
            index=index,
            name=layer.name,
            file=file_name,
            bytes=written.bytes,
            sha256=written.sha256,
            parameters=written.tensors,
        )


def _bytes(place: TensorPlace) -> int:
    return math.prod(place.shape) * place.dtype.itemsize
