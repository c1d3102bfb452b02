"""Routes that platforms with one model per container expect, on the default model.

`/invocations` and `/ping` are Amazon SageMaker's; `/_/health` and `/_/ready` are OpenFaaS'.
"""

from typing import Final

from fastapi import APIRouter, Request, Response

from runtime import answers, bodies, open_inference, predictions
from runtime.answers import Json
from runtime.descriptions import (
    IMAGE_CONTENT,
    NOT_READY,
    StrategyHeader,
    Top,
)
from runtime.output_tensors import DEFAULT_TOP
from runtime.protocol import InferenceResponse, Live, Ready
from runtime.service import service_of

router = APIRouter(tags=["platforms"])

_CONTENT: Final = {**IMAGE_CONTENT, **open_inference.REQUEST_CONTENT}


@router.post(
    "/invocations",
    response_model=list[predictions.Prediction] | InferenceResponse,
    responses=open_inference.RESPONSES,
    openapi_extra={"requestBody": {"required": True, "content": _CONTENT}},
    summary="The default model: an image, or an inference request in JSON or with binary data",
)
async def invoke_default(
    request: Request,
    top: Top = DEFAULT_TOP,
    strategy: StrategyHeader = None,
    header_length: open_inference.HeaderLength = None,
) -> Response:
    """An inference request is told by Inference-Header-Content-Length, or by application/json unless the
    model has a processing of its own."""
    service = service_of(request)
    model = service.default_model()
    is_json = bodies.media_type(request.headers) == answers.MEDIA_TYPE
    if header_length is not None or (is_json and not service.has_processing(service.model(model))):
        return await open_inference.infer(
            request, model, None, strategy=strategy, header_length=header_length
        )
    return await predictions.predict(request, model, top=top, strategy=strategy)


@router.get(
    "/ping",
    response_model=Ready,
    responses=NOT_READY,
    summary="SageMaker's health check: 200 when ready",
)
@router.get(
    "/_/ready", response_model=Ready, responses=NOT_READY, summary="OpenFaaS' readiness check"
)
async def ready(request: Request) -> Json:
    service_of(request).require_ready()
    return Json({"ready": True})


@router.get("/_/health", response_model=Live, summary="OpenFaaS' liveness check")
async def healthy() -> Json:
    return Json({"live": True})
