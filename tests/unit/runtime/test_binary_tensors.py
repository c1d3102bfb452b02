"""The binary tensor data extension: where the JSON object ends, whose bytes follow, and elements of BYTES."""

import re
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import binary_tensors
from runtime.errors import BadInput
from runtime.protocol import RequestInput


def tensor(name: str, size: Any = None, data: Any = None) -> RequestInput:
    parameters = {} if size is None else {"binary_data_size": size}
    return RequestInput(name=name, shape=[1], datatype="FP32", parameters=parameters, data=data)


@pytest.mark.parametrize(("header", "length"), [("0", 0), ("5", 5), ("10", 10), ("0010", 10)])
def test_the_length_is_a_number_up_to_the_bodys(header: str, length: int) -> None:
    assert binary_tensors.header_length(header, 10) == length


@pytest.mark.parametrize(
    "header", ["11", "-1", "+1", "1.0", "1e1", " 1", "1 ", "1_0", "0x1", "", "ten", "٣", "9" * 99]
)
def test_any_other_length_is_refused_by_name(header: str) -> None:
    with pytest.raises(BadInput, match=r"Inference-Header-Content-Length is .*10 bytes"):
        binary_tensors.header_length(header, 10)


def test_each_input_gets_its_bytes_in_the_inputs_order() -> None:
    inputs = [tensor("a", 2), tensor("b", data=[1]), tensor("c", 0), tensor("d", 3)]
    parts = binary_tensors.assign(inputs, memoryview(b"aaddd"[:2] + b"ddd"))
    assert [None if part is None else bytes(part) for part in parts] == [b"aa", None, b"", b"ddd"]


def test_no_bytes_are_copied() -> None:
    body = bytearray(8)
    (part,) = binary_tensors.assign([tensor("a", 8)], memoryview(body))
    assert part is not None
    assert part.obj is body


@pytest.mark.parametrize(
    ("inputs", "binary", "told"),
    [
        ([tensor("a", 3)], None, "'a' has binary_data_size, expected the header"),
        ([tensor("a", 3)], b"aa", "binary_data_size of input 'a' is 3, but 2 bytes are left"),
        ([tensor("a", 1), tensor("b", 2)], b"aa", "of input 'b' is 2, but 1 bytes are left"),
        ([tensor("a", 3)], b"aaaa", "1 bytes follow those"),
        ([tensor("a", data=[1])], b"aaaa", "4 bytes follow those"),
        ([], b"aaaa", "4 bytes follow those"),
        ([tensor("a", 4, data=[1])], b"aaaa", "has both data and binary_data_size"),
        ([tensor("a", -1)], b"aaaa", "is -1, expected a number of bytes"),
        ([tensor("a", 2**64)], b"aaaa", f"is {2**64}, but 4 bytes are left"),
        ([tensor("a", 4.0)], b"aaaa", "is 4.0, expected a number of bytes"),
        ([tensor("a", "4")], b"aaaa", "is '4', expected a number of bytes"),
        ([tensor("a", True)], b"a", "is True, expected a number of bytes"),
        ([tensor("a", [4])], b"aaaa", "is [4], expected a number of bytes"),
    ],
)
def test_sizes_that_do_not_fit_the_body_are_told(
    inputs: list[RequestInput], binary: bytes | None, told: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(told)):
        binary_tensors.assign(inputs, None if binary is None else memoryview(binary))


@given(st.lists(st.binary(max_size=9)))
def test_packed_elements_are_found_again(values: list[bytes]) -> None:
    packed = binary_tensors.pack(values)
    assert packed == b"".join(struct.pack("<I", len(value)) + value for value in values)
    found = binary_tensors.elements(memoryview(packed), len(values))
    assert [bytes(element) for element in found] == values


@given(st.binary(max_size=40), st.integers(0, 4))
def test_any_bytes_are_elements_to_the_last_byte_or_refused(packed: bytes, count: int) -> None:
    try:
        found = binary_tensors.elements(memoryview(packed), count)
    except BadInput:
        return
    assert binary_tensors.pack(bytes(element) for element in found) == packed


@pytest.mark.parametrize(
    ("packed", "count", "told"),
    [
        (b"\1\0\0", 1, "BYTES end with 3 bytes after element 0"),
        (b"\5\0\0\0abcd", 1, "element 1 of BYTES has the length 5, but 4 bytes are left"),
        (b"\xff\xff\xff\xff", 1, "element 1 of BYTES has the length 4294967295"),
        (b"\1\0\0\0a", 2, "BYTES hold 1 elements and 0 bytes more, expected 2 elements"),
        (b"\1\0\0\0ab", 1, "BYTES hold 1 elements and 1 bytes more, expected 1 elements"),
        (bytes(4 << 20), 2, f"BYTES hold 2 elements and {(4 << 20) - 8} bytes more"),
        (b"", 1, "BYTES hold 0 elements and 0 bytes more"),
    ],
)
def test_elements_that_do_not_fit_are_told(packed: bytes, count: int, told: str) -> None:
    with pytest.raises(BadInput, match=re.escape(told)):
        binary_tensors.elements(memoryview(packed), count)


def test_an_answer_is_json_alone_or_with_the_length_of_its_json() -> None:
    assert binary_tensors.content({"a": 1}) == (b'{"a":1}', {"Content-Type": "application/json"})
    assert binary_tensors.content({"a": 1}, [b"xy", memoryview(b"z")]) == (
        b'{"a":1}xyz',
        {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "7"},
    )
