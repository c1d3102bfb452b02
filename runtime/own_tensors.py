"""Tensors of a model of the user's that classifies no images: any number of inputs and outputs, of any type."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from models.manifest import DATATYPES, ELEMENT_BYTES, TensorSpec
from runtime import binary_tensors
from runtime.errors import BadInput, Fault, brief
from runtime.frames import Tensor
from runtime.input_tensors import HandlerInput, check_sizes, check_types, flat
from runtime.output_tensors import Output, Wanted, switch
from runtime.pool import Answer
from runtime.protocol import InferenceRequest, RequestInput, RequestOutput

_NUMPY: Final = {
    "FP64": "<f8",
    "FP32": "<f4",
    "INT64": "<i8",
    "INT32": "<i4",
    "INT16": "<i2",
    "INT8": "i1",
    "UINT8": "u1",
    "BOOL": "?",
}
"""What JSON can say; FP16 and BF16 have no agreed form in it."""
_KINDS: Final[dict[str, tuple[frozenset[type], str]]] = {
    "f": (frozenset({int, float}), "numbers"),
    "i": (frozenset({int}), "whole numbers"),
    "u": (frozenset({int}), "whole numbers"),
    "b": (frozenset({bool}), "true and false"),
}


@dataclass(frozen=True, slots=True)
class _Part:
    shape: list[int]
    content: bytes | memoryview


def raw(body: bytes, specs: Sequence[TensorSpec]) -> InferenceRequest:
    """What a body without a JSON object asks for: the one input in its example's shape, outputs in binary."""
    if len(specs) != 1:
        raise BadInput(
            f"with {binary_tensors.HEADER} 0 the body is one tensor, but the model has {len(specs)} inputs"
        )
    tensor = RequestInput(
        name=specs[0].name,
        shape=list(specs[0].shape),
        datatype=DATATYPES[specs[0].dtype],
        parameters={binary_tensors.SIZE: len(body)},
    )
    return InferenceRequest(inputs=[tensor], parameters={"binary_data_output": True})


def decode(
    asked: InferenceRequest, binary: memoryview | None, specs: Sequence[TensorSpec]
) -> HandlerInput:
    """The request's inputs in the order of the model's. Raises BadInput."""
    expected = [spec.name for spec in specs]
    names = [tensor.name for tensor in asked.inputs]
    if sorted(names) != sorted(expected):
        raise BadInput(f"inputs are {brief(names)}, expected {', '.join(expected)}")
    given = dict(
        zip(
            names,
            zip(asked.inputs, binary_tensors.assign(asked.inputs, binary), strict=True),
            strict=True,
        )
    )
    parts = [_part(*given[spec.name], spec) for spec in specs]
    content = (
        parts[0].content if len(parts) == 1 else b"".join(bytes(part.content) for part in parts)
    )
    return HandlerInput({"kind": "tensors", "shapes": [part.shape for part in parts]}, content)


def _part(tensor: RequestInput, binary: memoryview | None, spec: TensorSpec) -> _Part:
    datatype = DATATYPES[spec.dtype]
    if tensor.datatype != datatype:
        raise BadInput(
            f"input {spec.name!r} has datatype {brief(tensor.datatype)}, expected {datatype}"
        )
    check_sizes(tensor)
    if len(tensor.shape) != len(spec.shape) or any(size < 0 for size in tensor.shape):
        raise BadInput(
            f"input {spec.name!r} has shape {brief(tensor.shape)}, expected {len(spec.shape)} sizes, "
            f"such as {list(spec.shape)}"
        )
    size = ELEMENT_BYTES[spec.dtype] * math.prod(tensor.shape)
    if binary is None:
        return _Part(tensor.shape, _from_json(tensor, datatype))
    if len(binary) != size:
        raise BadInput(
            f"{binary_tensors.SIZE} of input {spec.name!r} is {len(binary)}, expected {size} "
            f"for {datatype} of shape {tensor.shape}"
        )
    return _Part(tensor.shape, binary)


def _from_json(tensor: RequestInput, datatype: str) -> bytes:
    if datatype not in _NUMPY:
        raise BadInput(f"{datatype} has no form in JSON, expected it as binary data")
    if tensor.data is None:
        raise BadInput(f"input {tensor.name!r} has neither data nor {binary_tensors.SIZE}")
    values = flat(tensor)
    dtype = np.dtype(_NUMPY[datatype])
    check_types(tensor, values, *_KINDS[dtype.kind])
    try:
        with np.errstate(over="ignore"):
            made = np.array(values, dtype)
    except OverflowError:
        raise _beyond(tensor, datatype) from None
    if dtype.kind == "f" and not np.isfinite(made).all():
        raise _beyond(tensor, datatype)
    return made.tobytes()


def _beyond(tensor: RequestInput, datatype: str) -> BadInput:
    return BadInput(f"data of input {tensor.name!r} holds a number beyond the range of {datatype}")


def wanted(asked: InferenceRequest, specs: Sequence[TensorSpec]) -> list[Wanted]:
    """The outputs asked for; all where none is named. Raises BadInput.

    specs: those of the model's example, which a forward with branches may not all give.
    """
    known = [spec.name for spec in specs]
    outputs = asked.outputs or [RequestOutput(name=name) for name in known]
    binary = switch(asked.parameters, "binary_data_output", default=False)
    names = [output.name for output in outputs]
    for output in outputs:
        if output.name not in known:
            raise BadInput(
                f"output {brief(output.name)} is unknown, expected one of {', '.join(known)}"
            )
        if names.count(output.name) > 1:
            raise BadInput(f"output {output.name!r} is asked for more than once")
    return [
        Wanted(output.name, switch(output.parameters, "binary_data", default=binary), top=1)
        for output in outputs
    ]


def encode(outputs: Sequence[Wanted], answer: Answer) -> list[Output]:
    """The answer's tensors as they were asked for. Raises Fault for one that the forward did not give."""
    found: dict[str, tuple[Tensor, memoryview]] = {}
    rest = memoryview(answer.body)
    for tensor in answer.result.outputs:
        found[tensor.name] = (tensor, rest[: tensor.bytes])
        rest = rest[tensor.bytes :]
    absent = [output.name for output in outputs if output.name not in found]
    if absent:
        raise Fault(
            f"the model's forward gave no {absent[0]} for these inputs, only {', '.join(found)}"
        )
    return [_encoded(output, *found[output.name]) for output in outputs]


def _encoded(output: Wanted, tensor: Tensor, content: memoryview) -> Output:
    described: dict[str, Any] = tensor.model_dump(include={"name", "datatype", "shape"})
    if output.binary or tensor.datatype not in _NUMPY:
        described["parameters"] = {binary_tensors.SIZE: len(content)}
        return Output(described, content)
    values = np.frombuffer(content, _NUMPY[tensor.datatype])
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        described["parameters"] = {"finite": False}
    return Output({**described, "data": values.tolist()})
