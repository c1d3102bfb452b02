"""What a replay costs in GB-seconds, beside what the same hour costs with its models resident."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from bench.replay.driver import Memory, Outcome
from handler.strategies import STRATEGIES

GB: Final = 1e9
_FULL_PRECISION: Final = 32
"""A 1-bit placeholder stands for a 32-bit element."""


@dataclass(frozen=True, slots=True)
class Cost:
    """GB-seconds; a gigabyte is 10^9 bytes.

    served: the weights of each answered request, for as long as its pipeline ran: what the models took in
    all. That counts mapped weights, which requests at the same time share and the kernel may drop, as if
    each request had its own: at most this. resident: the weights of every model that was asked for, for the
    whole window, as if kept in memory. saved: 1 - served / resident.
    container: the integral of what the server's container held (its private memory, everything included),
    over the time of the replay; container_resident: the same time at the lowest that it held, and the
    models beside. None where the server does not tell.
    """

    served_gb_s: float
    resident_gb_s: float
    saved: float
    container_gb_s: float | None
    container_resident_gb_s: float | None
    weights_bytes: Mapping[str, int]


def cost(outcomes: Sequence[Outcome], memory: Sequence[Memory], window_s: float) -> Cost | None:
    """window_s: of the trace, as long as it would have taken without speedup. None if nothing was answered."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    weights = weights_bytes(answered)
    if not weights:
        return None
    served = sum(
        weights[outcome.model] * outcome.pipeline_ms / 1e3
        for outcome in answered
        if outcome.pipeline_ms is not None and outcome.model in weights
    )
    resident = sum(weights.values()) * window_s
    held = _integral(memory)
    return Cost(
        served_gb_s=served / GB,
        resident_gb_s=resident / GB,
        saved=1 - served / resident,
        container_gb_s=None if held is None else held / GB,
        container_resident_gb_s=None if held is None else _resident(memory, weights) / GB,
        weights_bytes=weights,
    )


def weights_bytes(answered: Iterable[Outcome]) -> dict[str, int]:
    """Each model's parameters at full precision, from what the answers say of their placeholders."""
    return {
        outcome.model: outcome.placeholder_bytes
        * (1 if STRATEGIES[outcome.strategy].initialize else _FULL_PRECISION)
        for outcome in answered
        if outcome.placeholder_bytes is not None and outcome.strategy in STRATEGIES
    }


def _integral(memory: Sequence[Memory]) -> float | None:
    """Bytes times seconds, straight lines between the samples."""
    if len(memory) < 2:
        return None
    return sum(
        (after.at_s - before.at_s) * (after.bytes + before.bytes) / 2
        for before, after in pairwise(memory)
    )


def _resident(memory: Sequence[Memory], weights: Mapping[str, int]) -> float:
    base = min(sample.bytes for sample in memory)
    return (memory[-1].at_s - memory[0].at_s) * (base + sum(weights.values()))
