"""Which model stands for a function of the trace."""

import hashlib
from collections.abc import Sequence


def model_of(function: str, models: Sequence[str], seed: int) -> str:
    """At random by the seed, yet the same for a function in every window of the trace."""
    digest = hashlib.sha256(f"{seed} {function}".encode()).digest()
    return models[int.from_bytes(digest[:8]) % len(models)]
