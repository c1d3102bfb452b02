"""What all inference routes share: the model, the strategy, a handler's answer, and the record of it all."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request, Response

from handler.strategies import STRATEGIES
from handler.wire import Body
from models.store import CorruptModel, PreparedModel, Store, StoreError, UnknownModel
from runtime import admission, binary_tensors, limits, priority, reporting
from runtime.errors import BadInput, CallerLeft, Fault, NotFound, Unavailable, brief
from runtime.events import Feed
from runtime.frames import Result
from runtime.history import STEP_S, History, Use
from runtime.limits import Limits
from runtime.metrics import Metrics
from runtime.pool import Answer, Job, Pool
from runtime.requests import Record, Records
from runtime.settings import Settings
from runtime.uploads import Uploads
from runtime.verification import Verification

_T = TypeVar("_T")


class Service:
    def __init__(
        self,
        settings: Settings,
        store: Store,
        pool: Pool,
        metrics: Metrics,
        uploads: Uploads,
        feed: Feed,
        has: Limits,
    ) -> None:
        self.settings = settings
        self.uploads = uploads
        self.store = store
        self.pool = pool
        self.metrics = metrics
        self.feed = feed
        self.has = has
        self.records = Records()
        self.history = History()
        self._started_s = time.monotonic()
        self._sampling: asyncio.Task[None] | None = None
        self._turns = asyncio.Lock()
        self._verification = Verification(settings.weights) if settings.verify else None
        self._verifying: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Returns at once."""
        self.pool.start()
        self._sampling = asyncio.create_task(self._sample())
        if self._verification is not None:
            self._verifying = asyncio.create_task(self._verification.run())

    async def close(self) -> None:
        self.feed.close()
        for task in (self._verifying, self._sampling):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self.pool.close()

    def drain(self, limit_s: float) -> None:
        """Takes nothing new, and lets those go who only listen; see `Pool.drain`."""
        self.feed.close()
        self.pool.drain(limit_s)

    @property
    def up_s(self) -> float:
        return time.monotonic() - self._started_s

    def sample(self) -> None:
        """Notes what is in use at this moment."""
        use = Use(self.pool.waiting, self.pool.running, limits.memory_used())
        self.history.sample(use)

    def why_not_ready(self) -> str | None:
        """None when a request would be served now; otherwise one sentence."""
        verifying = self._verification.why_not_ready() if self._verification else None
        return self.pool.why_not_ready() or verifying or self._why_no_model()

    def require_ready(self) -> None:
        reason = self.why_not_ready()
        if reason is not None:
            raise Unavailable(reason)

    def require_sound(self, model: PreparedModel) -> None:
        """Raises Unavailable or Fault where models are verified first and this one is not, or is damaged."""
        if self._verification is not None:
            self._verification.require_sound(model)

    def inference(self, request: Request, name: str, version: str | None = None) -> PreparedModel:
        """The model that an inference request names, noted in its record; raises as `model` does."""
        record: Record = request.state.record
        record.inference = True
        model = self.model(name, version)
        record.model = model.name
        record.version = model.version
        self.require_sound(model)
        return model

    def model(self, name: str, version: str | None = None) -> PreparedModel:
        """Raises NotFound, or Fault for a model whose manifest is damaged."""
        try:
            return self.store.open(name, version)
        except UnknownModel:
            raise NotFound(self._unknown(name, version)) from None
        except CorruptModel as error:
            raise Fault(str(error)) from error

    def has_processing(self, model: PreparedModel) -> bool:
        """Whether the user's own processing takes the model's requests."""
        return bool(model.manifest.processing or self.settings.processing)

    def default_model(self) -> str:
        """The model of the routes that name none; raises NotFound."""
        if self.settings.default_model is not None:
            return self.settings.default_model
        names = self.store.names()
        if len(names) != 1:
            raise NotFound(f"CICADA_DEFAULT_MODEL is not set and {_prepared(names)}")
        return names[0]

    def strategy(self, header: str | None, parameter: object = None) -> str:
        """The header's, else the v2 parameter's, else the setting's; raises BadInput."""
        named = parameter if header is None else header
        if named is None:
            return self.settings.strategy
        if not isinstance(named, str) or named not in STRATEGIES:
            raise BadInput(
                f"strategy {brief(named)} is unknown, expected one of {', '.join(STRATEGIES)}"
            )
        return named

    async def infer(
        self,
        request: Request,
        model: PreparedModel,
        *,
        version: str | None,
        strategy: str,
        tensor: dict[str, Any],
        body: Body,
        outputs: Sequence[str],
        top: int = 1,
    ) -> Answer:
        """Hands the request to a handler; raises ServiceError, CallerLeft if nobody waits any more.

        model: as `inference` gave it; version: as the caller named it, so that the handler resolves a model's
        link itself, once.
        tensor, body: the frame's `input`, and its bytes.
        """
        record: Record = request.state.record
        header = {
            "id": record.id,
            "model": model.name,
            "version": version,
            "strategy": strategy,
            "input": tensor,
            "outputs": list(outputs),
            "top": top,
        }
        record.strategy = strategy
        job = Job(
            header,
            body,
            urgency=priority.urgency(request.headers.getlist(priority.HEADER)),
            need=admission.need(
                model.manifest,
                strategy,
                tensor,
                memoryview(body).nbytes,
                self.settings.max_pixels,
            ),
        )
        try:
            answer = await _unless_left(request, self.pool.infer(job))
        finally:
            record.dispatched_ns = job.dispatched_ns
        record.timeline = answer.result.timeline
        record.version = answer.result.version
        record.retrieved_bytes = self._retrieved_bytes(model, answer.result)
        return answer

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """For what keeps the event loop busy, as 15 ms for a JSON tensor: one such in a turn of the loop.

        Health is answered in between, however many bodies arrive at once.
        """
        async with self._turns:
            await asyncio.sleep(0)
            yield

    def finish(self, record: Record) -> None:
        """Keeps and counts what concerned a model."""
        if record.inference:
            self.records.add(record)
            self.metrics.observe(record)
            self.history.observe(record)
            self.feed.request_ended(record)

    def respond(
        self, request: Request, answer: Answer, value: Any, binary: Sequence[Body] = ()
    ) -> Response:
        """The answer with the headers that say where its time went; encoded first, as `total` ends there.

        binary: data that follow the JSON value (`runtime/binary_tensors.py`).
        """
        content, described = binary_tensors.content(value, binary)
        return self.respond_with(request, answer, content, described)

    def respond_with(
        self, request: Request, answer: Answer, content: bytes, described: Mapping[str, str]
    ) -> Response:
        """The same with a body that is encoded, and the headers that describe it."""
        record: Record = request.state.record
        record.answered_ns = time.monotonic_ns()
        headers = reporting.headers(answer.result.timeline, record.proxy_times())
        return Response(content, headers={**described, **headers})

    async def _sample(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(STEP_S)

    def _retrieved_bytes(self, model: PreparedModel, result: Result) -> int:
        """The sizes of the weight files that were retrieved; of a version removed meanwhile nobody knows them.

        model: what was asked for, which may have another version since.
        """
        try:
            if result.version != model.version:
                model = self.store.open(result.model, result.version)
        except StoreError:
            return 0
        retrieved = {span.layer for span in result.timeline.spans if span.kind == "retrieve"}
        return sum(layer.bytes for layer in model.manifest.layers if layer.index in retrieved)

    def _why_no_model(self) -> str | None:
        if self.store.names():
            return None
        if damaged := self.store.damaged():
            return f"no prepared model can be opened: {', '.join(damaged)} must be prepared anew"
        return "no model is prepared; `cicada prepare` does that"

    def _unknown(self, name: str, version: str | None) -> str:
        try:
            versions = self.store.versions(name)
        except UnknownModel:
            return f"model {brief(name)} is not prepared; {_prepared(self.store.names())}"
        return f"model {brief(name)} has no version {brief(version)}, it has {', '.join(versions)}"


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _prepared(names: Sequence[str]) -> str:
    return f"prepared are {', '.join(names)}" if names else "no model is prepared"


async def _unless_left(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled if the caller closes the connection first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_caller_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerLeft("the caller closed the connection")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _caller_left(request: Request) -> None:
    """Returns when the connection is closed; the request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
