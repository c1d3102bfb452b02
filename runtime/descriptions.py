"""What the OpenAPI description says alike of all inference routes."""

from typing import Annotated, Any, Final

from fastapi import Header, Path, Query
from pydantic import BaseModel

from models.manifest import VERSION_PATTERN
from runtime.errors import ErrorBody
from runtime.reporting import NAMES

MULTIPART: Final = "multipart/form-data"
FIELD: Final = "file"

ModelName = Annotated[str, Path(description="A prepared model.", examples=["resnet50"])]
ModelVersion = Annotated[
    str,
    Path(
        description=f"One of the model's versions, `{VERSION_PATTERN}`.", examples=["3f9a0c1b2d4e"]
    ),
]
StrategyHeader = Annotated[
    str | None,
    Header(
        alias="Cicada-Strategy",
        description="How the pipeline runs: traditional, pisel, mini, preload or cicada.",
    ),
]
Top = Annotated[
    int, Query(ge=1, description="How many labels; more than the model has classes means all.")
]

Responses = dict[int | str, dict[str, Any]]
ERRORS: Final[Responses] = {
    status: {"model": ErrorBody} for status in (400, 404, 413, 415, 429, 500, 502, 503, 504)
}
NOT_READY: Final[Responses] = {503: {"model": ErrorBody}}
MISSING: Final[Responses] = {404: {"model": ErrorBody}, 500: {"model": ErrorBody}}
INFERENCE: Final[Responses] = {
    200: {"headers": {name: {"schema": {"type": "string"}} for name in NAMES}},
    **ERRORS,
}


def schema(model: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema in one piece: references would have to be known to the whole document."""
    whole = model.model_json_schema()
    parts = whole.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(parts[value["$ref"].rpartition("/")[2]])
        return {key: inlined(item) for key, item in value.items()}

    described: dict[str, Any] = inlined(whole)
    return described


_BYTES: Final = {"schema": {"type": "string", "format": "binary"}}
_FORM: Final = {
    "schema": {
        "type": "object",
        "properties": {FIELD: {"type": "string", "format": "binary"}},
        "required": [FIELD],
    }
}
IMAGE_CONTENT: Final = {"image/*": _BYTES, "application/octet-stream": _BYTES, MULTIPART: _FORM}
IMAGE_BODY: Final = {"requestBody": {"required": True, "content": IMAGE_CONTENT}}
