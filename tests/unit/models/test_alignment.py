"""Tensors at odd addresses, copied to even ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.alignment import aligned

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64)


def at(shift: int, tensor: Tensor) -> Tensor:
    """The tensor's storage at an address that is off by `shift`, and the tensor's place in it."""
    content = tensor.untyped_storage()
    storage = torch.zeros(content.nbytes() + 8, dtype=torch.uint8).untyped_storage()
    part = storage[shift : shift + content.nbytes()]
    part.copy_(content)
    moved = torch.empty(0, dtype=tensor.dtype)
    return moved.set_(part, tensor.storage_offset(), tensor.shape, tensor.stride())


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1:, ::2],
        lambda tensor: tensor.transpose(0, 2),
        lambda tensor: tensor[0, 0, 0],
        lambda tensor: tensor[:0],
        lambda tensor: tensor[:1].expand(3, -1, -1),
    ],
)
@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_stay_and_addresses_become_what_the_type_allows(
    dtype: torch.dtype, shift: int, change: Callable[[Tensor], Tensor]
) -> None:
    tensor = change((torch.arange(60.0).reshape(3, 4, 5) - 30).to(dtype))
    moved = at(shift, tensor)
    found = aligned(moved)
    assert torch.equal(found, tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.data_ptr() % dtype.itemsize == 0 or not tensor.numel()
    if moved.data_ptr() % dtype.itemsize == 0:
        assert found is moved


def test_a_copy_has_the_tensor_s_size_and_not_its_storage_s() -> None:
    tensor = at(1, torch.arange(100_000.0))[::1000]
    assert aligned(tensor).untyped_storage().nbytes() == 400


def test_what_is_negative_or_conjugate_by_a_flag_stays_so() -> None:
    negative = torch._neg_view(at(1, torch.tensor([1.0, -2.0])))
    assert aligned(negative).tolist() == [-1.0, 2.0]
    conjugate = at(1, torch.tensor([1 + 2j])).conj()
    assert aligned(conjugate).tolist() == [1 - 2j]
