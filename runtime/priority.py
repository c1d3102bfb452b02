"""The standard `Priority` request header (RFC 9218): how urgent a request is, and the order that follows."""

from collections.abc import Sequence
from typing import Any, Final

import http_sf

HEADER: Final = "Priority"
DEFAULT_URGENCY: Final = 3
URGENCIES: Final = range(8)
"""0 is the most urgent (RFC 9218, section 4.1)."""
STEP_S: Final = 2.0
_LONGEST_FIELD: Final = 256


def urgency(fields: Sequence[str]) -> int:
    """The parameter `u` of the header's fields.

    The default stands for what is absent, malformed, of another type or out of range: RFC 9218 (section
    4) has a receiver ignore it.
    """
    joined = ", ".join(fields)
    if not joined or len(joined) > _LONGEST_FIELD:
        return DEFAULT_URGENCY
    try:
        parameters = http_sf.parse(joined.encode("latin-1"), tltype="dictionary")
    except ValueError:
        return DEFAULT_URGENCY
    member: Any = parameters.get("u") if isinstance(parameters, dict) else None
    value = member[0] if isinstance(member, tuple) else None
    return value if type(value) is int and value in URGENCIES else DEFAULT_URGENCY


def rank(arrived_s: float, urgency: int) -> float:
    """The lower, the sooner its turn: by urgency, and by arrival within one urgency.

    A request is overtaken by those alone that are more urgent and came within STEP_S for each step
    between them: after 14 seconds even the least urgent one has nobody new before it.
    """
    return arrived_s + urgency * STEP_S
