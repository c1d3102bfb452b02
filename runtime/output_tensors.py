"""An inference request's outputs: which were asked for and how, and a handler's answer in that form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from runtime import binary_tensors
from runtime.errors import BadInput, Fault, brief
from runtime.frames import Label, Tensor
from runtime.pool import Answer
from runtime.protocol import LABELS, OUTPUTS, InferenceRequest, RequestOutput

DEFAULT_TOP: Final = 5
_SHARED_MEMORY: Final = "shared_memory_region"

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One output as it was asked for; `classification` says how many classes instead of all numbers."""

    name: str
    binary: bool
    top: int
    classification: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a response: its JSON object, and its binary data if it was asked for as such."""

    described: dict[str, Any]
    binary: bytes | memoryview | None = None


def wanted(asked: InferenceRequest, classes: int) -> list[Wanted]:
    """The outputs in the order asked for; all of them where none is named. Raises BadInput."""
    outputs = asked.outputs or [RequestOutput(name=name) for name in OUTPUTS]
    names = [output.name for output in outputs]
    for name in names:
        if name not in OUTPUTS:
            raise BadInput(f"output {brief(name)} is unknown, expected one of {', '.join(OUTPUTS)}")
        if names.count(name) > 1:
            raise BadInput(f"output {name!r} is asked for {names.count(name)} times, expected once")
    binary = switch(asked.parameters, "binary_data_output", default=False)
    top = _count(asked.parameters, "top") or DEFAULT_TOP
    return [_wanted(output, binary, top, classes) for output in outputs]


def _wanted(output: RequestOutput, binary: bool, top: int, classes: int) -> Wanted:
    parameters = output.parameters
    if _SHARED_MEMORY in parameters:
        raise BadInput(f"output {output.name!r} asks for shared memory, which is not served")
    classification = _count(parameters, "classification")
    if classification is not None and output.name == LABELS:
        raise BadInput(f"output {LABELS!r} has no classification, expected 'top'")
    return Wanted(
        output.name,
        switch(parameters, "binary_data", default=binary),
        min(_count(parameters, "top") or top, classes),
        None if classification is None else min(classification, classes),
    )


def switch(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadInput(f"parameter {name!r} is {brief(value)}, expected true or false")
    return value


def _count(parameters: dict[str, Any], name: str) -> int | None:
    if name not in parameters:
        return None
    value = parameters[name]
    if type(value) is not int or value < 1:
        raise BadInput(f"parameter {name!r} is {brief(value)}, expected a number from 1")
    return value


def encode(outputs: Sequence[Wanted], answer: Answer, labels: Sequence[str] | None) -> list[Output]:
    """The answer's tensors as they were asked for; raises Fault if the handler left one out.

    labels: the names of all classes, for outputs asked for as a classification.
    """
    tensors = _tensors(answer)
    encoded = []
    for output in outputs:
        if output.name == LABELS:
            encoded.append(_labels(output, answer.result.labels))
        elif output.name not in tensors:
            raise Fault(f"the handler's answer lacks the output {output.name!r}")
        elif output.classification is not None:
            encoded.append(_classification(output, *tensors[output.name], labels))
        else:
            encoded.append(_numbers(output, *tensors[output.name]))
    return encoded


def _tensors(answer: Answer) -> dict[str, tuple[Tensor, memoryview]]:
    tensors = {}
    rest = memoryview(answer.body)
    for tensor in answer.result.outputs:
        if tensor.bytes != 4 * math.prod(tensor.shape):
            raise Fault(f"the handler's output {tensor.name!r} has a wrong size")
        tensors[tensor.name] = (tensor, rest[: tensor.bytes])
        rest = rest[tensor.bytes :]
    return tensors


def _numbers(output: Wanted, tensor: Tensor, content: memoryview) -> Output:
    described = tensor.model_dump(include={"name", "datatype", "shape"})
    if output.binary:
        return _binary(described, content)
    values: Floats = np.frombuffer(content, "<f4")
    if not np.isfinite(values).all():
        described["parameters"] = {"finite": False}
    return Output({**described, "data": values.tolist()})


def _labels(output: Wanted, rows: Sequence[Sequence[Label]] | None) -> Output:
    if rows is None:
        raise Fault("the handler's answer lacks the labels")
    names = [[label.label for label in row[: output.top]] for row in rows]
    return _strings(output, names)


def _classification(
    output: Wanted, tensor: Tensor, content: memoryview, labels: Sequence[str] | None
) -> Output:
    """Strings "value:index:label", the highest value first; Triton's classification extension.

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
    """
    values: Floats = np.frombuffer(content, "<f4").reshape(tensor.shape)
    highest = np.argsort(-values, axis=1, kind="stable")[:, : output.classification]
    rows = [
        [
            ":".join([str(row[index]), str(index), *([labels[index]] if labels else [])])
            for index in indices
        ]
        for row, indices in zip(values, highest.tolist(), strict=True)
    ]
    return _strings(output, rows)


def _strings(output: Wanted, rows: list[list[str]]) -> Output:
    shape = [len(rows), len(rows[0]) if rows else 0]
    described = {"name": output.name, "datatype": "BYTES", "shape": shape}
    flat = [text for row in rows for text in row]
    if output.binary:
        return _binary(described, binary_tensors.pack(text.encode() for text in flat))
    return Output({**described, "data": flat})


def _binary(described: dict[str, Any], content: bytes | memoryview) -> Output:
    parameters = {binary_tensors.SIZE: len(content)}
    return Output({**described, "parameters": parameters}, content)
