"""The built-in processing of models that classify no images: their tensors in and out as they are."""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from handler.errors import InvalidInput, ModelFault
from handler.processing import Encoded
from handler.wire import Header
from models import examples, own
from models.manifest import DATATYPES, TensorSpec

_NAMES: Final = {examples.DTYPES[name]: datatype for name, datatype in DATATYPES.items()}


class RawTensors:
    """specs: the inputs as the model was prepared with them; the sizes of a shape may differ from those."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs

    def decode(self, described: Header, body: bytearray) -> Any:
        """The frame's `input` has `shapes`, in the order of the model's inputs, whose bytes follow each other."""
        shapes = described.get("shapes")
        if described.get("kind") != "tensors" or not isinstance(shapes, list):
            raise InvalidInput(
                f"input of kind {described.get('kind')!r}, expected 'tensors': the model takes no images"
            )
        if len(shapes) != len(self._specs):
            raise InvalidInput(f"found {len(shapes)} inputs, expected {len(self._specs)}")
        made: dict[str, Tensor] = {}
        start = 0
        for spec, shape in zip(self._specs, shapes, strict=True):
            dtype = examples.DTYPES[spec.dtype]
            end = start + dtype.itemsize * math.prod(shape)
            if len(shape) != len(spec.shape) or end > len(body):
                raise InvalidInput(
                    f"input {spec.name!r} has the shape {shape} in {len(body) - start} bytes, "
                    f"expected {len(spec.shape)} sizes and the values of all"
                )
            # Of its own memory, as the plain module's is: kernels round otherwise at other alignments.
            values = torch.empty(end - start, dtype=torch.uint8)
            values.numpy()[:] = memoryview(body)[start:end]
            made[spec.name] = values.view(dtype).reshape(shape)
            start = end
        if start != len(body):
            raise InvalidInput(f"{len(body) - start} bytes follow those of the inputs")
        return examples.arranged(self._specs, made)

    def encode(self, outputs: Any) -> Encoded:
        described, parts = [], []
        for name, tensor in own.named(outputs):
            datatype = _NAMES.get(tensor.dtype)
            if datatype is None:
                raise ModelFault(
                    f"the model's output {name} is {tensor.dtype}, which has no datatype"
                )
            values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            content = values.numpy().tobytes()
            parts.append(content)
            described.append(
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": list(tensor.shape),
                    "bytes": len(content),
                }
            )
        return Encoded({"outputs": described}, b"".join(parts))
