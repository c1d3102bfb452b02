"""Seeded random weights, for timings and tests where no trained ones are at hand.

A constructor's own initialization will not do: it sets a ViT's head and class token to zero and batch
normalization to the identity, so that many mistakes in loading would change no output. Here every
parameter and buffer is random, and so scaled that the signal neither dies nor explodes with depth and
that different images give different classes.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from models.layers import Architecture, TensorPlace

_RELU_GAIN: Final = 1 / (1 / 2 - 1 / (2 * math.pi))
"""Filters have zero mean, so they see the variance of a rectified signal, (1/2 - 1/2pi) of its input's.
Were their mean not zero, the signal's positive mean would drown what tells one image from another."""
_BRANCH_SCALE: Final = 0.9
"""Weight of a residual branch's last normalization, over the square root of the stage's blocks: the sum
stays moderate however deep the stage."""
_ATTENTION_GAIN: Final = 3.0
"""Of queries and keys: with a gain of 1 attention is nearly uniform and images look alike."""
_COLOURS: Final = 3
_HEAD_GAIN: Final = 4.0
"""Of a ViT's head, which sees a normalized signal: logits of a standard deviation of about 2."""


class RandomWeights(Mapping[str, Tensor]):
    """The state dict of an architecture, each tensor made when asked for, from (seed, key) alone.

    Neither the order of asking nor torch's global generator matters, and none is changed.
    """

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self._seed = seed
        self._places = {
            place.key: place for layer in architecture.layers for place in layer.tensors
        }
        self._constants = architecture.constants
        self._is_transformer = "class_token" in self._places
        self._blocks = Counter(
            re.findall(r"^(layer\d)\.\d+\.conv1\.weight$", "\n".join(self._places), re.MULTILINE)
        )
        self._last_normalization = "bn3" if "layer1.0.bn3.weight" in self._places else "bn2"

    def __getitem__(self, key: str) -> Tensor:
        place = self._places[key]
        if key in self._constants:
            return self._constants[key].clone()
        generator = torch.Generator().manual_seed(_tensor_seed(self._seed, key))
        return self._tensor(place, generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _tensor(self, place: TensorPlace, generator: torch.Generator) -> Tensor:
        attribute = place.key.rpartition(".")[2]
        if attribute == "num_batches_tracked":
            return torch.randint(1, 100_000, place.shape, dtype=place.dtype, generator=generator)
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if attribute == "running_var":
            return tensor.uniform_(0.6, 1.6, generator=generator)  # 1 on average, inverted
        if _is_offset(attribute):
            return tensor.normal_(0.0, 0.1, generator=generator)
        if len(place.shape) == 1:
            return tensor.uniform_(0.8, 1.2, generator=generator).mul_(
                self._branch_scale(place.key)
            )
        return self._fill_matrix(place, tensor.normal_(generator=generator))

    def _fill_matrix(self, place: TensorPlace, tensor: Tensor) -> Tensor:
        """Scales the weights of a convolution or linear layer, (outputs, inputs, ...)."""
        fan_in = math.prod(place.shape[1:])
        if not self._is_transformer:
            if place.shape[1] > _COLOURS:  # the image is not a rectified signal
                tensor -= tensor.mean(dim=tuple(range(1, tensor.dim())), keepdim=True)
            return tensor.mul_(math.sqrt(_RELU_GAIN / fan_in))
        tensor.mul_(math.sqrt(1 / fan_in))
        if place.key.endswith("in_proj_weight"):
            tensor[: 2 * place.shape[1]] *= math.sqrt(_ATTENTION_GAIN)
        elif place.key.startswith("heads."):
            tensor.mul_(math.sqrt(_HEAD_GAIN))
        return tensor

    def _branch_scale(self, key: str) -> float:
        """Of a normalization's weight: below 1 for the last one of a residual branch in a ResNet."""
        match = re.fullmatch(r"(layer\d)\.\d+\.(bn\d)\.weight", key)
        if match is None or match[2] != self._last_normalization:
            return 1.0
        return _BRANCH_SCALE / math.sqrt(self._blocks[match[1]])


def _is_offset(attribute: str) -> bool:
    return attribute.endswith(("bias", "running_mean", "class_token", "pos_embedding"))


def _tensor_seed(seed: int, key: str) -> int:
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
