"""What a model takes, in the words of the command line: `1x3x224x224`, `ids=1x16:int64,mask=1x16:int64`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from models.errors import ModelError
from models.manifest import DataType, TensorSpec
from models.weight_files import DATA_TYPES

DTYPES: Final[dict[DataType, torch.dtype]] = {name: dtype for dtype, name in DATA_TYPES.items()}
_NAMES: Final[dict[str, DataType]] = {
    str(dtype).removeprefix("torch."): name for dtype, name in DATA_TYPES.items()
}
_FORM: Final = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)?(?::(?P<dtype>\w+))?"
)


class ExampleError(ModelError):
    """An example that cannot be read."""


def parse(text: str) -> tuple[TensorSpec, ...]:
    """The inputs that the text names, in order. Raises ExampleError."""
    specs = [_parse_one(part.strip(), text) for part in text.split(",")]
    named = {spec.named for spec in specs}
    if len(named) > 1:
        raise ExampleError(f"--example {text!r} names some of its inputs, expected all or none")
    if len(specs) > 1 and named == {False}:
        return tuple(
            spec.model_copy(update={"name": f"input{number}"}) for number, spec in enumerate(specs)
        )
    if len({spec.name for spec in specs}) < len(specs):
        raise ExampleError(f"--example {text!r} names an input twice")
    return tuple(specs)


def _parse_one(part: str, text: str) -> TensorSpec:
    match = _FORM.fullmatch(part)
    if match is None or not part:
        raise ExampleError(
            f"--example {text!r}: {part!r} is no input, expected such as 1x3x224x224, 1x16:int64 or "
            "ids=1x16:int64, between commas"
        )
    dtype = match["dtype"] or "float32"
    if dtype not in _NAMES:
        raise ExampleError(
            f"--example {text!r}: {dtype!r} is no type, expected one of {', '.join(_NAMES)}"
        )
    shape = tuple(int(size) for size in match["shape"].split("x")) if match["shape"] else ()
    name = match["name"]
    return TensorSpec(
        name=name or "input", dtype=_NAMES[dtype], shape=shape, named=name is not None
    )


def tensors(specs: Sequence[TensorSpec], seed: int = 0) -> Any:
    """An example of the inputs, as a model is called with them: one, several in order, or by name.

    Numbers are normal, whole ones 0 or 1, which are the indices that every table has.
    """
    generator = torch.Generator().manual_seed(seed)
    made = {spec.name: _tensor(spec, generator) for spec in specs}
    return arranged(specs, made)


def _tensor(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    return torch.randint(0, 2, spec.shape, generator=generator).to(dtype)


def arranged(specs: Sequence[TensorSpec], given: Mapping[str, Tensor]) -> Any:
    """Tensors by name, as the model is called with them."""
    if specs and specs[0].named:
        return dict(given)
    in_order = tuple(given[spec.name] for spec in specs)
    return in_order[0] if len(in_order) == 1 else in_order
