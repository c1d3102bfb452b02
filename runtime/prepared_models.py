"""What can be asked for: `/models`, the prepared models and their layers, and `/strategies`."""

from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from handler.strategies import STRATEGIES
from models.manifest import Granularity, InputSpec, WeightFormat
from models.store import PreparedModel, Store, StoreError
from runtime.answers import Json
from runtime.descriptions import MISSING, ModelName
from runtime.facts import layer_facts, model_facts
from runtime.service import service_of


class ShownModel(BaseModel):
    """The current version of a prepared model."""

    name: str
    version: str
    versions: list[str] = Field(description="Those that are kept, the current one first.")
    architecture: str
    granularity: Granularity
    format: WeightFormat
    classes: int
    side: int | None = Field(description="Side of its input in pixels; null if it takes no images.")
    layers: int
    bytes: int = Field(description="Of its weight files.")
    parameters: int
    dtype: str = Field(description="Of its parameters.")
    source: str = Field(description="Where its weights came from.")
    execution: str = Field(description="How it is executed, and how near that is to torchvision.")
    gain: str | None = Field(
        default=None, description="What optimization gained where it was prepared."
    )
    preset: str
    input: InputSpec | None = Field(description="How images are prepared; null if it takes none.")


class ShownLayer(BaseModel):
    index: int
    name: str
    file: str | None = Field(description="null for a layer without weights.")
    bytes: int
    tensors: int
    parameters: int
    sha256: str | None


class ModelInFull(ShownModel):
    contents: list[ShownLayer] = Field(description="Its layers, in the order of their execution.")
    labels: list[str] | None = Field(description="Its classes' names.")


class Damaged(BaseModel):
    name: str
    fault: str


class ShownModels(BaseModel):
    models: list[ShownModel]
    damaged: list[Damaged] = Field(description="Models that are there and cannot be opened.")
    default: str | None = Field(description="The model of requests that name none.")


class ShownStrategy(BaseModel):
    name: str
    pipelined: bool = Field(description="Whether the units run side by side.")
    initialize: bool = Field(description="Whether layers are initialized, to no use.")
    decoupled: bool = Field(description="Whether weight files are retrieved asynchronously.")


class ShownStrategies(BaseModel):
    strategies: list[ShownStrategy]
    default: str = Field(description="The strategy of requests that name none.")


router = APIRouter(tags=["models"])


@router.get("/models", response_model=ShownModels, summary="The prepared models")
async def list_models(request: Request) -> Json:
    service = service_of(request)
    store = service.store
    models = [store.open(name) for name in store.names()]
    damaged = [{"name": name, "fault": _fault(store, name)} for name in store.damaged()]
    default = service.settings.default_model or (models[0].name if len(models) == 1 else None)
    shown = [_model(model, store.versions(model.name)) for model in models]
    return Json({"models": shown, "damaged": damaged, "default": default})


@router.get(
    "/models/{model}",
    response_model=ModelInFull,
    responses=MISSING,
    summary="A prepared model with its layers and classes",
)
async def show_model(request: Request, model: ModelName) -> Json:
    service = service_of(request)
    found = service.model(model)
    shown = _model(found, service.store.versions(found.name))
    return Json({**shown, "contents": layer_facts(found), "labels": found.labels})


def _fault(store: Store, name: str) -> str:
    try:
        store.open(name)
    except StoreError as fault:
        return str(fault)
    return "it was repaired just now"


_STRATEGIES: Final = [asdict(strategy) for strategy in STRATEGIES.values()]


@router.get("/strategies", response_model=ShownStrategies, summary="How pipelines can run")
async def list_strategies(request: Request) -> Json:
    default = service_of(request).settings.strategy
    return Json({"strategies": _STRATEGIES, "default": default})


def _model(model: PreparedModel, versions: list[str]) -> dict[str, Any]:
    side = model.manifest.input.crop if model.manifest.input else None
    return {**model_facts(model), "versions": versions, "side": side}
