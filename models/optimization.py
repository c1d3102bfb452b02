"""Whether, and with which layout of weights, fused convolutions run a model faster here: measured."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from models import blocked, catalog
from models.blocked import Convolution
from models.fusion import FoldedWeights, FusedConv2d
from models.layers import Architecture, BuiltLayer
from models.manifest import BlockedLayout, MemoryFormat, Optimization, WeightFormat

TOLERANCE: Final = 1e-4
"""Of the largest logit: how far an optimized answer may be from torchvision's."""
_ROUNDS: Final = 15
_WARM_UPS: Final = 2
_WORTHWHILE: Final = 0.98
"""Of the plain time; what gains less might lose elsewhere."""
_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fused architecture and its weights in one layout."""

    memory_format: MemoryFormat
    architecture: Architecture
    weights: Mapping[str, Tensor]
    layouts: Mapping[str, BlockedLayout] = field(default_factory=dict)
    """Of the weights that are blocked, by key."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The fastest candidate and what was measured."""

    candidate: Candidate
    optimization: Optimization


def choose(
    plain: Architecture, weights: Mapping[str, Tensor], weight_format: WeightFormat, threads: int
) -> Chosen | None:
    """The fastest of the fused candidates; None where none is faster and equal within the tolerance.

    Runs all of them in turn, round by round, their weights in memory, on one seeded image. A model that is
    cut by the general way has nothing to be fused.
    """
    if plain.gated is not None:
        return None
    value = torch.randn(
        (1, 3, plain.image_size, plain.image_size), generator=torch.Generator().manual_seed(_SEED)
    )
    with _threads(threads), torch.inference_mode():
        reference = _Resident(plain, weights)
        expected = reference.run(value)
        equal = [
            (candidate, resident)
            for candidate, resident in _candidates(plain, weights, weight_format, value)
            if _is_close(resident.run(value), expected)
        ]
        if not equal:
            return None
        plains, *others = _times([reference, *(resident for _, resident in equal)], value)
    ratios = [
        statistics.median(mine / floor for mine, floor in zip(own, plains, strict=True))
        for own in others
    ]
    best = min(range(len(ratios)), key=ratios.__getitem__)
    if ratios[best] > _WORTHWHILE:
        return None
    return _chosen(equal[best][0], statistics.median(plains), ratios[best], threads)


def _chosen(candidate: Candidate, plain_ms: float, ratio: float, threads: int) -> Chosen:
    optimization = Optimization(
        memory_format=candidate.memory_format,
        plain_ms=round(plain_ms, 3),
        optimized_ms=round(plain_ms * ratio, 3),
        threads=threads,
        onednn=blocked.onednn_version() if candidate.layouts else None,
    )
    return Chosen(candidate, optimization)


def _candidates(
    plain: Architecture, weights: Mapping[str, Tensor], weight_format: WeightFormat, value: Tensor
) -> Iterator[tuple[Candidate, "_Resident"]]:
    contiguous = _candidate(plain, weights, "contiguous")
    if not contiguous.architecture.fused:
        return
    resident = _Resident(contiguous.architecture, contiguous.weights)
    yield contiguous, resident
    channels_last = _candidate(plain, weights, "channels_last")
    yield channels_last, _Resident(channels_last.architecture, channels_last.weights)
    if weight_format == "safetensors" and blocked.onednn_version() is not None:
        yield _blocked(contiguous, resident.convolutions(value), torch.get_num_threads())


def _candidate(
    plain: Architecture, weights: Mapping[str, Tensor], memory_format: MemoryFormat
) -> Candidate:
    fused = catalog.architecture(
        plain.name,
        granularity=plain.granularity,
        classes=plain.classes,
        image_size=plain.image_size,
        fused=memory_format,
    )
    keys = [place.key for layer in fused.layers for place in layer.tensors]
    return Candidate(memory_format, fused, FoldedWeights(keys, fused.folded, weights))


def _blocked(
    contiguous: Candidate, convolutions: Mapping[str, Convolution], threads: int
) -> tuple[Candidate, "_Resident"]:
    weights = _BlockedWeights(contiguous.weights, convolutions, threads)
    resident = _Resident(contiguous.architecture, weights)
    candidate = Candidate("blocked", contiguous.architecture, weights, resident.layouts())
    return candidate, resident


class _BlockedWeights(Mapping[str, Tensor]):
    """The same weights, those of the convolutions laid out by oneDNN when asked for.

    threads: for how many; oneDNN lays weights out otherwise for others.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        convolutions: Mapping[str, Convolution],
        threads: int,
    ) -> None:
        self._weights = weights
        self._convolutions = convolutions
        self._threads = threads

    def __getitem__(self, key: str) -> Tensor:
        convolution = self._convolutions.get(key)
        weight = self._weights[key]
        if convolution is None:
            return weight
        with _threads(self._threads):
            return convolution.blocked(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Resident:
    """A chain with its weights in memory."""

    def __init__(self, chain: Architecture, weights: Mapping[str, Tensor]) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._layers = [self._loaded(layer.build(), weights) for layer in chain.layers]

    def _loaded(self, built: BuiltLayer, weights: Mapping[str, Tensor]) -> BuiltLayer:
        own = {}
        for place in built.layer.tensors:
            tensor = weights[place.key]
            if not tensor.is_mkldnn:
                tensor = tensor.contiguous(memory_format=place.memory_format)
            own[place.key] = tensor
        built.bind(own)
        self._tensors |= own
        return built

    def run(self, value: Tensor) -> Tensor:
        for layer in self._layers:
            value = layer.execute(value)
        return value

    def layouts(self) -> dict[str, BlockedLayout]:
        return {
            key: blocked.layout(tensor) for key, tensor in self._tensors.items() if tensor.is_mkldnn
        }

    def convolutions(self, value: Tensor) -> dict[str, Convolution]:
        """The fused ones by the key of their weight, as they are when the chain runs on `value`."""
        found: dict[str, Convolution] = {}
        hooks = [
            module.register_forward_pre_hook(_noting(f"{name}.weight", found))
            for layer in self._layers
            for name, module in layer.named_modules()
            if isinstance(module, FusedConv2d)
        ]
        self.run(value)
        for hook in hooks:
            hook.remove()
        return found


def _noting(key: str, found: dict[str, Convolution]) -> Any:
    def note(module: Any, arguments: tuple[Tensor, ...]) -> None:
        found[key] = Convolution.of(module, arguments[0])

    return note


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Never so for numbers that are not finite."""
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _times(contenders: Sequence[_Resident], value: Tensor) -> list[list[float]]:
    """Milliseconds of each, round by round."""
    times: list[list[float]] = [[] for _ in contenders]
    for round_number in range(-_WARM_UPS, _ROUNDS):
        for contender, own in zip(contenders, times, strict=True):
            start = time.monotonic_ns()
            contender.run(value)
            if round_number >= 0:
                own.append((time.monotonic_ns() - start) / 1e6)
    return times


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
