"""The Open Inference Protocol, version 2, over HTTP: tensors as JSON or as binary data.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as distribution_version
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Request, Response
from pydantic import ValidationError
from pydantic_core import from_json

from models.manifest import DATATYPES, Manifest, TensorSpec
from models.store import PreparedModel, StoreError
from runtime import binary_tensors, bodies, input_tensors, output_tensors, own_tensors
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
from runtime.errors import BadInput, BodyTooLarge
from runtime.input_tensors import HandlerInput
from runtime.output_tensors import Wanted
from runtime.pool import Answer
from runtime.protocol import (
    EXTENSIONS,
    INPUT,
    LABELS,
    OUTPUTS,
    InferenceRequest,
    InferenceResponse,
    Live,
    ModelMetadata,
    ModelReady,
    Ready,
    ServerMetadata,
)
from runtime.service import Service, service_of

router = APIRouter(prefix="/v2", tags=["open inference protocol"])

MAX_JSON_BYTES: Final = 8 << 20
"""An image's numbers are 3 MB. Parsing holds the event loop, 10 ms for each MB, and takes 20 times as much
memory; binary data cost neither."""

HeaderLength = Annotated[
    str | None,
    Header(
        alias=binary_tensors.HEADER,
        description="Bytes of the JSON object, where binary data follow it; 0 where there is none.",
        examples=["161"],
    ),
]


@router.get("", response_model=ServerMetadata, summary="The server's name and version")
async def server_metadata() -> Json:
    version = distribution_version("cicada-serverless")
    return Json({"name": "cicada", "version": version, "extensions": EXTENSIONS})


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


_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_PIXEL: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
_EXAMPLE: Final = {
    "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [1], "data": [_PIXEL]}],
    "outputs": [{"name": LABELS, "parameters": {"top": 3}}],
}
REQUEST_CONTENT: Final[dict[str, Any]] = {
    "application/json": {"schema": schema(InferenceRequest), "example": _EXAMPLE},
    binary_tensors.MEDIA_TYPE: _BINARY,
}
_BODY: Final = {"requestBody": {"required": True, "content": REQUEST_CONTENT}}
RESPONSES: Final = {
    **INFERENCE,
    200: {
        "headers": {
            **INFERENCE[200]["headers"],
            binary_tensors.HEADER: {
                "description": "Bytes of the JSON object, where binary data follow it.",
                "schema": {"type": "string"},
            },
        },
        "content": {binary_tensors.MEDIA_TYPE: _BINARY},
    },
}


@router.post(
    "/models/{model}/infer",
    response_model=InferenceResponse,
    responses=RESPONSES,
    openapi_extra=_BODY,
    summary="Tensors or images in, tensors out",
)
async def infer_model(
    request: Request,
    model: ModelName,
    strategy: StrategyHeader = None,
    header_length: HeaderLength = None,
) -> Response:
    return await infer(request, model, None, strategy=strategy, header_length=header_length)


@router.post(
    "/models/{model}/versions/{version}/infer",
    response_model=InferenceResponse,
    responses=RESPONSES,
    openapi_extra=_BODY,
    summary="The same, of one version",
)
async def infer_version(
    request: Request,
    model: ModelName,
    version: ModelVersion,
    strategy: StrategyHeader = None,
    header_length: HeaderLength = None,
) -> Response:
    return await infer(request, model, version, strategy=strategy, header_length=header_length)


async def infer(
    request: Request,
    name: str,
    version: str | None,
    *,
    strategy: str | None,
    header_length: str | None,
) -> Response:
    """Answers an inference request of the protocol."""
    service = service_of(request)
    model = service.inference(request, name, version)
    limit = service.settings.max_body_bytes
    body = await bodies.read(request, limit)
    async with service.turn():
        asked = _decode(body, header_length, model, limit)
    del body
    answer = await service.infer(
        request,
        model,
        version=version,
        strategy=service.strategy(strategy, asked.strategy),
        tensor=asked.input.header,
        body=asked.input.body,
        outputs=[output.name for output in asked.outputs],
        top=max((output.top for output in asked.outputs), default=1),
    )
    response, binary = _response(service, asked, answer)
    return service.respond(request, answer, response, binary)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is kept of a request while it waits: of one in JSON neither its text nor its numbers."""

    id: str | None
    strategy: object
    input: HandlerInput
    outputs: Sequence[Wanted]
    classifier: bool


def _decode(body: bytes, header_length: str | None, model: PreparedModel, limit: int) -> _Asked:
    """Binary data are not copied."""
    manifest = model.manifest
    spec = manifest.input
    binary: memoryview | None = None
    if header_length is None:
        asked = _parse(body)
    else:
        length = binary_tensors.header_length(header_length, len(body))
        asked = _parse(body[:length]) if length else _raw(body, manifest)
        binary = memoryview(body)[length:]
    return _Asked(
        id=asked.id,
        strategy=asked.parameters.get("strategy"),
        input=own_tensors.decode(asked, binary, manifest.inputs)
        if spec is None
        else input_tensors.decode(asked, binary, spec, limit),
        outputs=own_tensors.wanted(asked, manifest.outputs)
        if spec is None
        else output_tensors.wanted(asked, manifest.classes),
        classifier=spec is not None,
    )


def _raw(body: bytes, manifest: Manifest) -> InferenceRequest:
    if manifest.input is None:
        return own_tensors.raw(body, manifest.inputs)
    return input_tensors.raw(body, manifest.input)


def _parse(body: bytes) -> InferenceRequest:
    if len(body) > MAX_JSON_BYTES:
        raise BodyTooLarge(
            f"{len(body)} bytes of JSON are over the limit of {MAX_JSON_BYTES}: send tensors as binary data"
        )
    try:
        # The protocol is JSON, which knows no NaN and no infinity (RFC 8259, section 6).
        return InferenceRequest.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the request"
        raise BadInput(f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {error}") from None


def _response(
    service: Service, asked: _Asked, answer: Answer
) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    """The JSON object, and the binary data behind it."""
    named = any(output.classification for output in asked.outputs)
    labels = _class_names(service, answer) if named else None
    outputs = (
        output_tensors.encode(asked.outputs, answer, labels)
        if asked.classifier
        else own_tensors.encode(asked.outputs, answer)
    )
    result = answer.result
    response: dict[str, Any] = {"model_name": result.model, "model_version": result.version}
    if asked.id is not None:
        response["id"] = asked.id
    response["outputs"] = [output.described for output in outputs]
    return response, [output.binary for output in outputs if output.binary is not None]


def _class_names(service: Service, answer: Answer) -> Sequence[str] | None:
    """Those of the version that answered, which may have been removed since."""
    try:
        return service.store.open(answer.result.model, answer.result.version).labels
    except StoreError:
        return None


def _metadata(request: Request, name: str, version: str | None = None) -> Json:
    service = service_of(request)
    model = service.model(name, version)
    manifest = model.manifest
    return Json(
        {
            "name": name,
            "versions": service.store.versions(name) if version is None else [model.version],
            "platform": f"pytorch_{manifest.weight_format}",
            "inputs": _inputs(manifest),
            "outputs": _outputs(manifest),
        }
    )


def _inputs(manifest: Manifest) -> list[dict[str, Any]]:
    if manifest.input is None:
        return [_described(spec) for spec in manifest.inputs]
    side = manifest.input.crop
    return [{"name": INPUT, "datatype": "FP32", "shape": [-1, 3, side, side]}]


def _outputs(manifest: Manifest) -> list[dict[str, Any]]:
    if manifest.input is None:
        return [_described(spec) for spec in manifest.outputs]
    return [
        {"name": LABELS, "datatype": "BYTES", "shape": [-1, -1]}
        if output == LABELS
        else {"name": output, "datatype": "FP32", "shape": [-1, manifest.classes]}
        for output in OUTPUTS
    ]


def _described(spec: TensorSpec) -> dict[str, Any]:
    """Sizes are the forward's business: of its example only their number is known to hold."""
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": [-1] * len(spec.shape)}


def _model_ready(request: Request, name: str, version: str | None = None) -> Json:
    service = service_of(request)
    model = service.model(name, version)
    service.require_ready()
    service.require_sound(model)
    return Json({"name": model.name, "ready": True})
