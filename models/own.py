"""A model of the user's own: made by a factory, fitted with a checkpoint, proven on an example."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from models import checkpoint, examples, factories, general
from models.alignment import aligned
from models.checkpoint import CheckpointError, Findings
from models.errors import ModelError, is_of_memory
from models.gates import call_with
from models.general import Unsuitable
from models.layers import Architecture, Cut, Layer
from models.manifest import Granularity, InputSpec, Manifest, TensorSpec, UserCode
from models.weight_files import DATA_TYPES

FACTORY: Final = "the factory"
PROCESSING: Final = "the processing"
OUTPUT: Final = "output"
_MEAN: Final = (0.485, 0.456, 0.406)
_STD: Final = (0.229, 0.224, 0.225)
"""ImageNet's, per RGB channel."""
_RESIZED: Final = 256 / 224


class OptionsError(ModelError):
    """Keyword arguments for a factory that cannot be read."""


@dataclass(frozen=True, slots=True)
class Own:
    """Where a model of the user's comes from: its factory, and the example that it is prepared with."""

    factory: UserCode
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def specs(tensors: Sequence[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Raises Unsuitable for a type that no protocol has."""
    for name, tensor in tensors:
        if tensor.dtype not in DATA_TYPES:
            raise Unsuitable(
                f"the forward's output {name} is {tensor.dtype}, which cannot be answered"
            )
    return tuple(
        TensorSpec(name=name, dtype=DATA_TYPES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors
    )


def processing_functions(code: UserCode) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`decode` and `encode` of a user's module. Raises UserCodeError."""
    module = factories.load_module(code, PROCESSING)
    what = f"{PROCESSING} {code.target}"
    return factories.function_of(module, "decode", what), factories.function_of(
        module, "encode", what
    )


def keywords(text: str | None) -> dict[str, JsonValue]:
    """The JSON object of `--kwargs`. Raises OptionsError."""
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise OptionsError(f"--kwargs is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise OptionsError(f'--kwargs is {text}, expected a JSON object such as {{"depth": 12}}')
    return given


def module(factory: UserCode, options: Mapping[str, JsonValue]) -> nn.Module:
    """What the factory makes, without memory for weights if that can be. Raises UserCodeError, Unsuitable."""
    function = factories.load_function(factory, FACTORY)
    try:
        return general.structure(functools.partial(function, **options), _name(factory))
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise Unsuitable(
            f"{FACTORY} {factory.target} fails: {factories.reason_of(error)}"
        ) from error


def architecture(
    made: nn.Module,
    factory: UserCode,
    options: Mapping[str, JsonValue],
    inputs: Sequence[TensorSpec],
    granularity: Granularity,
) -> Architecture:
    """The factory's module as layers. Raises Unsuitable."""
    try:
        cuts = general.cuts(made, granularity, examples.tensors(inputs))
    except Unsuitable:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(factory, inputs, error) from error
    return general.architecture(
        _name(factory), made, cuts, granularity=granularity, options=options
    )


def recorded(manifest: Manifest) -> Architecture:
    """The layers of a prepared model. Raises UserCodeError, Unsuitable."""
    factory = manifest.factory
    if factory is None:
        raise ValueError("the model is torchvision's")
    made = module(factory, manifest.options)
    layers = general.architecture(
        _name(factory),
        made,
        [Cut(layer.name, layer.parts, layer.until) for layer in manifest.layers],
        granularity=manifest.granularity,
        options=manifest.options,
    )
    general.let_go(made)
    return layers


def findings(manifest: Manifest) -> Iterator[str]:
    """What is wrong here with the user's code for a prepared model, a sentence each. The code is run."""
    try:
        if manifest.processing is not None:
            yield from factories.findings(manifest.processing, PROCESSING)
            processing_functions(manifest.processing)
    except ModelError as error:
        yield str(error)
    try:
        if manifest.factory is not None:
            yield from factories.findings(manifest.factory, FACTORY)
            recorded(manifest)
    except ModelError as error:
        yield str(error)


def _name(factory: UserCode) -> str:
    """Short: a file without its folders."""
    return factory.target.rpartition("/")[2]


def _failed(factory: UserCode, inputs: Sequence[TensorSpec], error: BaseException) -> Unsuitable:
    given = ", ".join(f"{spec.name} {list(spec.shape)} {spec.dtype}" for spec in inputs)
    return Unsuitable(
        f"{_name(factory)}: its forward fails on the example ({given}): "
        f"{type(error).__name__}: {error}"
    )


def fitted(
    path: Path,
    made: nn.Module,
    chain: Architecture,
    tensors: Mapping[str, Tensor],
    findings: Findings,
) -> Mapping[str, Tensor]:
    """A checkpoint's tensors as the layers want them. Raises CheckpointError.

    Tied weights may stand there under any of their names, and so may buffers that a state dict no longer
    has, if they have the values that the constructor gives them.
    """
    kept = dict(tensors)
    for alias, key in chain.aliases.items():
        tensor = kept.pop(alias, None)
        if tensor is None:
            continue
        if key in kept and not torch.equal(aligned(kept[key]), aligned(tensor)):
            raise CheckpointError(
                f"{path} has different values under {key} and {alias}, which {chain.name} ties together"
            )
        kept.setdefault(key, tensor)
    for name, buffer in made.named_buffers():
        if name in kept and name not in chain.keys and _alike(kept[name], buffer):
            del kept[name]
    return checkpoint.fit(path, chain, kept, findings)


def _alike(found: Tensor, constant: Tensor) -> bool:
    if found.shape != constant.shape:
        return False
    return torch.equal(aligned(found).to(constant.dtype), constant)


def prove(
    chain: Architecture,
    factory: UserCode,
    inputs: Sequence[TensorSpec],
    weights: Mapping[str, Tensor],
) -> list[tuple[str, Tensor]]:
    """Runs the plain module and the layers on the example; returns the outputs by name.

    Each run has an example of its own, as a forward may change its inputs. Raises Unsuitable where the
    outputs are not equal, bit for bit, or a layer cannot be initialized.
    """
    plain = _loaded_plainly(chain, factory, weights)
    with torch.inference_mode():
        try:
            expected = _outputs(call_with(plain, examples.tensors(inputs)))
            again = _outputs(call_with(plain, examples.tensors(inputs)))
        except (Exception, SystemExit) as error:
            raise _failed(factory, inputs, error) from error
        layers = [layer.build() for layer in chain.layers]
        for built in layers:
            built.bind(weights)
        try:
            found = _outputs(chain.forward(layers, examples.tensors(inputs)))
        except (Exception, SystemExit) as error:
            raise Unsuitable(
                f"{chain.name}: its forward runs on the whole module, not on one that is built layer by "
                f"layer: {type(error).__name__}: {error}"
            ) from error
    if not expected:
        raise Unsuitable(f"{chain.name}: its forward gives no tensor")
    if not _same(expected, again):
        raise Unsuitable(f"{chain.name}: its forward gives other outputs each time for one input")
    if not _same(expected, found):
        raise Unsuitable(
            f"{chain.name}: built layer by layer it gives other outputs than the plain module; it may keep "
            "values that its state dict does not have, or that its constructor draws at random"
        )
    for layer in chain.layers:
        _check_initialization(chain.name, layer)
    return expected


def _check_initialization(name: str, layer: Layer) -> None:
    """Some strategies initialize a layer before its weights come. Raises Unsuitable."""
    built = layer.build()
    with torch.inference_mode():
        built.allocate()
        try:
            built.initialize()
        except (Exception, SystemExit) as error:
            if is_of_memory(error):
                raise
            raise Unsuitable(
                f"{name}: in the layer {layer.name} its reset_parameters fails: "
                f"{type(error).__name__}: {error}"
            ) from error


def _loaded_plainly(
    chain: Architecture, factory: UserCode, weights: Mapping[str, Tensor]
) -> nn.Module:
    """The factory's module as anyone would load it, but for copies."""
    plain = module(factory, chain.options)
    state = {key: weights[chain.aliases.get(key, key)] for key in plain.state_dict()}
    plain.load_state_dict(state, assign=True)
    return plain.eval()


def _outputs(value: Any) -> list[tuple[str, Tensor]]:
    return list(named(value))


def named(outputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of what a model returned, by their keys and places: `output`, `logits`, `output.1`."""
    if isinstance(outputs, Tensor):
        yield name or OUTPUT, outputs
    elif isinstance(outputs, Mapping):
        for key, value in outputs.items():
            yield from named(value, f"{name}.{key}" if name else str(key))
    elif isinstance(outputs, list | tuple):
        fields = getattr(outputs, "_fields", None) or range(len(outputs))
        for key, value in zip(fields, outputs, strict=True):
            yield from named(value, f"{name or OUTPUT}.{key}")


def _same(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> bool:
    return [name for name, _ in one] == [name for name, _ in other] and all(
        _equal(mine, its) for (_, mine), (_, its) in zip(one, other, strict=True)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; not a number equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return (
        one.dtype.is_floating_point
        and torch.equal(one.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0))
        and torch.equal(one.isnan(), other.isnan())
    )


def image_input(
    inputs: Sequence[TensorSpec], outputs: Sequence[tuple[str, Tensor]]
) -> tuple[InputSpec | None, int]:
    """How images become the input, and the number of classes, where a model is an image classifier by its form.

    That is: one input of n x 3 x side x side floating-point numbers, one output of n x classes.
    Otherwise None and 0.
    """
    if len(inputs) != 1 or len(outputs) != 1 or inputs[0].dtype != "F32":
        return None, 0
    shape, (_, scores) = inputs[0].shape, outputs[0]
    if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3] or shape[2] == 0:
        return None, 0
    if scores.dim() != 2 or scores.shape[0] != shape[0] or scores.dtype != torch.float32:
        return None, 0
    side = shape[2]
    spec = InputSpec(
        resize=round(side * _RESIZED),
        crop=side,
        mean=_MEAN,
        std=_STD,
        interpolation="bilinear",
    )
    return spec, scores.shape[1]
