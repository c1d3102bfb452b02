"""An inference request's input as the handler takes it."""

import base64
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.manifest import InputSpec
from runtime import binary_tensors, input_tensors
from runtime.errors import BadInput
from runtime.input_tensors import HandlerInput
from runtime.protocol import InferenceRequest, RequestInput

SPEC = InputSpec(resize=2, crop=2, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear")
LIMIT = 480
"""Ten images' FP32."""
SHAPE = [1, 3, 2, 2]


def decode(
    shape: list[int], datatype: str, data: Any = None, binary: bytes | None = None, **more: Any
) -> HandlerInput:
    parameters = {} if binary is None else {"binary_data_size": len(binary)}
    tensor = RequestInput(
        name="input", shape=shape, datatype=datatype, data=data, parameters=parameters, **more
    )
    rest = None if binary is None else memoryview(binary)
    return input_tensors.decode(InferenceRequest(inputs=[tensor]), rest, SPEC, LIMIT)


def told(sentence: str) -> Any:
    return pytest.raises(BadInput, match=re.escape(sentence))


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("nested", [True, False])
def test_json_numbers_become_fp32(datatype: str, nested: bool) -> None:
    values = np.linspace(-2, 3, 24).reshape(2, 3, 2, 2)
    data = values.tolist() if nested else values.flatten().tolist()
    found = decode([2, 3, 2, 2], datatype, data)
    assert found.header == {"kind": "tensor", "datatype": "FP32", "shape": [2, 3, 2, 2]}
    assert bytes(found.body) == values.astype("<f4").tobytes()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=12, max_size=12))
def test_json_numbers_are_rounded_to_the_nearest_fp32_or_refused(numbers: list[float]) -> None:
    with np.errstate(over="ignore"):
        expected = np.array(numbers).astype("<f4")
    if np.isfinite(expected).all():
        assert bytes(decode(SHAPE, "FP64", numbers).body) == expected.tobytes()
    else:
        with told("a number beyond the range of FP32"):
            decode(SHAPE, "FP64", numbers)


def test_whole_numbers_are_numbers() -> None:
    assert (
        bytes(decode(SHAPE, "FP32", list(range(12))).body) == np.arange(12, dtype="<f4").tobytes()
    )


@pytest.mark.parametrize(("datatype", "size"), [("FP32", 4), ("FP64", 8), ("FP16", 2), ("BF16", 2)])
def test_binary_data_go_to_the_handler_as_they_are(datatype: str, size: int) -> None:
    binary = bytes(range(12)) * size
    found = decode(SHAPE, datatype, binary=binary)
    assert found.header == {"kind": "tensor", "datatype": datatype, "shape": SHAPE}
    assert isinstance(found.body, memoryview)
    assert found.body.obj is binary
    for wrong in (binary[:-1], binary + b"x", b""):
        with told(f"binary_data_size of input 'input' is {len(wrong)}, expected {len(binary)}"):
            decode(SHAPE, datatype, binary=wrong)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_travels_as_binary_data_only(datatype: str) -> None:
    with told(f"{datatype} has no form in JSON, expected it as binary data"):
        decode(SHAPE, datatype, [0.0] * 12)


def test_pixels_are_bytes_in_both_forms() -> None:
    values = list(range(0, 252, 14))
    expected = {"kind": "pixels", "shape": [2, 1, 3, 3]}
    for found in (
        decode([2, 1, 3, 3], "UINT8", values),
        decode([2, 1, 3, 3], "UINT8", binary=bytes(values)),
        decode([2, 1, 3, 3], "UINT8", np.reshape(values, (2, 1, 3, 3)).tolist()),
    ):
        assert found.header == expected
        assert bytes(found.body) == bytes(values)


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_images_go_to_the_handler_one_after_another(shape: list[int]) -> None:
    images = [b"one", b"two and more"]
    texts: list[Any] = [base64.b64encode(image).decode() for image in images]
    packed = binary_tensors.pack(images)
    for found in (
        decode(shape, "BYTES", texts),
        decode(shape, "BYTES", [[text] for text in texts] if len(shape) > 1 else texts),
        decode(shape, "BYTES", binary=packed),
    ):
        assert found.header == {"kind": "images", "lengths": [3, 12]}
        assert bytes(found.body) == b"onetwo and more"


def test_one_image_is_not_copied() -> None:
    packed = binary_tensors.pack([b"one"])
    found = decode([1], "BYTES", binary=packed)
    assert isinstance(found.body, memoryview)
    assert found.body.obj is packed


@pytest.mark.parametrize(
    ("shape", "datatype", "data", "sentence"),
    [
        (SHAPE, "INT8", [0] * 12, "has datatype 'INT8', expected one of FP32, FP64, FP16, BF16"),
        (SHAPE, "fp32", [0] * 12, "has datatype 'fp32'"),
        (SHAPE, "FP32", None, "has neither data nor binary_data_size"),
        ([], "FP32", [], "has shape [], expected [n, 3, 2, 2] of FP32 with n from 1"),
        ([10**4298, 3, 2, 2], "FP32", [], "expected sizes below 2147483648"),
        ([1, 10**4000, 10**4000, 3], "UINT8", [], "expected sizes below 2147483648"),
        ([1, 2, 2, 3], "FP32", [0] * 12, "has shape [1, 2, 2, 3], expected [n, 3, 2, 2]"),
        ([0, 3, 2, 2], "FP64", [], "expected [n, 3, 2, 2] of FP64"),
        ([-1, 3, 2, 2], "FP32", [], "expected [n, 3, 2, 2]"),
        ([11, 3, 2, 2], "FP32", [], "528 bytes in FP32, over the limit of 480 bytes"),
        ([2**63, 3, 2, 2], "FP32", [], "expected sizes below 2147483648"),
        (
            [10, 3, 2, 2],
            "FP32",
            [0] * 12,
            "has 12 elements, expected 120 elements, flat or nested as the shape [10, 3, 2, 2]",
        ),
        (SHAPE, "FP32", 5, "is 5, expected 12 elements, flat or nested"),
        (SHAPE, "FP32", "text", "is 'text', expected 12 elements"),
        (SHAPE, "FP32", [[0], [0, 1]], "is nested otherwise, expected 12 elements"),
        (SHAPE, "FP32", [[0] * 12], "is nested otherwise"),
        (SHAPE, "FP32", [[[[0] * 2] * 2] * 3] * 2, "has 24 elements, expected 12"),
        (SHAPE, "FP32", [[[[[0] * 2] * 2] * 2] * 3], "holds [0, 0], expected numbers"),
        (SHAPE, "FP32", [0] * 11 + [[0]], "holds [0], expected numbers"),
        (SHAPE, "FP32", [0] * 11 + ["0"], "holds '0', expected numbers"),
        (SHAPE, "FP32", [0] * 11 + [True], "holds True, expected numbers"),
        (SHAPE, "FP32", [0] * 11 + [None], "holds None, expected numbers"),
        (SHAPE, "FP32", [0] * 11 + [10**400], "a number beyond the range of FP32"),
        (SHAPE, "FP32", [0] * 11 + [10**40], "a number beyond the range of FP32"),
        (SHAPE, "FP32", [0] * 11 + [3.5e38], "a number beyond the range of FP32"),
        (SHAPE, "FP64", [0] * 11 + [-1e300], "a number beyond the range of FP32"),
        ([1, 3, 2, 2], "UINT8", [0] * 12, "expected [n, height, width, 3] of UINT8"),
        ([1, 0, 2, 3], "UINT8", [], "expected [n, height, width, 3]"),
        ([-1, -1, 2, 3], "UINT8", [0] * 6, "expected [n, height, width, 3]"),
        ([1, 1, 1, 3], "UINT8", [0, 0, 256], "a number outside 0 to 255"),
        ([1, 1, 1, 3], "UINT8", [0, 0, -1], "a number outside 0 to 255"),
        ([1, 1, 1, 3], "UINT8", [0, 0, 10**30], "a number outside 0 to 255"),
        ([1, 1, 1, 3], "UINT8", [0, 0, 1.0], "holds 1.0, expected whole numbers"),
        ([11, 1, 1, 3], "UINT8", [0] * 33, "over the limit of 480 bytes"),
        ([], "BYTES", ["aaaa"], "expected [n] or [n, 1] of BYTES"),
        ([0], "BYTES", [], "expected [n] or [n, 1] of BYTES"),
        ([1, 2], "BYTES", ["aaaa"], "expected [n] or [n, 1] of BYTES"),
        ([11], "BYTES", ["aaaa"] * 11, "over the limit of 480 bytes"),
        ([2], "BYTES", ["aaaa"], "has 1 elements, expected 2 elements"),
        ([1], "BYTES", "aaaa", "is 'aaaa', expected 1 elements"),
        ([1], "BYTES", [["aaaa"]], "element 1 of data of input 'input' is ['aaaa'], expected"),
        ([2, 1], "BYTES", [["aaaa"], "aaaa"], "is nested otherwise"),
        ([1], "BYTES", [5], "element 1 of data of input 'input' is 5, expected an encoded image"),
        ([2], "BYTES", ["aaaa", "aaa"], "element 2 of data"),
        ([1], "BYTES", ["aa\naa"], "element 1 of data"),
        ([1], "BYTES", ["äaaa"], "element 1 of data"),
    ],
)
def test_what_is_wrong_is_told(shape: list[int], datatype: str, data: Any, sentence: str) -> None:
    with told(sentence):
        decode(shape, datatype, data)


def test_one_image_may_be_larger_than_the_limit() -> None:
    tensor = RequestInput(name="input", shape=SHAPE, datatype="FP32", data=[0.0] * 12)
    found = input_tensors.decode(InferenceRequest(inputs=[tensor]), None, SPEC, limit=1)
    assert len(found.body) == 48


def test_a_body_of_its_own_is_one_fp32_tensor() -> None:
    body = bytes(48)
    asked = input_tensors.raw(body, SPEC)
    assert asked.parameters == {"binary_data_output": True}
    found = input_tensors.decode(asked, memoryview(body), SPEC, LIMIT)
    assert found.header == {"kind": "tensor", "datatype": "FP32", "shape": SHAPE}
    for wrong in (b"", bytes(47), bytes(49), bytes(96)):
        with told(f"the body has {len(wrong)} bytes, expected 48"):
            input_tensors.raw(wrong, SPEC)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(
    shape=st.lists(st.integers(-1, 3), max_size=5),
    datatype=st.sampled_from(["FP32", "FP64", "FP16", "UINT8", "BYTES", "BOOL"]),
    data=json_values,
)
@settings(max_examples=200)
def test_whatever_json_says_is_taken_or_refused(shape: list[int], datatype: str, data: Any) -> None:
    data = json.loads(json.dumps(data))
    try:
        found = decode(shape, datatype, data)
    except BadInput:
        return
    assert len(found.body) == (
        sum(found.header["lengths"]) if datatype == "BYTES" else _bytes(found.header)
    )


def _bytes(header: dict[str, Any]) -> int:
    return int(np.prod(header["shape"])) * (1 if header["kind"] == "pixels" else 4)
