"""One request: decode the input, run the pipeline, encode the result."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from handler import denormals, inputs
from handler.cancellation import Cancellation
from handler.errors import ModelFault, RequestFailed, UnknownTarget
from handler.images import MAX_PIXELS
from handler.memory import Trimmer
from handler.pipeline import Cancelled, Pipeline, Run
from handler.plan import Plan, Plans
from handler.scheduler import DurationRecords
from handler.steps import OpenFiles, steps
from handler.strategies import STRATEGIES, Strategy
from handler.timeline import Timeline, now_ns
from handler.wire import Header
from models.store import CorruptModel, PreparedModel, Store, UnknownModel

_OPENING_TRIES: Final = 5
_CANCELLED_STATUS: Final = 499
_OUT_OF_MEMORY_STATUS: Final = 503

log = logging.getLogger(__name__)

Answer = tuple[Header, bytes]


@dataclass(frozen=True, slots=True)
class Request:
    """What the proxy asks for; the fields of the `infer` frame."""

    id: str
    model: str
    version: str | None
    strategy: Strategy
    input: dict[str, Any]
    outputs: Sequence[str]
    top: int

    @classmethod
    def parse(cls, header: Header) -> "Request":
        """Raises UnknownTarget for a strategy that there is not."""
        strategy = STRATEGIES.get(header["strategy"])
        if strategy is None:
            raise UnknownTarget(
                f"there is no strategy {header['strategy']!r}: known are {', '.join(STRATEGIES)}"
            )
        return cls(
            id=header["id"],
            model=header["model"],
            version=header["version"],
            strategy=strategy,
            input=header["input"],
            outputs=header["outputs"],
            top=header["top"],
        )


class RequestHandler:
    """Answers requests one after another; between them it keeps structures and durations, no weights."""

    def __init__(self, store: Store, pipeline: Pipeline, max_pixels: int = MAX_PIXELS) -> None:
        self._store = store
        self._pipeline = pipeline
        self._plans = Plans()
        self._durations = DurationRecords()
        self._max_pixels = max_pixels
        self._trimmer = Trimmer()

    def rest(self) -> None:
        """No request has come for a while: what the last ones left free goes back to the system."""
        self._trimmer.at_rest()

    @contextmanager
    def handling(
        self, header: Header, body: bytearray, arrival_ns: int, cancellation: Cancellation
    ) -> Iterator[Answer]:
        """The request's answer, an error's included; on leaving, all that belonged to it is let go.

        Leaving comes after the answer was sent: taking the mappings down costs milliseconds.
        """
        release = _Release()
        try:
            answer = self._answer(header, body, arrival_ns, cancellation, release)
        except Cancelled:
            answer = _error(header, _CANCELLED_STATUS, "the caller has gone")
        except RequestFailed as failure:
            answer = _error(header, failure.status, str(failure))
        except UnknownModel as failure:
            answer = _error(header, UnknownTarget.status, str(failure))
        except CorruptModel as failure:
            answer = _error(header, ModelFault.status, str(failure))
        except Exception as failure:
            log.exception("a request failed", extra={"id": header.get("id")})
            answer = _error(header, *_unforeseen(failure))
        try:
            yield answer
        finally:
            release()
            self._trimmer.after_request()

    def _answer(
        self,
        header: Header,
        body: bytearray,
        arrival_ns: int,
        cancellation: Cancellation,
        release: "_Release",
    ) -> Answer:
        request = Request.parse(header)
        model, plan, files = self._open(request)
        release.files = files
        timeline = Timeline(plan.names, request.strategy.decoupled, arrival_ns)
        run = self._pipeline.begin(
            steps(model, plan, files, request.strategy),
            request.strategy,
            self._durations.of(str(model.path), plan.layer_bytes),
            timeline,
        )
        release.run = run
        cancellation.attach(run.cancel)
        try:
            with torch.inference_mode():
                start = now_ns()
                value = inputs.decode(request.input, body, model.manifest.input, self._max_pixels)
                timeline.decoded = (start, now_ns())
                with denormals.taken_as_zero():
                    logits = run.execute(value.to(plan.dtype)).float()
                return _result(request, model, logits, timeline)
        except BaseException as error:
            run.fail(error)
            raise

    def _open(self, request: Request) -> tuple[PreparedModel, Plan, OpenFiles]:
        """Resolves the model's link once and opens its files; a version may go just in between."""
        for _ in range(_OPENING_TRIES):
            model = self._store.open(request.model, request.version)
            plan = self._plans.of(model)
            try:
                return model, plan, OpenFiles(model, plan)
            except FileNotFoundError:
                continue
        raise UnknownTarget(f"model {request.model!r} was removed")


@dataclass(slots=True)
class _Release:
    """What a request leaves to be let go, as far as it came."""

    run: Run | None = None
    files: OpenFiles | None = None

    def __call__(self) -> None:
        if self.run is not None:
            self.run.leave()
        if self.files is not None:
            self.files.close()


def _result(request: Request, model: PreparedModel, logits: Tensor, timeline: Timeline) -> Answer:
    tensors: dict[str, Tensor] = {}
    if "logits" in request.outputs:
        tensors["logits"] = logits
    if "probabilities" in request.outputs or "labels" in request.outputs:
        probabilities = torch.softmax(logits, dim=1)
    if "probabilities" in request.outputs:
        tensors["probabilities"] = probabilities
    parts = {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
    header = {
        "type": "result",
        "id": request.id,
        "model": model.name,
        "version": model.version,
        "outputs": [
            {
                "name": name,
                "datatype": "FP32",
                "shape": list(tensor.shape),
                "bytes": len(parts[name]),
            }
            for name, tensor in tensors.items()
        ],
        "labels": _labels(probabilities, model, request.top)
        if "labels" in request.outputs
        else None,
        "timeline": _described(request, model, timeline),
    }
    return header, b"".join(parts.values())


def _labels(probabilities: Tensor, model: PreparedModel, top: int) -> list[list[dict[str, Any]]]:
    values, indices = probabilities.topk(min(max(top, 1), probabilities.shape[1]), dim=1)
    return [
        [
            {
                "label": model.labels[index] if model.labels else str(index),
                "index": index,
                "probability": value,
            }
            for value, index in zip(row_values, row_indices, strict=True)
        ]
        for row_values, row_indices in zip(values.tolist(), indices.tolist(), strict=True)
    ]


def _described(request: Request, model: PreparedModel, timeline: Timeline) -> dict[str, Any]:
    return {
        "strategy": request.strategy.name,
        "model": model.name,
        "version": model.version,
        "layers": list(timeline.layers),
        "arrival_ns": timeline.arrival_ns,
        "decoded_ns": list(timeline.decoded),
        "spans": [(span.layer, span.kind, span.start_ns, span.end_ns) for span in timeline.spans],
        "suspensions": [(held.layer, held.start_ns, held.end_ns) for held in timeline.suspensions],
        "placeholder_bytes": timeline.placeholder_bytes,
        "figures": asdict(timeline.figures()),
    }


def _unforeseen(failure: Exception) -> tuple[int, str]:
    if isinstance(failure, MemoryError) or "can't allocate memory" in str(failure):
        return _OUT_OF_MEMORY_STATUS, "the handler found no memory for the request"
    return RequestFailed.status, "the handler failed: a fault of the service"


def _error(header: Header, status: int, message: str) -> Answer:
    return {"type": "error", "id": header.get("id"), "status": status, "message": message}, b""
