"""Admission: a request is given to a handler only when the memory that it needs is there."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from handler.strategies import STRATEGIES
from models.manifest import Manifest
from runtime import limits
from runtime.errors import Unavailable

SCRATCH: Final = 2
"""Kernels' own copies beside the activations that `Manifest.activation_bytes` counts: convolutions reorder
what goes in and what comes out. Measured; see tests/service/test_admission.py."""
PIXELS_PER_BYTE: Final = 24
"""Bytes of pixels for a byte of an encoded image, resized copies included; a photo has 10 to 20."""
FLOAT_BYTES: Final = 4
PIXEL_BYTES: Final = 8
"""Of an image as large as may be: its channels as decoded, and as converted."""
_TRUSTED_S: Final = 1.0
_PLENTY: Final = 8


@dataclass(frozen=True, slots=True)
class Need:
    """The most private memory that a request takes in its handler, in bytes.

    File pages of mapped weights are not in it: the kernel drops them when it needs the room.
    """

    activations: int
    placeholders: int
    weights: int
    input: int

    @property
    def bytes(self) -> int:
        return self.activations + self.placeholders + self.weights + self.input


NOTHING: Final = Need(0, 0, 0, 0)


def need(
    manifest: Manifest, strategy: str, described: dict[str, Any], body_bytes: int, max_pixels: int
) -> Need:
    """described: the frame's `input`; body_bytes: the size of what goes with it.

    max_pixels: that an image may have; the handler refuses larger ones by their headers.
    """
    sizes = manifest.sizes
    return Need(
        activations=SCRATCH * manifest.activation_bytes * _examples(described, manifest),
        placeholders=sizes.weights if STRATEGIES[strategy].initialize else sizes.one_bit,
        # Read files become tensors of their own, which are copied into the layers one after another.
        weights=sizes.weights + 2 * sizes.largest_layer if manifest.weight_format == "pth" else 0,
        input=body_bytes + _decoded(described, body_bytes, max_pixels),
    )


def _examples(described: dict[str, Any], manifest: Manifest) -> int:
    """How many of what `activation_bytes` counts a request has: images, or a model's example."""
    match described:
        case {"shapes": [*shapes]}:
            sizes: list[int] = [
                -(-math.prod(shape) // max(math.prod(spec.shape), 1))
                for shape, spec in zip(shapes, manifest.inputs, strict=True)
            ]
            return max([1, *sizes])
        case {"shape": [int(count), *_]}:
            return count
        case {"lengths": [*lengths]}:
            return len(lengths)
    return 1


def _decoded(described: dict[str, Any], body_bytes: int, max_pixels: int) -> int:
    """What the body becomes beside itself; a tensor stays where it is."""
    match described.get("kind"):
        case "tensor" | "tensors":
            return 0
        case "pixels":
            return FLOAT_BYTES * body_bytes
    return min(PIXELS_PER_BYTE * body_bytes, PIXEL_BYTES * max_pixels)


@dataclass(frozen=True, slots=True)
class Free:
    """Memory in bytes: `ever`, if nothing else ran; `now`, beside what runs."""

    ever: int
    now: int


@dataclass(frozen=True, slots=True)
class Held:
    """A handler's private memory in bytes."""

    at_rest: int
    now: int


def free(left: int, handlers: Sequence[Held], reserved: int) -> Free:
    """What requests may take.

    left: what the limits leave at this moment.
    reserved: the needs of the requests under way. What their handlers hold above what they held at
        rest is part of that, or is kept by the allocator for the next request: either way it is not lost.
    """
    grown = sum(max(0, handler.now - handler.at_rest) for handler in handlers)
    return Free(ever=left + grown, now=left + grown - reserved)


class Admission:
    """Keeps account of the memory that requests under way were granted.

    measure: what may be taken, given the bytes reserved; None where there is no limit.
    """

    def __init__(self, measure: Callable[[int], Free | None]) -> None:
        self._measure = measure
        self._reserved = 0
        self._plenty_until_s = 0.0
        self._plenty = 0

    @property
    def reserved(self) -> int:
        return self._reserved

    def refuse_hopeless(self, wanted: Need) -> None:
        """Raises Unavailable for a request that would not fit even if it were alone."""
        self._fits(wanted)

    def admit(self, wanted: Need) -> bool:
        """Whether the memory is there now; it is then reserved until `release`. Raises as above."""
        if not self._fits(wanted):
            return False
        self._reserved += wanted.bytes
        return True

    def release(self, granted: Need) -> None:
        self._reserved -= granted.bytes

    def _fits(self, wanted: Need) -> bool:
        if self._is_little(wanted):
            return True
        found = self._measured()
        if found is None:
            return True
        if wanted.bytes > found.ever:
            raise Unavailable(_sentence(wanted, found.ever))
        return wanted.bytes <= found.now

    def _is_little(self, wanted: Need) -> bool:
        """A small part of what was there a moment ago: measuring costs as much as a small request."""
        asked = (self._reserved + wanted.bytes) * _PLENTY
        return asked <= self._plenty and time.monotonic() < self._plenty_until_s

    def _measured(self) -> Free | None:
        found = self._measure(self._reserved)
        self._plenty_until_s = time.monotonic() + _TRUSTED_S
        self._plenty = (1 << 62) if found is None else found.ever
        return found


def measured(handlers: Sequence[Held], reserved: int) -> Free | None:
    """What the container really has; None where no limit is known."""
    left = limits.memory_left()
    return None if left is None else free(left, handlers, reserved)


def _sentence(wanted: Need, ever: int) -> str:
    return (
        f"the request needs up to {_mebibytes(wanted.bytes)} of memory "
        f"({_mebibytes(wanted.activations)} for activations, "
        f"{_mebibytes(wanted.placeholders + wanted.weights)} for weights, "
        f"{_mebibytes(wanted.input)} for its input), and {_mebibytes(ever)} can be had"
    )


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
