"""Tensors as they are in the body -> a model's inputs."""

import torch

from handler.raw_tensors import RawTensors
from models import examples


def test_every_input_begins_where_a_tensor_of_torchs_own_does() -> None:
    """In the body the second lies across the bounds of its type, from which kernels may compute anything."""
    mask = torch.tensor([True, False, True])
    ids = torch.tensor([[1, -2], [3, 1 << 40]])
    body = bytearray(mask.numpy().tobytes() + ids.numpy().tobytes())
    processing = RawTensors(examples.parse("mask=3:bool,ids=1x2:int64,none=0"))
    found = processing.decode({"kind": "tensors", "shapes": [[3], [2, 2], [0]]}, body)

    assert torch.equal(found["mask"], mask)
    assert torch.equal(found["ids"], ids)
    assert found["none"].shape == (0,)
    assert [tensor.data_ptr() % 64 for tensor in (found["mask"], found["ids"])] == [0, 0]
