"""What happens in the service, as it happens: `/events`, server-sent events (WHATWG HTML, section 9.2)."""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.answers import encode
from runtime.descriptions import BAD_INPUT, NOT_READY, schema
from runtime.errors import Unavailable
from runtime.handler_process import End
from runtime.requests import Record, Summary

KEPT: Final = 256
MOST_FOLLOWERS: Final = 64
"""A follower holds a connection for as long as it likes, and no memory: what it has not taken yet, all share."""
RETRY_MS: Final = 2000
SILENCE_S: Final = 15.0
"""After it a comment is sent: proxies close what is silent, and a caller that vanished is noticed."""
LONGEST_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Event:
    """`tell` is asked only when somebody listens."""

    number: int
    name: str
    tell: Callable[[], dict[str, Any]]


class Feed:
    """The last events, and those who follow them, each at its own pace.

    One that takes them too slowly misses some: the feed neither waits for it nor keeps more than KEPT.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._run = secrets.token_hex(4)  # numbers of another run of the service mean nothing here
        self._last = 0
        self._news = asyncio.Event()
        self._closed = False
        self.followers = 0

    def request_ended(self, record: Record) -> None:
        self._publish("request", record.summary)

    def handler_ready(self, pid: int) -> None:
        said = {"at": _now(), "pid": pid, "state": "ready", "cause": None, "sentence": None}
        self._publish("handler", lambda: said)

    def handler_ended(self, end: End) -> None:
        said = {"at": _now(), "pid": end.pid, "state": "ended", "cause": end.cause}
        self._publish("handler", lambda: {**said, "sentence": end.sentence})

    def close(self) -> None:
        """Nobody is followed any more: whoever listens would keep the service from ending."""
        self._closed = True
        self._wake()

    def start(self, last_id: str | None, last: int) -> int:
        """The number after which a follower begins: after the event it had last, else `last` events ago."""
        run, _, number = (last_id or "").partition("-")
        if run == self._run and number.isdecimal():
            return min(int(number), self._last)
        return max(0, self._last - last)

    def id_of(self, event: Event) -> str:
        return f"{self._run}-{event.number}"

    async def follow(self, after: int, seconds: float | None) -> AsyncIterator[Event | None]:
        """The events after that number, for so many seconds, or until the feed is closed.

        None stands for a while in which there was none.
        """
        loop = asyncio.get_running_loop()
        end = math.inf if seconds is None else loop.time() + seconds
        while True:
            news = self._news
            for event in [event for event in self._events if event.number > after]:
                yield event
                after = event.number
            if self._closed or loop.time() >= end:
                return
            try:
                async with asyncio.timeout_at(min(end, loop.time() + SILENCE_S)):
                    await news.wait()
            except TimeoutError:
                if loop.time() < end:
                    yield None

    def _publish(self, name: str, tell: Callable[[], dict[str, Any]]) -> None:
        self._last += 1
        self._events.append(Event(self._last, name, tell))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def feed_of(request: Request) -> Feed:
    feed: Feed = request.app.state.service.feed
    return feed


class EventStream(StreamingResponse):
    """Counts its caller among the feed's followers for as long as it lasts."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, lines: AsyncIterator[bytes]) -> None:
        # nginx would keep events back until it has a buffer full of them.
        super().__init__(lines, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._feed.followers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.followers -= 1


async def _lines(feed: Feed, after: int, seconds: float | None) -> AsyncIterator[bytes]:
    """The events as they travel; JSON has no line breaks of its own."""
    yield b"retry: %d\n\n" % RETRY_MS
    async for event in feed.follow(after, seconds):
        if event is None:
            yield b":\n\n"
            continue
        head = f"event: {event.name}\nid: {feed.id_of(event)}\ndata: "
        yield head.encode() + encode(event.tell()) + b"\n\n"


router = APIRouter(tags=["requests"])

_WHAT: Final = (
    "Server-sent events, each with an id. `request`: an inference request has ended; its data are what "
    "`/requests` lists. `handler`: a handler is ready or has ended. After 15 seconds without an event "
    "comes a comment."
)
_HANDLER: Final = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "format": "date-time"},
        "pid": {"type": ["integer", "null"]},
        "state": {"enum": ["ready", "ended"]},
        "cause": {"type": ["string", "null"]},
        "sentence": {"type": ["string", "null"]},
    },
    "required": ["at", "pid", "state", "cause", "sentence"],
}


def _event(name: str, data: dict[str, Any]) -> dict[str, Any]:
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "properties": {"event": {"const": name}, "id": {"type": "string"}, "data": encoded},
        "required": ["event", "id", "data"],
    }


_EVENT: Final = {
    "type": "object",  # else the framework says that it is a string
    "oneOf": [_event("request", schema(Summary)), _event("handler", _HANDLER)],
}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": _WHAT, "content": {EventStream.media_type: {"schema": _EVENT}}},
    **BAD_INPUT,
    **NOT_READY,
}


@router.get(
    "/events",
    response_class=EventStream,
    status_code=200,
    responses=_RESPONSES,
    summary="Requests as they end, and handlers as they come and go, live",
)
async def follow_events(
    request: Request,
    last: Annotated[
        int, Query(ge=0, le=KEPT, description="Begin with so many of those that were.")
    ] = 0,
    seconds: Annotated[
        float | None,
        Query(gt=0, le=LONGEST_S, description="End after so many; else the caller ends it."),
    ] = None,
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", description="Go on after this event, as `EventSource` does."),
    ] = None,
) -> Response:
    feed = feed_of(request)
    if feed.followers >= MOST_FOLLOWERS:
        raise Unavailable(f"{MOST_FOLLOWERS} callers follow the events, the most there may be")
    if request.state.is_head:
        seconds = 0.0
    return EventStream(feed, _lines(feed, feed.start(last_event_id, last), seconds))
