"""Routes that platforms with one model per container expect, on the default model.

`/invocations` and `/ping` are Amazon SageMaker's; `/_/health` and `/_/ready` are OpenFaaS'.
"""

from typing import Any, Final

from fastapi import APIRouter, Request, Response

from runtime import bodies, open_inference, predictions
from runtime.answers import Json
from runtime.descriptions import (
    IMAGE_CONTENT,
    INFERENCE,
    NOT_READY,
    StrategyHeader,
    Top,
    schema,
)
from runtime.service import service_of

router = APIRouter(tags=["platforms"])

_CONTENT: Final[dict[str, Any]] = {
    **IMAGE_CONTENT,
    "application/json": {"schema": schema(open_inference.InferenceRequest)},
}


@router.post(
    "/invocations",
    response_model=list[predictions.Prediction] | open_inference.InferenceResponse,
    responses=INFERENCE,
    openapi_extra={"requestBody": {"required": True, "content": _CONTENT}},
    summary="The default model: an image, or with application/json an inference request",
)
async def invoke_default(
    request: Request, top: Top = 5, strategy: StrategyHeader = None
) -> Response:
    model = service_of(request).default_model()
    if bodies.media_type(request.headers) == "application/json":
        return await open_inference.infer(request, model, None, strategy=strategy)
    return await predictions.predict(request, model, top=top, strategy=strategy)


@router.get("/ping", responses=NOT_READY, summary="SageMaker's health check: 200 when ready")
@router.get("/_/ready", responses=NOT_READY, summary="OpenFaaS' readiness check")
async def ready(request: Request) -> Json:
    service_of(request).require_ready()
    return Json({"ready": True})


@router.get("/_/health", summary="OpenFaaS' liveness check")
async def healthy() -> Json:
    return Json({"live": True})
