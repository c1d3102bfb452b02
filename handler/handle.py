"""One request: decode the input, run the pipeline, encode the result."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from handler import denormals, openmp
from handler.cancellation import Cancellation
from handler.classification import ImageClassification
from handler.errors import ModelFault, RequestFailed, UnknownTarget
from handler.images import MAX_PIXELS
from handler.memory import Trimmer
from handler.pipeline import Cancelled, ForwardFailed, Pipeline, Run
from handler.plan import Plan, Plans
from handler.processing import Encoded, OwnProcessing, OwnProcessings, Processing
from handler.raw_tensors import RawTensors
from handler.scheduler import DurationRecords
from handler.steps import LayerStep, OpenFiles, forward, steps
from handler.strategies import STRATEGIES, Strategy
from handler.timeline import Timeline, now_ns
from handler.wire import Header
from models.errors import is_of_memory
from models.gates import LayerGone
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

    def __init__(
        self,
        store: Store,
        pipeline: Pipeline,
        max_pixels: int = MAX_PIXELS,
        processing: str | None = None,
    ) -> None:
        self._own = OwnProcessings(processing)
        self._store = store
        self._pipeline = pipeline
        self._plans = Plans()
        self._durations = DurationRecords()
        self._max_pixels = max_pixels
        self._trimmer = Trimmer()

    def rest(self) -> None:
        """No request has come for a while: what the last ones left free goes back to the system."""
        self._trimmer.at_rest()

    def expect(self, default_model: str | None) -> None:
        """Ahead of the requests for the default model, or the only one: its structure, and the user's code for it.

        transformers alone takes seconds to import, which the first request would pay. What fails here is
        told in the log, and answered to the requests that need it.
        """
        names = self._store.names() if default_model is None else [default_model]
        if len(names) != 1:
            return
        try:
            model = self._store.open(names[0])
            self._plans.of(model).build_ahead()
            if self._own.has(model):
                self._own.of(model)
        except UnknownModel:
            return  # it may yet be prepared
        except (RequestFailed, CorruptModel) as failure:
            log.warning("the default model cannot be served: %s", failure)
        except (Exception, SystemExit):
            log.exception("the default model %s cannot be served", names[0])

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
        release.plan, release.files = plan, files
        timeline = Timeline(plan.names, request.strategy.decoupled, arrival_ns)
        durations = self._durations.of(str(model.path), plan.layer_bytes)
        kind = str(request.input.get("kind"))

        def begin() -> Run:
            layers = release.layers = steps(plan, files, request.strategy)
            run = release.run = self._pipeline.begin(
                layers, request.strategy, durations, timeline, forward(model, plan, layers)
            )
            cancellation.attach(run.cancel)
            return run

        def decode() -> tuple[Processing, Any]:
            processing = self._processing(request, model, plan)
            start = now_ns()
            value = processing.decode(request.input, body)
            end = now_ns()
            timeline.decoded = (start, end)
            durations.decoding_ns[kind] = end - start
            return processing, value

        with torch.inference_mode():
            if durations.decodes_first(kind):
                (processing, value), run = decode(), begin()
            else:
                run, (processing, value) = begin(), decode()
            is_ours = _is_ours(model, processing)
            with denormals.taken_as_zero(), openmp.of_thread.placement.apart(held=is_ours):
                outputs = _executed(run, model, processing, value)
            del value
            return _result(request, model, processing.encode(outputs), timeline)

    def _processing(self, request: Request, model: PreparedModel, plan: Plan) -> Processing:
        spec = model.manifest.input
        if request.input.get("kind") == "own":
            return self._own.of(model)
        if spec is None:
            return RawTensors(model.manifest.inputs)
        return ImageClassification(
            model, spec, plan.dtype, request.outputs, request.top, self._max_pixels
        )

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
    """What a request leaves to be let go, as far as it came, and what the next one will want in its place."""

    plan: Plan | None = None
    run: Run | None = None
    files: OpenFiles | None = None
    layers: Sequence[LayerStep] = ()

    def __call__(self) -> None:
        if self.run is not None:
            self.run.leave()
        for layer in self.layers:
            layer.release()
        if self.files is not None:
            self.files.close()
        if self.plan is not None:
            with suppress(Exception):  # the next request comes upon it itself, and tells
                self.plan.build_ahead()
                self.plan.place_ahead()


def _executed(run: Run, model: PreparedModel, processing: Processing, value: Any) -> Any:
    """The outputs; what a forward raises is the fault of the user's model or processing, and is said to be."""
    is_own = model.manifest.factory is not None
    watched = openmp.watched(f"the forward of model {model.name!r}") if is_own else nullcontext()
    try:
        with watched:
            return run.execute(value)
    except ForwardFailed as failure:
        if _is_ours(model, processing) or _has_its_own_answer(failure.error):
            raise failure.error from None
        log.exception("the forward of %s failed", model.name)
        given = (
            f" on what {processing.name} gave it" if isinstance(processing, OwnProcessing) else ""
        )
        raise ModelFault(
            f"model {model.name!r}: its forward failed{given}: {failure}"
        ) from failure.error


def _is_ours(model: PreparedModel, processing: Processing) -> bool:
    """Whether no code of the user's runs in the forward."""
    return model.manifest.factory is None and not isinstance(processing, OwnProcessing)


def _has_its_own_answer(error: BaseException) -> bool:
    return isinstance(error, RequestFailed | LayerGone) or is_of_memory(error)


def _result(request: Request, model: PreparedModel, encoded: Encoded, timeline: Timeline) -> Answer:
    header: Header = {
        "type": "result",
        "id": request.id,
        "model": model.name,
        "version": model.version,
        "outputs": [],
        "labels": None,
        "timeline": _described(request, model, timeline),
    }
    return header | encoded.fields, encoded.body


def _described(request: Request, model: PreparedModel, timeline: Timeline) -> dict[str, Any]:
    return {
        "strategy": request.strategy.name,
        "model": model.name,
        "version": model.version,
        "layers": list(timeline.layers),
        "arrival_ns": timeline.arrival_ns,
        "decoded_ns": list(timeline.decoded),
        "spans": list(timeline.spans),
        "suspensions": list(timeline.suspensions),
        "placeholder_bytes": timeline.placeholder_bytes,
        "figures": asdict(timeline.figures()),
    }


def _unforeseen(failure: Exception) -> tuple[int, str]:
    if is_of_memory(failure):
        return _OUT_OF_MEMORY_STATUS, "the handler found no memory for the request"
    return RequestFailed.status, "the handler failed: a fault of the service"


def _error(header: Header, status: int, message: str) -> Answer:
    return {"type": "error", "id": header.get("id"), "status": status, "message": message}, b""
