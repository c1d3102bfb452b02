"""The Open Inference Protocol, version 2, over HTTP with JSON tensors.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as distribution_version
from typing import Any, Final, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from models.store import PreparedModel
from runtime import bodies
from runtime.answers import Json
from runtime.descriptions import (
    INFERENCE,
    MISSING,
    NOT_READY,
    ModelName,
    ModelVersion,
    StrategyHeader,
    schema,
)
from runtime.errors import BadInput, Fault, UnsupportedMediaType, brief
from runtime.frames import Tensor
from runtime.pool import Answer
from runtime.service import service_of

router = APIRouter(prefix="/v2", tags=["open inference protocol"])

INPUT: Final = "input"
OUTPUTS: Final = ("logits", "probabilities")
BINARY_HEADER: Final = "Inference-Header-Content-Length"


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 stands for any size.")


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class RequestInput(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = Field(description="Numbers in row-major order, nested as the shape says or flat.")


class RequestOutput(BaseModel):
    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(BaseModel):
    id: str | None = None
    parameters: dict[str, Any] = {}
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = None


class ResponseOutput(BaseModel):
    name: str
    datatype: Literal["FP32"]
    shape: list[int]
    data: list[float | None] = Field(description="null stands for a number that is not finite.")


class InferenceResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[ResponseOutput]


@dataclass(frozen=True, slots=True)
class _InputTensor:
    """The input as a handler takes it: the frame's `input`, and its bytes."""

    header: dict[str, Any]
    body: bytes


@router.get("", response_model=ServerMetadata, summary="The server's name and version")
async def server_metadata() -> Json:
    version = distribution_version("cicada-serverless")
    return Json({"name": "cicada", "version": version, "extensions": []})


@router.get("/health/live", response_model=Live, summary="Whether the server answers")
async def live() -> Json:
    return Json({"live": True})


@router.get(
    "/health/ready",
    response_model=Ready,
    responses=NOT_READY,
    summary="Whether a handler is ready and a model is prepared",
)
async def ready(request: Request) -> Json:
    service_of(request).require_ready()
    return Json({"ready": True})


@router.get("/models/{model}", response_model=ModelMetadata, responses=MISSING)
async def model_metadata(request: Request, model: ModelName) -> Json:
    """A model's inputs, outputs and versions, the current version first."""
    return _metadata(request, model)


@router.get("/models/{model}/versions/{version}", response_model=ModelMetadata, responses=MISSING)
async def version_metadata(request: Request, model: ModelName, version: ModelVersion) -> Json:
    """The same, of one version."""
    return _metadata(request, model, version)


@router.get("/models/{model}/ready", response_model=ModelReady, responses={**MISSING, **NOT_READY})
async def model_ready(request: Request, model: ModelName) -> Json:
    """Whether a request for this model would be served now."""
    return _model_ready(request, model)


@router.get(
    "/models/{model}/versions/{version}/ready",
    response_model=ModelReady,
    responses={**MISSING, **NOT_READY},
)
async def version_ready(request: Request, model: ModelName, version: ModelVersion) -> Json:
    """The same, of one version."""
    return _model_ready(request, model, version)


_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": schema(InferenceRequest)}},
    }
}


@router.post(
    "/models/{model}/infer",
    response_model=InferenceResponse,
    responses=INFERENCE,
    openapi_extra=_BODY,
    summary="Tensors in, tensors out",
)
async def infer_model(
    request: Request, model: ModelName, strategy: StrategyHeader = None
) -> Response:
    return await infer(request, model, None, strategy=strategy)


@router.post(
    "/models/{model}/versions/{version}/infer",
    response_model=InferenceResponse,
    responses=INFERENCE,
    openapi_extra=_BODY,
    summary="The same, of one version",
)
async def infer_version(
    request: Request, model: ModelName, version: ModelVersion, strategy: StrategyHeader = None
) -> Response:
    return await infer(request, model, version, strategy=strategy)


async def infer(
    request: Request, name: str, version: str | None, *, strategy: str | None
) -> Response:
    """Answers an inference request of the protocol."""
    service = service_of(request)
    model = service.inference(request, name, version)
    if BINARY_HEADER in request.headers:
        raise UnsupportedMediaType("binary tensors are not supported, expected tensors in JSON")
    asked = _parse(await bodies.read(request, service.settings.max_body_bytes))
    chosen = service.strategy(strategy, asked.parameters.get("strategy"))
    tensor = _input_tensor(asked.inputs, model)
    answer = await service.infer(
        request,
        model=name,
        version=version,
        strategy=chosen,
        tensor=tensor.header,
        body=tensor.body,
        outputs=_outputs(asked.outputs),
    )
    return service.respond(request, answer, _response(asked, answer))


def _parse(body: bytes) -> InferenceRequest:
    try:
        # The protocol is JSON, which knows no NaN and no infinity (RFC 8259, section 6).
        return InferenceRequest.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the request"
        raise BadInput(f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {error}") from None


def _input_tensor(inputs: Sequence[RequestInput], model: PreparedModel) -> _InputTensor:
    names = [tensor.name for tensor in inputs]
    if names != [INPUT]:
        raise BadInput(f"inputs are {brief(names)}, expected exactly one, named {INPUT!r}")
    (tensor,) = inputs
    if tensor.datatype != "FP32":
        raise BadInput(f"input {INPUT!r} has datatype {brief(tensor.datatype)}, expected 'FP32'")
    _check_shape(tensor.shape, model)
    values = _values(tensor)
    header = {"kind": "tensor", "datatype": "FP32", "shape": tensor.shape}
    return _InputTensor(header, values.tobytes())


def _check_shape(shape: list[int], model: PreparedModel) -> None:
    side = model.manifest.input.crop
    if len(shape) != 4 or shape[0] < 1 or shape[1:] != [3, side, side]:
        expected = f"[n, 3, {side}, {side}] with n from 1"
        raise BadInput(f"input {INPUT!r} has shape {brief(shape)}, expected {expected}")


def _values(tensor: RequestInput) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The tensor's data as little-endian float32 in row-major order."""
    count = math.prod(tensor.shape)
    try:
        found = np.asarray(tensor.data)
    except (ValueError, OverflowError):
        raise BadInput(f"data of input {INPUT!r} is nested unevenly") from None
    if found.dtype.kind not in "fiu":
        raise BadInput(f"data of input {INPUT!r} holds something else than numbers")
    if found.shape not in {(count,), tuple(tensor.shape)}:
        expected = f"{count} numbers, flat or nested as the shape {tensor.shape} says"
        raise BadInput(
            f"data of input {INPUT!r} has shape {brief(list(found.shape))}, expected {expected}"
        )
    with np.errstate(over="ignore"):
        values = found.astype("<f4", order="C")
    if not np.isfinite(values).all():
        raise BadInput(f"data of input {INPUT!r} holds a number beyond the range of FP32")
    return values


def _outputs(asked: Sequence[RequestOutput] | None) -> list[str]:
    """The outputs to make, in the order asked for; by default the logits."""
    names = list(dict.fromkeys(output.name for output in asked or ()))
    unknown = [name for name in names if name not in OUTPUTS]
    if unknown:
        raise BadInput(
            f"output {brief(unknown[0])} is unknown, expected one of {', '.join(OUTPUTS)}"
        )
    return names or [OUTPUTS[0]]


def _response(asked: InferenceRequest, answer: Answer) -> dict[str, Any]:
    result = answer.result
    response: dict[str, Any] = {"model_name": result.model, "model_version": result.version}
    if asked.id is not None:
        response["id"] = asked.id
    response["outputs"] = list(_output_tensors(result.outputs, answer.body))
    return response


def _output_tensors(outputs: Sequence[Tensor], body: bytes) -> list[dict[str, Any]]:
    tensors = []
    offset = 0
    for output in outputs:
        if output.bytes != 4 * math.prod(output.shape):
            raise Fault(f"the handler's output {output.name!r} has a wrong size")
        values = np.frombuffer(body, "<f4", count=math.prod(output.shape), offset=offset)
        offset += output.bytes
        tensor = output.model_dump(include={"name", "datatype", "shape"})
        tensors.append({**tensor, "data": values.tolist()})
    return tensors


def _metadata(request: Request, name: str, version: str | None = None) -> Json:
    service = service_of(request)
    model = service.model(name, version)
    side = model.manifest.input.crop
    classes = model.manifest.classes
    return Json(
        {
            "name": name,
            "versions": service.store.versions(name) if version is None else [model.version],
            "platform": "cicada_pytorch",
            "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, 3, side, side]}],
            "outputs": [
                {"name": output, "datatype": "FP32", "shape": [-1, classes]} for output in OUTPUTS
            ],
        }
    )


def _model_ready(request: Request, name: str, version: str | None = None) -> Json:
    service = service_of(request)
    model = service.model(name, version)
    service.require_ready()
    return Json({"name": model.name, "ready": True})
