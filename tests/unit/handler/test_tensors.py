"""Bytes of a tensor as the model's input."""

import re
from typing import Any

import pytest
import torch

from handler import tensors
from handler.errors import InvalidInput
from models.manifest import InputSpec

SPEC = InputSpec(resize=4, crop=2, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear")


@pytest.mark.parametrize("batch", [1, 3])
def test_values_are_little_endian_and_row_major(batch: int) -> None:
    expected = torch.arange(batch * 12.0).reshape(batch, 3, 2, 2)
    body = bytearray(expected.numpy().astype("<f4").tobytes())
    found = tensors.decode("FP32", [batch, 3, 2, 2], body, SPEC)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [("FP64", torch.float64), ("FP16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_other_floats_are_rounded_to_the_nearest(datatype: str, dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    body = bytearray(values.view(torch.uint8).numpy().tobytes())
    found = tensors.decode(datatype, [2, 3, 2, 2], body, SPEC)
    assert found.dtype == torch.float32
    assert torch.equal(found, values.to(torch.float32))


def test_what_is_not_finite_passes_and_what_is_beyond_fp32_is_infinite() -> None:
    values = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, 1e300, -1e300, 1e-300] * 2, dtype=torch.float64
    )
    body = bytearray(values.numpy().tobytes())
    expected = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf, 0.0] * 2)
    found = tensors.decode("FP64", [1, 3, 2, 2], body, SPEC)
    assert torch.equal(found.flatten().nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("datatype", "shape", "size", "told"),
    [
        ("INT8", [1, 3, 2, 2], 48, "datatype 'INT8', expected"),
        (None, [1, 3, 2, 2], 48, "datatype None"),
        ("FP32", None, 48, "shape None, expected a list of sizes"),
        ("FP32", "1,3,2,2", 48, "expected a list of sizes"),
        ("FP32", [1, 3, 2, "2"], 48, "expected a list of sizes"),
        ("FP32", [1, 3, 2, 2.0], 48, "expected a list of sizes"),
        ("FP32", [True, 3, 2, 2], 48, "expected a list of sizes"),
        ("FP32", [-1, 3, 2, 2], 48, "expected a list of sizes"),
        ("FP32", [0, 3, 2, 2], 0, "shape [0, 3, 2, 2], expected [n, 3, 2, 2]"),
        ("FP32", [3, 2, 2], 48, "expected [n, 3, 2, 2]"),
        ("FP32", [1, 2, 2, 3], 48, "expected [n, 3, 2, 2]"),
        ("FP32", [1, 3, 2, 2], 47, "47 bytes, expected 48"),
        ("FP32", [1, 3, 2, 2], 0, "0 bytes, expected 48"),
        ("FP64", [1, 3, 2, 2], 48, "48 bytes, expected 96"),
        ("BF16", [1, 3, 2, 2], 48, "48 bytes, expected 24"),
        (["FP32"], [1, 3, 2, 2], 48, "datatype ['FP32'], expected one of FP32, FP64, FP16, BF16"),
        ("FP32", [10**30, 3, 2, 2], 48, f"48 bytes, expected {48 * 10**30}"),
    ],
)
def test_what_does_not_fit_is_told(datatype: Any, shape: Any, size: int, told: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(told)):
        tensors.decode(datatype, shape, bytearray(size), SPEC)
