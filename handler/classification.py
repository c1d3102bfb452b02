"""The built-in processing of image classifiers: images or tensors in, logits, probabilities and labels out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from handler import inputs
from handler.processing import Encoded
from handler.wire import Header
from models.manifest import InputSpec
from models.store import PreparedModel


class ImageClassification:
    """outputs: which of `logits`, `probabilities` and `labels`; top: how many labels.

    dtype: in which the layers compute; what is answered is float32.
    """

    def __init__(
        self,
        model: PreparedModel,
        spec: InputSpec,
        dtype: torch.dtype,
        outputs: Sequence[str],
        top: int,
        max_pixels: int,
    ) -> None:
        self._model = model
        self._spec = spec
        self._dtype = dtype
        self._outputs = outputs
        self._top = top
        self._max_pixels = max_pixels

    def decode(self, described: Header, body: bytearray) -> Tensor:
        return inputs.decode(described, body, self._spec, self._max_pixels).to(self._dtype)

    def encode(self, outputs: Any) -> Encoded:
        logits: Tensor = outputs.float()
        tensors: dict[str, Tensor] = {}
        if "logits" in self._outputs:
            tensors["logits"] = logits
        if "probabilities" in self._outputs or "labels" in self._outputs:
            probabilities = torch.softmax(logits, dim=1)
        if "probabilities" in self._outputs:
            tensors["probabilities"] = probabilities
        parts = {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
        fields = {
            "outputs": [
                {
                    "name": name,
                    "datatype": "FP32",
                    "shape": list(tensor.shape),
                    "bytes": len(parts[name]),
                }
                for name, tensor in tensors.items()
            ],
            "labels": self._labels(probabilities) if "labels" in self._outputs else None,
        }
        return Encoded(fields, b"".join(parts.values()))

    def _labels(self, probabilities: Tensor) -> list[list[dict[str, Any]]]:
        names = self._model.labels
        values, indices = probabilities.topk(min(max(self._top, 1), probabilities.shape[1]), dim=1)
        return [
            [
                {
                    "label": names[index] if names else str(index),
                    "index": index,
                    "probability": value,
                }
                for value, index in zip(row_values, row_indices, strict=True)
            ]
            for row_values, row_indices in zip(values.tolist(), indices.tolist(), strict=True)
        ]
