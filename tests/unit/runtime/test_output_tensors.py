"""Which outputs are asked for, and a handler's answer in their form."""

import math
import re
import struct
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from runtime import output_tensors
from runtime.errors import BadInput, Fault
from runtime.frames import Label, Tensor
from runtime.output_tensors import Output, Wanted
from runtime.pool import Answer
from runtime.protocol import InferenceRequest

CLASSES = 3
NAMES = ("ant", "bee", "cat: tabby")


def wanted(*outputs: dict[str, Any], **parameters: Any) -> list[Wanted]:
    asked = {"inputs": [], "outputs": list(outputs) or None, "parameters": parameters}
    return output_tensors.wanted(InferenceRequest.model_validate(asked), CLASSES)


def named(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def answer(*names: str, values: list[list[float]], labels: Any = None, size: int = 0) -> Answer:
    array = np.array(values, "<f4")
    outputs = [
        Tensor(name=name, datatype="FP32", shape=array.shape, bytes=array.nbytes + size)
        for name in names
    ]
    result = SimpleNamespace(outputs=outputs, labels=labels)
    return Answer(cast("Any", result), array.tobytes() * len(names))


def encode(
    output: dict[str, Any], values: list[list[float]], labels: Any = None, names: Any = NAMES
) -> Output:
    tensors = [] if output["name"] == "labels" else [output["name"]]
    (encoded,) = output_tensors.encode(
        wanted(output), answer(*tensors, values=values, labels=labels), names
    )
    return encoded


def test_all_outputs_are_wanted_where_none_is_named() -> None:
    assert wanted() == [
        Wanted("logits", binary=False, top=3),
        Wanted("probabilities", binary=False, top=3),
        Wanted("labels", binary=False, top=3),
    ]


def test_an_outputs_own_parameters_go_before_the_requests() -> None:
    outputs = (named("labels", top=1), named("logits", binary_data=False), named("probabilities"))
    assert wanted(*outputs, binary_data_output=True, top=2) == [
        Wanted("labels", binary=True, top=1),
        Wanted("logits", binary=False, top=2),
        Wanted("probabilities", binary=True, top=2),
    ]


@pytest.mark.parametrize("count", [3, 4, 2**63])
def test_counts_are_clamped_to_the_classes_there_are(count: int) -> None:
    assert wanted(named("labels", top=count))[0].top == CLASSES
    assert wanted(named("logits", classification=count))[0].classification == CLASSES


@pytest.mark.parametrize(
    ("outputs", "parameters", "sentence"),
    [
        ([named("x")], {}, "output 'x' is unknown, expected one of logits, probabilities, labels"),
        ([named("labels"), named("labels")], {}, "'labels' is asked for 2 times, expected once"),
        ([named("logits", binary_data="true")], {}, "'binary_data' is 'true', expected true or"),
        ([named("logits", binary_data=None)], {}, "'binary_data' is None, expected true or false"),
        ([], {"binary_data_output": 1}, "'binary_data_output' is 1, expected true or false"),
        ([], {"top": 0}, "'top' is 0, expected a number from 1"),
        ([], {"top": "5"}, "'top' is '5', expected a number from 1"),
        ([named("labels", top=1.0)], {}, "'top' is 1.0, expected a number from 1"),
        ([named("labels", top=True)], {}, "'top' is True, expected a number from 1"),
        ([named("logits", classification=-1)], {}, "'classification' is -1, expected"),
        ([named("labels", classification=1)], {}, "'labels' has no classification, expected 'top'"),
        ([named("logits", shared_memory_region="r")], {}, "asks for shared memory"),
    ],
)
def test_what_cannot_be_asked_for_is_told(
    outputs: list[dict[str, Any]], parameters: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(sentence)):
        wanted(*outputs, **parameters)


def test_numbers_are_json_or_binary_data() -> None:
    values = [[0.1, 2.0, -3.0], [4.0, 5.0, 6.0]]
    described = {"name": "logits", "datatype": "FP32", "shape": (2, 3)}
    in_json = encode(named("logits"), values)
    assert in_json.described == {**described, "data": np.array(values, "<f4").flatten().tolist()}
    assert in_json.binary is None
    binary = encode(named("logits", binary_data=True), values)
    assert binary.described == {**described, "parameters": {"binary_data_size": 24}}
    assert isinstance(binary.binary, memoryview)
    assert bytes(binary.binary) == np.array(values, "<f4").tobytes()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_json_says_that_a_number_is_not_finite(odd: float) -> None:
    assert encode(named("logits"), [[odd, 1.0, 2.0]]).described["parameters"] == {"finite": False}
    binary = encode(named("logits", binary_data=True), [[odd, 1.0, 2.0]])
    assert binary.described["parameters"] == {"binary_data_size": 12}


ROW = tuple(Label(label=name, index=i, probability=0.3) for i, name in enumerate(NAMES))


def test_labels_are_names_by_falling_probability() -> None:
    in_json = encode(named("labels", top=2), [], labels=(ROW, ROW))
    assert in_json.described == {
        "name": "labels",
        "datatype": "BYTES",
        "shape": [2, 2],
        "data": ["ant", "bee", "ant", "bee"],
    }
    binary = encode(named("labels", top=1, binary_data=True), [], labels=(ROW, ROW))
    assert binary.binary == (struct.pack("<I", 3) + b"ant") * 2
    assert binary.described["parameters"] == {"binary_data_size": 14}


def test_a_labels_bytes_are_its_utf_8() -> None:
    row = (Label(label="Bär", index=0, probability=1.0),)
    binary = encode(named("labels", top=1, binary_data=True), [], labels=(row,))
    assert binary.binary == b"\4\0\0\0B\xc3\xa4r"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (NAMES, ["2.5:2:cat: tabby", "1.0:0:ant", "0.1:1:bee", "0.0:0:ant"]),
        (None, ["2.5:2", "1.0:0", "0.1:1", "0.0:0"]),
    ],
)
def test_a_classification_names_the_highest_values(names: Any, expected: list[str]) -> None:
    values = [[1.0, 0.1, 2.5], [0.0, -1.0, 0.1]]
    found = encode(named("logits", classification=2), values, names=names)
    assert found.described["shape"] == [2, 2]
    assert found.described["datatype"] == "BYTES"
    first, second, _, last = expected
    data = found.described["data"]
    assert data[:2] == [first, second]
    assert data[3] == last
    assert data[2].startswith("0.1:2")


def test_a_classifications_value_is_the_very_fp32() -> None:
    value = np.float32(0.15617784857749939)
    (text,) = encode(named("logits", classification=1), [[float(value), 0.0, 0.0]]).described[
        "data"
    ]
    assert np.float32(text.split(":")[0]) == value


def test_nan_is_no_highest_value() -> None:
    found = encode(named("logits", classification=3), [[math.nan, 1.0, 2.0]], names=None)
    assert found.described["data"] == ["2.0:2", "1.0:1", "nan:0"]


def test_outputs_come_in_the_order_asked_for() -> None:
    outputs = wanted(named("probabilities"), named("logits"))
    array = answer("logits", "probabilities", values=[[1.0, 2.0, 3.0]])
    names = [output.described["name"] for output in output_tensors.encode(outputs, array, None)]
    assert names == ["probabilities", "logits"]


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (answer("probabilities", values=[[1.0]]), "lacks the output 'logits'"),
        (answer("logits", values=[[1.0]], size=4), "output 'logits' has a wrong size"),
        (answer("logits", values=[[1.0]]), "lacks the labels"),
    ],
)
def test_an_answer_of_another_form_is_a_fault_of_ours(told: Answer, sentence: str) -> None:
    with pytest.raises(Fault, match=sentence):
        output_tensors.encode(wanted(named("logits"), named("labels")), told, None)
