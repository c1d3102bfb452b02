"""Examples on the command line: what they name, and what tensors they give."""

import pytest
import torch

from models import examples
from models.examples import ExampleError
from models.manifest import TensorSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1x3x224x224", [TensorSpec(name="input", dtype="F32", shape=(1, 3, 224, 224))]),
        ("1x16:int64", [TensorSpec(name="input", dtype="I64", shape=(1, 16))]),
        (
            "ids=1x16:int64, mask=1x16:bool",
            [
                TensorSpec(name="ids", dtype="I64", shape=(1, 16), named=True),
                TensorSpec(name="mask", dtype="BOOL", shape=(1, 16), named=True),
            ],
        ),
        (
            "2x3,4:float16",
            [
                TensorSpec(name="input0", dtype="F32", shape=(2, 3)),
                TensorSpec(name="input1", dtype="F16", shape=(4,)),
            ],
        ),
        ("x=:float64", [TensorSpec(name="x", dtype="F64", shape=(), named=True)]),
    ],
)
def test_what_an_example_names(text: str, expected: list[TensorSpec]) -> None:
    assert list(examples.parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no input"),
        ("3x", "'3x' is no input"),
        ("1x3x224x224:float31", "'float31' is no type, expected one of .*float32"),
        ("1x3,", "'' is no input"),
        ("a=3,3", "names some of its inputs, expected all or none"),
        ("a=3,a=4", "names an input twice"),
        ("-1x3", "is no input"),
    ],
)
def test_what_is_no_example_is_refused_with_what_was_expected(text: str, reason: str) -> None:
    with pytest.raises(ExampleError, match=reason):
        examples.parse(text)


def test_one_input_is_given_alone_several_in_order_named_ones_by_name() -> None:
    alone = examples.tensors(examples.parse("2x3"))
    assert (alone.shape, alone.dtype) == ((2, 3), torch.float32)
    first, second = examples.tensors(examples.parse("2x3,4:int64"))
    assert (first.shape, second.shape, second.dtype) == ((2, 3), (4,), torch.int64)
    assert second.max() <= 1
    assert second.min() >= 0, "indices that every table has"
    named = examples.tensors(examples.parse("b=2,a=1:bool"))
    assert list(named) == ["b", "a"]
    assert named["a"].dtype == torch.bool


def test_examples_of_one_seed_are_alike_and_of_two_differ() -> None:
    specs = examples.parse("2x3")
    assert torch.equal(examples.tensors(specs), examples.tensors(specs))
    assert not torch.equal(examples.tensors(specs), examples.tensors(specs, seed=1))
