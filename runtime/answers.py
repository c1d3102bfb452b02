"""JSON answers that are JSON always: a number that is not finite becomes null (RFC 8259 has no other)."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response

MEDIA_TYPE: Final = "application/json"


def encode(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")


class Json(Response):
    media_type = MEDIA_TYPE

    def __init__(
        self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(encode(value), status_code=status, headers=headers)
