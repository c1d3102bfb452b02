"""Weights from a checkpoint, a seed or torchvision -> a version of a model in the store."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from pydantic import JsonValue
from torch import Tensor

from models import (
    activations,
    catalog,
    checkpoint,
    examples,
    factories,
    labels,
    mapped_memory,
    optimization,
    preprocessing,
    pretrained,
    recognition,
    weight_files,
)
from models import own as own_models
from models.checkpoint import CheckpointError, Findings, Fitted
from models.download import OnProgress
from models.key_names import Named
from models.layers import Architecture, Cut, TensorPlace
from models.manifest import (
    BlockedLayout,
    Granularity,
    LayerEntry,
    Manifest,
    Optimization,
    Precision,
    UserCode,
    WeightFormat,
    layer_file_name,
)
from models.own import Own
from models.preprocessing import Changes, PreprocessingError
from models.pretrained import Preset
from models.random_weights import RandomWeights
from models.store import PreparedModel, Store, StoreError

DTYPES: Final[dict[Precision, torch.dtype]] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_RELEASED_AFTER_BYTES: Final = 64 << 20
"""As often are a mapped checkpoint's pages let go: more often costs time, more seldom memory."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user wants of a model otherwise than it comes.

    preset: the torchvision weights whose preprocessing it has; labels: a file of them.
    """

    dtype: Precision = "F32"
    labels: Path | None = None
    preset: str | None = None
    preprocessing: Changes = field(default_factory=Changes)


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that fit an architecture, where they come from, and how images are prepared for them."""

    name: str
    architecture: Architecture
    weights: Mapping[str, Tensor]
    preset: Preset | None
    """None for a model that takes no images."""
    optimization: Optimization | None = None
    layouts: Mapping[str, BlockedLayout] = field(default_factory=dict)
    """Of the weights that are blocked, by key."""
    labels: tuple[str, ...] | None = None
    """The user's; without them, torchvision's categories where there are 1000 classes."""
    findings: Findings = field(default_factory=Findings)
    """What of the file was taken otherwise than it stands there; complete when the weights are written."""
    found_dtypes: tuple[str, ...] = ()
    file: Path | None = None
    """From which the weights may be mapped."""
    own: Own | None = None
    """Of a model of the user's."""
    processing: UserCode | None = None
    """The user's own processing of what goes in and comes out."""

    @property
    def dtype(self) -> Precision:
        """That of most weights' values: a model of the user's may have several."""
        places = _places(self.architecture).values()

        def values(name: Precision) -> int:
            return sum(math.prod(place.shape) for place in places if place.dtype == DTYPES[name])

        return max(DTYPES, key=values)

    @property
    def bytes(self) -> int:
        """Of all tensors; the weight files are larger by their headers."""
        return sum(_bytes(place) for layer in self.architecture.layers for place in layer.tensors)


def from_checkpoint(
    path: Path,
    architecture: str | None,
    granularity: Granularity,
    key: str | None = None,
    options: Options = Options(),
) -> Source:
    """A user's file; without an architecture, it is recognized.

    Raises CheckpointError, LabelsError, PreprocessingError, PretrainedError, UnknownArchitecture, OSError.
    """
    return _from_file(path, f"checkpoint:{path.name}", architecture, granularity, key, options)


def from_seed(
    seed: int,
    architecture: str,
    granularity: Granularity,
    options: Options = Options(),
) -> Source:
    """Random weights. Raises UnknownArchitecture, and what options that do not suit raise."""
    usual = catalog.architecture(architecture)
    size = options.preprocessing.crop or usual.image_size
    preset = preprocessing.chosen(
        architecture, size, options.preset, options.preprocessing, fixed=False
    )
    chain = _chain(architecture, granularity, usual.classes, preset.input.crop, options)
    weights: Mapping[str, Tensor] = RandomWeights(chain, seed)
    if options.dtype != "F32":  # the same numbers as in float32, rounded
        exact = _chain(architecture, granularity, usual.classes, preset.input.crop, Options())
        weights = Fitted(f"random:{seed}", _places(chain), RandomWeights(exact, seed))
    return Source(f"random:{seed}", chain, weights, preset, labels=_labels(options, chain))


def from_torchvision(
    weights_name: str,
    architecture: str,
    granularity: Granularity,
    options: Options = Options(),
    on_download: OnProgress = lambda _done, _total: None,
) -> Source:
    """Trained weights, downloaded if need be. Raises PretrainedError, UnknownArchitecture, OSError."""
    member = pretrained.weights(architecture, weights_name)
    path = pretrained.download(member, on_download)
    wished = options if options.preset else _with_preset(options, member.name)
    return _from_file(
        path,
        f"pretrained:{member.name}",
        architecture,
        granularity,
        None,
        wished,
        catalog.options_of(architecture, pretrained=True),
    )


def from_factory(
    factory: str,
    options: Mapping[str, JsonValue],
    example: str,
    granularity: Granularity,
    *,
    checkpoint_file: Path | None = None,
    key: str | None = None,
    seed: int | None = None,
    labels_file: Path | None = None,
) -> Source:
    """A model that a function of the user's makes, with a checkpoint's weights or random ones.

    It is run on the example, plainly and layer by layer, before anything is written. Raises UserCodeError,
    Unsuitable, ExampleError, CheckpointError, OSError.
    """
    code = factories.with_distribution(factories.function_code(factory, own_models.FACTORY))
    inputs = examples.parse(example)
    module = own_models.module(code, options)
    chain = own_models.architecture(module, code, options, inputs, granularity)
    findings = Findings()
    found_dtypes: tuple[str, ...] = ()
    weights: Mapping[str, Tensor]
    if checkpoint_file is not None:
        read = checkpoint.read(checkpoint_file, key, findings)
        weights = own_models.fitted(checkpoint_file, module, chain, read, findings)
        found_dtypes = _other_dtypes(read, chain)
        name = f"checkpoint:{checkpoint_file.name}"
    else:
        weights = RandomWeights(chain, seed or 0)
        name = f"random:{seed or 0}"
    outputs = own_models.prove(chain, code, inputs, weights)
    spec, classes = own_models.image_input(inputs, outputs)
    sized = replace(chain, classes=classes, image_size=spec.crop if spec else 0)
    preset = None if spec is None else Preset("of the example's size", spec)
    return Source(
        name,
        sized,
        weights,
        preset,
        labels=tuple(labels.read(labels_file, classes)) if labels_file else None,
        findings=findings,
        found_dtypes=found_dtypes,
        file=checkpoint_file,
        own=Own(code, inputs, own_models.specs(outputs)),
    )


def with_processing(source: Source, module: str) -> Source:
    """The same, whose requests a module of the user's takes. Raises UserCodeError."""
    code = factories.with_distribution(factories.module_code(module, own_models.PROCESSING))
    own_models.processing_functions(code)
    return replace(source, processing=code)


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

    `on_written` is told the bytes of each piece written. Raises StoreError, CheckpointError and OSError,
    and then leaves the store as it was.
    """
    chain = source.architecture
    own = source.own
    activation_bytes = (
        activations.peak_bytes(chain, examples.tensors(own.inputs))
        if own
        else _activation_bytes(chain)
    )
    _check_room(store, source)
    with store.writer(name) as writer:
        released, written = _releasing(source, on_written)
        layers = tuple(_layer_entries(writer.path, released, weight_format, written))
        names: Sequence[str] | None = source.labels
        if names is None and own is None:
            names = pretrained.categories(chain.name, chain.classes)
        return writer.publish(
            Manifest(
                format_version=1,
                architecture=chain.name,
                image_size=chain.image_size,
                granularity=chain.granularity,
                weight_format=weight_format,
                classes=chain.classes,
                input=source.preset.input if source.preset else None,
                preset=source.preset.name if source.preset else "",
                labels="labels.json" if names else None,
                labels_sha256=writer.write_labels(names) if names else None,
                dtype=source.dtype,
                found_dtypes=source.found_dtypes,
                activation_bytes=activation_bytes,
                optimization=source.optimization,
                source=source.name,
                options=dict(chain.options),
                factory=own.factory if own else None,
                inputs=own.inputs if own else (),
                outputs=own.outputs if own else (),
                processing=source.processing,
                layers=layers,
            )
        )


def _from_file(
    path: Path,
    source: str,
    architecture: str | None,
    granularity: Granularity,
    key: str | None,
    options: Options,
    builder: Mapping[str, JsonValue] | None = None,
) -> Source:
    """builder: what torchvision's builder is given besides classes and image size."""
    findings = Findings()
    read = checkpoint.read(path, key, findings)
    name = architecture or recognition.recognize(path, read)
    read = catalog.without_training_heads(name, read)
    findings.recognized = "" if architecture else name
    named = checkpoint.named(path, name, read)
    findings.prefix, findings.head = named.prefix, named.head
    found = checkpoint.dimensions(name, named.tensors)
    preset = preprocessing.chosen(
        name,
        found.image_size,
        options.preset,
        options.preprocessing,
        fixed=checkpoint.has_fixed_image_size(name),
    )
    chain = _chain(name, granularity, found.classes, preset.input.crop, options, builder)
    try:
        weights = checkpoint.fit(path, chain, named.tensors, findings)
    except CheckpointError as error:
        advice = (
            named.head_trouble
            or recognition.suggestion(path, read, instead_of=name)
            or _advice_on_prefix(named, chain)
        )
        raise CheckpointError(f"{error}; {advice}" if advice else str(error)) from error
    return Source(
        source,
        chain,
        weights,
        preset,
        labels=_labels(options, chain),
        findings=findings,
        found_dtypes=_other_dtypes(named.tensors, chain),
        file=path,
    )


def _advice_on_prefix(named: Named, chain: Architecture) -> str | None:
    """Where all is there and what is too much lies beside the model: a loss with weights, a second model."""
    kinds = [kind for kind, _ in checkpoint.misfits(_places(chain), named.tensors)]
    if not named.prefix or kinds != ["unexpected"]:
        return None
    return f"a --key that ends in {named.prefix.removesuffix('.')} takes what is under it alone"


def _with_preset(options: Options, preset: str) -> Options:
    return Options(options.dtype, options.labels, preset, options.preprocessing)


def _chain(
    name: str,
    granularity: Granularity,
    classes: int,
    image_size: int,
    options: Options,
    builder: Mapping[str, JsonValue] | None = None,
) -> Architecture:
    try:
        chain = catalog.architecture(
            name,
            granularity=granularity,
            classes=classes,
            image_size=image_size,
            dtype=DTYPES[options.dtype],
            options=builder,
        )
    except AssertionError as error:  # torchvision's: a ViT's images are whole patches
        raise PreprocessingError(
            f"{name} takes no images of {image_size} x {image_size} pixels: {error}"
        ) from error
    if options.preprocessing.crop is not None:
        _activation_bytes(chain)
    return chain


def _activation_bytes(chain: Architecture) -> int:
    """Raises PreprocessingError for images too small for what halves them again and again."""
    try:
        return activations.peak_bytes(chain)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PreprocessingError(
            f"{chain.name} takes no images of {chain.image_size} x {chain.image_size} pixels: {reason}"
        ) from error


def _labels(options: Options, chain: Architecture) -> tuple[str, ...] | None:
    return None if options.labels is None else tuple(labels.read(options.labels, chain.classes))


def _places(chain: Architecture) -> dict[str, TensorPlace]:
    return {place.key: place for layer in chain.layers for place in layer.tensors}


def _other_dtypes(tensors: Mapping[str, Tensor], chain: Architecture) -> tuple[str, ...]:
    """The floating-point types of those tensors in the file that are not kept in their own."""
    found = {key: tensor.dtype for key, tensor in tensors.items() if tensor.is_floating_point()}
    kept = {
        key: place.dtype for key, place in _places(chain).items() if place.dtype.is_floating_point
    }
    converted = {
        dtype
        for key, dtype in found.items()
        if kept.get(chain.aliases.get(key, key), dtype) != dtype
    }
    names: dict[torch.dtype, str] = dict(weight_files.DATA_TYPES)
    return tuple(sorted(names.get(dtype, str(dtype).removeprefix("torch.")) for dtype in converted))


def _check_room(store: Store, source: Source) -> None:
    """A disk that is too small is known before anything is written; one that fills up meanwhile, then."""
    folder = next(path for path in (store.root, *store.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < source.bytes:
        raise StoreError(
            f"{store.root}: no space left for the model's {source.bytes} bytes, {free} are free"
        )


class _Released(Mapping[str, Tensor]):
    """Weights mapped from a checkpoint, whose pages are let go of from time to time."""

    def __init__(self, weights: Mapping[str, Tensor], file: Path) -> None:
        self._weights = weights
        self._file = file
        self._pending = 0

    def __getitem__(self, key: str) -> Tensor:
        tensor = self._weights[key]
        self.looked_at(tensor.nbytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def looked_at(self, size: int) -> None:
        self._pending += size
        if self._pending >= _RELEASED_AFTER_BYTES:
            mapped_memory.release(self._file)
            self._pending = 0


def _releasing(
    source: Source, on_written: Callable[[int], None]
) -> tuple[Source, Callable[[int], None]]:
    """Both as they are, but that a mapped checkpoint's pages go as its tensors are copied and written."""
    if source.file is None:
        return source, on_written
    weights = _Released(source.weights, source.file)

    def written(size: int) -> None:
        weights.looked_at(size)
        on_written(size)

    return replace(source, weights=weights), written


def _layer_entries(
    folder: Path, source: Source, weight_format: WeightFormat, on_written: Callable[[int], None]
) -> Iterator[LayerEntry]:
    cuts = dict(enumerate(source.architecture.cuts))
    for index, layer in enumerate(source.architecture.layers):
        cut = cuts.get(index, Cut(layer.name, (), 0))
        if not layer.tensors:
            yield LayerEntry(
                index=index,
                name=layer.name,
                file=None,
                bytes=0,
                sha256=None,
                parameters=(),
                parts=cut.parts,
                until=cut.until,
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
            parts=cut.parts,
            until=cut.until,
        )


def _bytes(place: TensorPlace) -> int:
    return math.prod(place.shape) * place.dtype.itemsize
