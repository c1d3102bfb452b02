"""Sends a window's invocations to a server when they are due, whatever the server does: an open loop."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import http_sf
import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.payload import Request
from bench.replay.trace import MINUTE_S

_SAMPLE_S: Final = 1.0
_SAMPLE_TIMEOUT_S: Final = 5.0
NOT_SENT: Final = "not sent: too many in flight"


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation: when it is due, in seconds from the replay's start, and for which model."""

    number: int
    offset_s: float
    due_s: float
    function: str
    model: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call; milliseconds.

    late_ms: sent after it was due (the client's own delay). latency_ms: from when it was due to the whole
    answer, so that nothing that held the client back is left out. queue_ms, pipeline_ms and total_ms are
    the server's words. placeholder_bytes and strategy too: they tell how large the weights are.
    error: None for an answer with status 200.
    """

    number: int
    minute: int
    offset_s: float
    function: str
    model: str
    status: int | None
    error: str | None
    late_ms: float | None
    latency_ms: float | None
    queue_ms: float | None
    pipeline_ms: float | None
    total_ms: float | None
    strategy: str | None
    placeholder_bytes: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """What the server's container held, by its own `/metrics`, seconds after the replay's start."""

    at_s: float
    bytes: int


@dataclass(slots=True)
class Replay:
    """A replay, under way or over. `outcomes` come in the order of the answers.

    in_flight: how many requests may wait for their answers; a call that is due then is not sent, and
    counted as an error: to send it later would let the server slow the arrivals.
    """

    url: str
    requests: Mapping[str, Request]
    """By model."""
    headers: Mapping[str, str]
    in_flight: int
    timeout_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, calls: Sequence[Call], on_done: Callable[[], None] = lambda: None) -> None:
        """Returns when every call has its outcome. Interrupted, it keeps those that are there."""
        asyncio.run(self._run(calls, on_done))

    async def _run(self, calls: Sequence[Call], on_done: Callable[[], None]) -> None:
        limits = httpx.Limits(
            max_connections=self.in_flight, max_keepalive_connections=self.in_flight
        )
        timeout = httpx.Timeout(self.timeout_s)
        async with (
            httpx.AsyncClient(
                base_url=self.url, headers=self.headers, limits=limits, timeout=timeout
            ) as client,
            httpx.AsyncClient(base_url=self.url, headers=self.headers) as observer,
        ):
            start = time.monotonic()
            sampling = asyncio.create_task(self._sample_all(observer, start))
            try:
                await self._send_all(client, calls, start, on_done)
            finally:
                self.seconds = time.monotonic() - start
                sampling.cancel()
                with suppress(asyncio.CancelledError):
                    await sampling
            await self._sample(observer, start)

    async def _send_all(
        self,
        client: httpx.AsyncClient,
        calls: Sequence[Call],
        start: float,
        on_done: Callable[[], None],
    ) -> None:
        under_way: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            for call in calls:
                await asyncio.sleep(max(0.0, start + call.due_s - time.monotonic()))
                if len(under_way) >= self.in_flight:
                    self.outcomes.append(_outcome(call, error=NOT_SENT))
                    on_done()
                    continue
                task = group.create_task(self._call(client, call, start + call.due_s, on_done))
                under_way.add(task)
                task.add_done_callback(under_way.discard)

    async def _call(
        self, client: httpx.AsyncClient, call: Call, due: float, on_done: Callable[[], None]
    ) -> None:
        request = self.requests[call.model]
        sent = time.monotonic()
        times = {"late_ms": (sent - due) * 1e3}
        try:
            answer = await client.post(request.path, headers=request.headers, content=request.body)
        except (httpx.HTTPError, OSError) as error:
            self.outcomes.append(_outcome(call, error=type(error).__name__, **times))
        else:
            times["latency_ms"] = (time.monotonic() - due) * 1e3
            self.outcomes.append(_answered(call, answer, times))
        on_done()

    async def _sample_all(self, client: httpx.AsyncClient, start: float) -> None:
        while True:
            await self._sample(client, start)
            await asyncio.sleep(_SAMPLE_S)

    async def _sample(self, client: httpx.AsyncClient, start: float) -> None:
        """A server that does not tell has no memory in the report."""
        with suppress(httpx.HTTPError, ValueError):
            answer = await client.get("/metrics", timeout=_SAMPLE_TIMEOUT_S)
            used = _memory_used(answer.text) if answer.status_code == HTTPStatus.OK else None
            if used is not None:
                self.memory.append(Memory(time.monotonic() - start, used))


def calls(arrivals: Sequence[tuple[float, str, str]], speedup: float) -> list[Call]:
    """arrivals: offset in the window, function and model of each."""
    return [
        Call(number, offset_s, offset_s / speedup, function, model)
        for number, (offset_s, function, model) in enumerate(arrivals)
    ]


def _answered(call: Call, answer: httpx.Response, times: Mapping[str, float]) -> Outcome:
    if answer.status_code != HTTPStatus.OK:
        return _outcome(
            call, status=answer.status_code, error=f"status {answer.status_code}", **times
        )
    timing = server_timing(answer.headers)
    placeholder: Any = http_sf.parse(
        answer.headers.get("Cicada-Placeholder", "").encode(), tltype="dictionary"
    )
    held = placeholder.get("bytes")
    return _outcome(
        call,
        status=answer.status_code,
        queue_ms=timing.get("queue"),
        pipeline_ms=timing.get("pipeline"),
        total_ms=timing.get("total"),
        strategy=answer.headers.get("Cicada-Strategy"),
        placeholder_bytes=None if held is None else int(held[0]),
        **times,
    )


def server_timing(headers: Mapping[str, str]) -> dict[str, float]:
    """The parts of `Server-Timing` in milliseconds; none where there is no such header."""
    parts: Any = http_sf.parse(headers.get("Server-Timing", "").encode(), tltype="list")
    return {str(name): float(parameters["dur"]) for name, parameters in parts}


def _outcome(call: Call, **known: Any) -> Outcome:
    unknown = dict.fromkeys(
        (
            *("status", "error", "late_ms", "latency_ms", "queue_ms", "pipeline_ms"),
            *("total_ms", "strategy", "placeholder_bytes"),
        )
    )
    return Outcome(
        number=call.number,
        minute=int(call.offset_s // MINUTE_S),
        offset_s=call.offset_s,
        function=call.function,
        model=call.model,
        **{**unknown, **known},
    )


def _memory_used(exposition: str) -> int | None:
    for family in text_string_to_metric_families(exposition):
        if family.name == "cicada_memory_used_bytes":
            return int(family.samples[0].value)
    return None
