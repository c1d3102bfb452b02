"""Image in, labels out: `/predictions/{model}`."""

import math
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from models.store import PreparedModel
from runtime import bodies
from runtime.descriptions import IMAGE_BODY, INFERENCE, ModelName, StrategyHeader, Top
from runtime.errors import BadInput, Fault
from runtime.frames import Label
from runtime.output_tensors import DEFAULT_TOP
from runtime.service import service_of

router = APIRouter(tags=["predictions"])


class Prediction(BaseModel):
    label: str
    index: int = Field(ge=0, description="The class's index.")
    probability: float | None = Field(description="null where it is not a finite number.")
    finite: Literal[False] | None = Field(
        default=None, description="There, and false, where the probability is not finite."
    )


@router.post(
    "/predictions/{model}",
    response_model=list[Prediction],
    responses=INFERENCE,
    openapi_extra=IMAGE_BODY,
    summary="An image's most probable labels, or what the model's own processing answers",
)
async def predict_image(
    request: Request, model: ModelName, top: Top = DEFAULT_TOP, strategy: StrategyHeader = None
) -> Response:
    """A model with a processing of its own takes any body, and answers what that makes."""
    return await predict(request, model, top=top, strategy=strategy)


async def predict(request: Request, name: str, *, top: int, strategy: str | None) -> Response:
    """Answers an image, raw or in a form, with its `top` labels; or as the model's own processing does."""
    service = service_of(request)
    model = service.inference(request, name)
    chosen = service.strategy(strategy)
    if service.has_processing(model):
        return await _processed(request, model, chosen)
    if model.manifest.input is None:
        raise BadInput(
            f"model {name!r} takes tensors, expected them at /v2/models/{name}/infer; "
            "a body of another kind needs a processing of the model's own"
        )
    image = await bodies.read_file(request, service.settings.max_body_bytes)
    answer = await service.infer(
        request,
        model,
        version=None,
        strategy=chosen,
        tensor={"kind": "image"},
        body=image,
        outputs=("labels",),
        top=min(top, model.manifest.classes),
    )
    (labels,) = answer.result.labels or ((),)
    return service.respond(request, answer, [_prediction(label) for label in labels])


async def _processed(request: Request, model: PreparedModel, strategy: str) -> Response:
    """Whatever the body, the user's own processing takes it and makes the answer."""
    service = service_of(request)
    body = await bodies.read(request, service.settings.max_body_bytes)
    described = {
        "kind": "own",
        "content_type": request.headers.get("Content-Type"),
        "parameters": dict(request.query_params),
    }
    answer = await service.infer(
        request,
        model,
        version=None,
        strategy=strategy,
        tensor=described,
        body=body,
        outputs=(),
    )
    value = answer.result.value
    if value is None:
        raise Fault("the handler's answer lacks the value that the model's processing made")
    described_as = {"Content-Type": value.media_type}
    return service.respond_with(request, answer, bytes(answer.body), described_as)


def _prediction(label: Label) -> dict[str, Any]:
    described = label.model_dump()
    return described if math.isfinite(label.probability) else {**described, "finite": False}
