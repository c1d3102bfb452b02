"""Tensors at addresses that their type does not allow, as mapped files may have them."""

import torch
from torch import Tensor


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of its values if an element of it lies across the bounds of its type.

    Kernels may compute anything from such addresses, on some processors they end the process.
    """
    if tensor.data_ptr() % tensor.itemsize == 0 or not tensor.numel():
        return tensor
    size = tensor.itemsize
    elements = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (*tensor.shape, size),
        (*(stride * size for stride in tensor.stride()), 1),
    )
    copied = elements.clone(memory_format=torch.contiguous_format).view(tensor.dtype).squeeze(-1)
    if tensor.is_conj():
        copied = copied.conj()
    return -copied if tensor.is_neg() else copied
