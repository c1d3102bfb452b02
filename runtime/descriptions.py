"""What the OpenAPI description says alike of all inference routes, and of all routes."""

from typing import Annotated, Any, Final

from fastapi import Header, Path, Query
from pydantic import BaseModel, WithJsonSchema

from handler.strategies import STRATEGIES
from models.manifest import NAME_PATTERN, VERSION_PATTERN
from runtime.errors import ErrorBody

MULTIPART: Final = "multipart/form-data"
FIELD: Final = "file"

ModelName = Annotated[str, Path(description="A prepared model.", examples=["resnet50"])]
ModelVersion = Annotated[
    str,
    Path(
        description=f"One of the model's versions, `{VERSION_PATTERN}`.", examples=["3f9a0c1b2d4e"]
    ),
]
_STRATEGY: Final = {"type": "string", "enum": list(STRATEGIES)}
StrategyHeader = Annotated[
    str | None,
    WithJsonSchema(_STRATEGY),
    Header(alias="Cicada-Strategy", description="How the pipeline runs."),
]
Top = Annotated[
    int, Query(ge=1, description="How many labels; more than the model has classes means all.")
]

Responses = dict[int | str, dict[str, Any]]
Described = dict[str, Any]


def _header(description: str, **schema: Any) -> Described:
    return {"description": description, "required": True, "schema": {"type": "string", **schema}}


_DECIMAL: Final = r"-?[0-9]{1,12}\.[0-9]{1,3}"
_UNITS: Final = {"pattern": rf"^layer={_DECIMAL}, weight={_DECIMAL}, compute={_DECIMAL}$"}
_RATIO: Final = {"type": "number", "minimum": 0, "maximum": 1}
FIGURES: Final[dict[str, Described]] = {
    "Server-Timing": _header("How long each part took, in milliseconds; parts overlap."),
    "Cicada-Strategy": _header("The strategy that ran.", **_STRATEGY),
    "Cicada-Model": _header("The model that answered.", pattern=f"^{NAME_PATTERN}$"),
    "Cicada-Version": _header("The version that answered.", pattern=f"^{VERSION_PATTERN}$"),
    "Cicada-Layers": _header("Into how many layers the model is cut.", type="integer", minimum=1),
    "Cicada-Work": _header("What each unit ran, in milliseconds (RFC 9651 dictionary).", **_UNITS),
    "Cicada-Wait": _header("How long each unit's layers waited, in milliseconds.", **_UNITS),
    "Cicada-Idle": _header("How long each unit ran nothing, in milliseconds.", **_UNITS),
    "Cicada-Utilization": _header("The part of the pipeline in which useful work ran.", **_RATIO),
    "Cicada-Occupancy": _header("The same, with initialization.", **_RATIO),
    "Cicada-Placeholder": _header(
        "Bytes allocated for parameters before their weights, and for how many milliseconds.",
        pattern=rf"^bytes=[0-9]+, usage={_DECIMAL}$",
    ),
}
"""What every successful inference carries; `runtime/reporting.py` writes it."""

REQUEST_ID_HEADER: Final = _header(
    "The request's id: the caller's, if it is valid, else a new one.",
    pattern="^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$",
)
TRACE_HEADERS: Final[dict[str, Described]] = {
    "traceparent": {
        **_header("The request's span in the caller's trace, where the service traces."),
        "required": False,
    },
    "tracestate": {**_header("The caller's, where the service traces."), "required": False},
}
RETRY_AFTER: Final = _header("Seconds until it is worth asking again.", type="integer", minimum=1)


def _taken(name: str, description: str, **schema: Any) -> Described:
    header = _header(description, **schema)
    return {"name": name, "in": "header", **header, "required": False}


REQUEST_ID: Final = _taken(
    "X-Request-ID",
    "An id for the request: letters, digits, `.`, `_`, `~`, `-`, up to 128; else it gets a new one.",
)
INFERENCE_PARAMETERS: Final[list[Described]] = [
    _taken("Content-Encoding", "`gzip`, where the body is compressed; 415 for any other coding."),
    _taken("Priority", "`u=0` (first) to `u=7` (last) among those that wait (RFC 9218)."),
    _taken("traceparent", "The caller's span, where the service traces (W3C Trace Context)."),
    _taken("tracestate", "What belongs to it."),
]
"""What every inference takes beside what its route declares."""

_ERRORS: Final = {
    400: "The input cannot be used",
    404: "Unknown model, version or request",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "A media type or encoding that is not served",
    429: "The queue is full",
    500: "A fault of the service or of a weight file",
    502: "The handler died of this request",
    503: "Not ready, or shutting down",
    504: "Over the time limit",
}


def _errors(*statuses: int) -> Responses:
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}


ERRORS: Final = _errors(*_ERRORS)
BAD_INPUT: Final = _errors(400)
NOT_READY: Final = _errors(503)
MISSING: Final = _errors(404, 500)
INFERENCE: Final[Responses] = {
    200: {"headers": FIGURES},
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


_BYTES: Final = {"schema": {"type": "string", "format": "binary", "minLength": 1}}
_FORM: Final = {
    "schema": {
        "type": "object",
        "properties": {FIELD: {"type": "string", "format": "binary"}},
        "required": [FIELD],
    }
}
IMAGE_CONTENT: Final = {"image/*": _BYTES, "application/octet-stream": _BYTES, MULTIPART: _FORM}
IMAGE_BODY: Final = {"requestBody": {"required": True, "content": IMAGE_CONTENT}}
