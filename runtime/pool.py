"""The pool: handler processes that are kept alive, and the requests that wait for one."""

import asyncio
import bisect
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from handler import wire
from runtime import admission, frames, priority
from runtime.admission import NOTHING, Admission, Free, Held, Need
from runtime.errors import (
    Fault,
    HandlerDied,
    OverTime,
    QueueFull,
    ServiceError,
    Unavailable,
    from_handler,
)
from runtime.handler_process import (
    EXIT_GRACE_S,
    End,
    Exchanged,
    HandlerEndedError,
    HandlerProcess,
)
from runtime.limits import OutOfMemoryKills

logger = logging.getLogger("cicada.pool")

START_LIMIT_S: Final = 120.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
ENDS_KEPT: Final = 16

State = Literal["starting", "idle", "working", "ended"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler made of a request: its result frame, and the tensors' bytes."""

    result: frames.Result
    body: bytes


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way: `header` is the `infer` frame's, without the time it is handed over.

    urgency: 0 (first) to 7, as in `runtime/priority.py`.
    need: the memory that it takes.
    `answer` is set by the pool; that it is cancelled means that the caller has gone.
    """

    header: wire.Header
    body: wire.Body
    urgency: int = priority.DEFAULT_URGENCY
    need: Need = NOTHING
    arrived_s: float = field(default_factory=time.monotonic)
    dispatched_ns: int | None = None
    answer: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def rank(self) -> float:
        return priority.rank(self.arrived_s, self.urgency)

    def settle(self, frame: frames.Result | frames.Refusal, body: bytes) -> None:
        if isinstance(frame, frames.Refusal):
            self.fail(from_handler(frame.status, frame.message))
        elif not self.answer.done():
            self.answer.set_result(Answer(frame, body))

    def fail(self, error: ServiceError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Line:
    """The jobs that wait, the next one first."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    @property
    def first(self) -> Job:
        return self._jobs[0]

    def join(self, job: Job) -> None:
        bisect.insort(self._jobs, job, key=lambda waiting: waiting.rank)

    def leave(self, job: Job) -> None:
        with contextlib.suppress(ValueError):  # it has its turn already
            self._jobs.remove(job)


@dataclass(slots=True)
class Place:
    """One place in the pool: its handler process, what that does, since when, and for which request."""

    state: State = "starting"
    since_s: float = field(default_factory=time.monotonic)
    pid: int | None = None
    request: str | None = None
    done: int = 0

    def turn(self, state: State, request: str | None = None) -> None:
        self.state, self.request, self.since_s = state, request, time.monotonic()

    def begin(self) -> None:
        """The next process has the place."""
        self.pid, self.done = None, 0
        self.turn("starting")

    def end(self) -> None:
        self.pid = None
        self.turn("ended")


class Pool:
    """Keeps `handlers` processes of `command` alive and gives each one job at a time.

    A process that dies, overruns or talks nonsense fails its own job only and is replaced at once. One
    that ends before it has served anything is retried with growing pauses.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        handlers: int,
        queue: int,
        timeout_s: float,
        cancel_s: float = 5.0,
        on_ready: Callable[[int], None] = lambda _pid: None,
        on_end: Callable[[End], None] = lambda _end: None,
        free: Callable[[Sequence[Held], int], Free | None] = admission.measured,
    ) -> None:
        self._command = command
        self._size = handlers
        self._timeout_s = timeout_s
        self._cancel_s = cancel_s
        self._on_ready = on_ready
        self._on_end = on_end
        self._queue = queue
        self._line = Line()
        self._jobs: set[Job] = set()
        self._ready: set[HandlerProcess] = set()
        self._idle: dict[HandlerProcess, asyncio.Future[Job]] = {}
        self._kills = OutOfMemoryKills()
        self._admission = Admission(lambda reserved: free(self._held(), reserved))
        self._keepers: list[asyncio.Task[None]] = []
        self._problem: str | None = None
        self._draining = False
        self.places: list[Place] = []
        self.ended: deque[tuple[datetime, End]] = deque(maxlen=ENDS_KEPT)

    @property
    def ready(self) -> int:
        """Handlers that can take a request, or are at one."""
        return len(self._ready)

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def running(self) -> int:
        return len(self._ready) - len(self._idle)

    @property
    def reserved_bytes(self) -> int:
        """Memory that the requests under way were granted."""
        return self._admission.reserved

    @property
    def pids(self) -> list[int]:
        return [handler.pid for handler in self._ready]

    def why_not_ready(self) -> str | None:
        """None when a request would be served now; otherwise one sentence."""
        if self._draining:
            return "the service is shutting down"
        if self._ready:
            return None
        if self._problem is not None:
            return f"no handler is ready: the last one {self._problem}"
        return "no handler is ready yet"

    def start(self) -> None:
        """Returns at once; handlers become ready by and by."""
        self.places = [Place() for _ in range(self._size)]
        self._keepers = [asyncio.create_task(self._keep(place)) for place in self.places]

    async def infer(self, job: Job) -> Answer:
        """Waits for a handler and for its answer; raises ServiceError. Cancelled: the caller has gone."""
        self._admit(job)
        overdue = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, job)
        try:
            return await job.answer
        finally:
            overdue.cancel()
            self._line.leave(job)
            self._jobs.discard(job)
            self._match()  # it may have waited for memory that those behind it do not need

    def refuse_new(self) -> None:
        """The service is not ready any more; what was taken is still answered."""
        self._draining = True

    def drain(self, limit_s: float) -> None:
        """Takes nothing new; what is not answered within `limit_s` is refused then."""
        self.refuse_new()
        asyncio.get_running_loop().call_later(limit_s, self._refuse_all)

    async def close(self) -> None:
        """Ends every handler; whatever is still unanswered is refused."""
        self._draining = True
        self._refuse_all()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def _admit(self, job: Job) -> None:
        if self._draining:
            raise Unavailable("the service is shutting down")
        self._admission.refuse_hopeless(job.need)
        self._line.join(job)
        self._match()
        if job in self._line and len(self._line) > self._queue:
            self._line.leave(job)
            raise QueueFull(
                f"{len(self._line)} requests are waiting, the most that CICADA_QUEUE allows"
            )
        self._jobs.add(job)

    def _match(self) -> None:
        """Gives idle handlers the next jobs, in the line's order, as far as there is memory for them."""
        while self._idle and len(self._line):
            job = self._line.first
            try:
                if not self._admission.admit(job.need):
                    return  # until a request under way has ended
            except Unavailable as hopeless:
                self._line.leave(job)
                job.fail(hopeless)
                continue
            self._line.leave(job)
            _, offer = self._idle.popitem()
            offer.set_result(job)

    def _release(self, job: Job) -> None:
        self._admission.release(job.need)
        self._match()

    def _held(self) -> list[Held]:
        return [handler.held() for handler in self._ready]

    def _refuse_all(self) -> None:
        for job in self._jobs:
            job.fail(Unavailable("the service is shutting down"))

    def _give_up(self, job: Job) -> None:
        """The time limit has passed; a handler at work has a limit of its own, counted from its start."""
        if job not in self._line:
            return
        reason = self.why_not_ready()
        if reason is not None:
            job.fail(Unavailable(reason))
        elif self._idle:
            job.fail(Unavailable(f"no memory became free for it within {self._timeout_s:g} s"))
        else:
            job.fail(OverTime(f"no handler became free within {self._timeout_s:g} s"))

    async def _keep(self, place: Place) -> None:
        """A handler process in its place, and the next one whenever it ends."""
        fruitless = 0
        while True:
            place.begin()
            try:
                served, end = await self._live(place)
            except Exception:  # the loop's boundary: a fault here must not cost the pool a place
                logger.exception("a fault while keeping a handler")
                served, end = False, End("fault", "was given up after a fault of the proxy")
            fields = {"pid": end.pid, "cause": end.cause, "sentence": end.sentence}
            logger.warning("handler ended", extra=fields)
            place.end()
            self.ended.append((datetime.now(UTC), end))
            self._on_end(end)
            fruitless = 0 if served else fruitless + 1
            await asyncio.sleep(_pause(fruitless))

    async def _live(self, place: Place) -> tuple[bool, End]:
        """One handler process from start to end: whether it had been given a job, and why it ended."""
        served = False
        try:
            handler = await HandlerProcess.start(self._command, self._kills)
        except HandlerEndedError as ended:
            self._problem = ended.end.sentence
            return served, ended.end
        place.pid = handler.pid
        try:
            await self._welcome(handler)
            while True:
                place.turn("idle")
                job = await self._next_job(handler)
                served = True
                place.turn("working", job.header["id"])
                try:
                    await self._run(handler, job)
                finally:
                    place.done += 1
                    self._release(job)
        except HandlerEndedError as ended:
            self._problem = ended.end.sentence
            return served, ended.end
        finally:
            self._ready.discard(handler)
            await handler.close(EXIT_GRACE_S)

    async def _welcome(self, handler: HandlerProcess) -> None:
        started_ns = time.monotonic_ns()
        ready = await handler.ready(START_LIMIT_S)
        self._ready.add(handler)
        self._problem = None
        start_ms = (time.monotonic_ns() - started_ns) / 1e6
        fields = {"pid": handler.pid, "threads": ready.threads, "torch": ready.torch}
        logger.info("handler ready", extra={**fields, "start_ms": round(start_ms, 1)})
        self._on_ready(handler.pid)

    async def _next_job(self, handler: HandlerProcess) -> Job:
        """Waits for a job; raises HandlerEndedError if the handler ends meanwhile."""
        offer: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._idle[handler] = offer
        self._match()
        try:
            waited: set[asyncio.Future[Any]] = {offer, handler.incoming}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if handler.incoming.done():
                raise await handler.unexpected()
            return offer.result()
        except BaseException:
            self._idle.pop(handler, None)
            if offer.done():  # it goes to the next handler, before all that came later
                self._line.join(offer.result())
                self._release(offer.result())
            raise

    async def _run(self, handler: HandlerProcess, job: Job) -> None:
        """Gives the job its answer or its error; raises HandlerEndedError if the handler is lost."""
        if job.answer.done():
            return
        job.dispatched_ns = time.monotonic_ns()
        header = {**job.header, "type": "infer", "received_ns": job.dispatched_ns}
        exchange = asyncio.create_task(handler.exchange(header, job.body))
        try:
            waited: set[asyncio.Future[Any]] = {exchange, job.answer}
            await asyncio.wait(
                waited,
                timeout=self._timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not exchange.done() and job.answer.done():
                await self._stop(handler, exchange, job)
            if not exchange.done():
                job.fail(OverTime(f"the request took longer than {self._timeout_s:g} s"))
                raise handler.kill("timeout", f"overran the time limit of {self._timeout_s:g} s")
            job.settle(*exchange.result())
        except HandlerEndedError as ended:
            job.fail(HandlerDied(f"the handler at work on this request {ended.end.sentence}"))
            raise
        except Exception:
            job.fail(Fault.unexpected())
            raise
        finally:
            exchange.cancel()

    async def _stop(
        self, handler: HandlerProcess, exchange: asyncio.Task[Exchanged], job: Job
    ) -> None:
        """Nobody waits for the answer any more: the handler stops at its next layer, or is killed."""
        try:
            async with asyncio.timeout(self._cancel_s):
                await handler.cancel(job.header["id"])
                await asyncio.wait({exchange})
        except TimeoutError:
            sentence = f"did not stop within {self._cancel_s:g} s when asked to"
            raise handler.kill("cancel", sentence) from None


def _pause(fruitless: int) -> float:
    """Seconds before the next start: none after the first end, then doubling up to a limit."""
    if fruitless < 2:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(fruitless - 2, 16))
