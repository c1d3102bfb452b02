"""JSON answers that are JSON always: a number that is not finite becomes null (RFC 8259 has no other)."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response


def encode(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")


class Json(Response):
    media_type = "application/json"

    def __init__(
        self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(encode(value), status_code=status, headers=headers)
