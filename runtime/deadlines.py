"""The HTTP/1.1 connections of the server: uvicorn's, with deadlines, bounds, and an end that callers can read.

uvicorn waits for headers, for bodies and for readers of its answers as long as they like to take.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Final

import httptools
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from runtime import answers
from runtime.errors import BadInput, HeadersTooLarge, ServiceError, TooSlow

logger = logging.getLogger("cicada.connection")

MAX_HEADER_BYTES: Final = 64 << 10
"""Of a request line with its header fields; and of a chunked body's framing between two pieces of content."""
LINGER_S: Final = 5.0
_SLICE_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: for a request's headers; for a body, a request's or an answer's; between two requests."""

    header_s: float
    body_s: float
    keep_alive_s: float


class _Part(Enum):
    """What of a request the caller is to send next."""

    NOTHING_YET = auto()
    HEADERS = auto()
    BODY = auto()


class DeadlineProtocol(HttpToolsProtocol):
    """One connection; `configured` gives it its deadlines.

    The application keeps the deadline of a body as long as it reads it, so that its 408 looks and counts as
    its other answers do; all others are kept here. An answer given before the request's body is complete
    ends the connection: what is left of the body is discarded for a while, since closing with data unread
    resets the connection, and the caller might never see the answer (RFC 9112, section 9.6).
    """

    deadlines: ClassVar[Deadlines]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part = _Part.NOTHING_YET
        self._waiting: asyncio.TimerHandle | None = None  # for the caller to send
        self._sending: asyncio.TimerHandle | None = None  # for the caller to take
        self._deaf = False
        self._held = memoryview(b"")  # what was read, but not parsed yet
        self._header_bytes = 0
        self._silent_bytes = 0  # of what came since the last piece of a body
        self._remaining = 0  # of a body of known length
        self._skips_body = False  # as the parser is about to do
        self._replays = False
        self._running: RequestResponseCycle | None = None
        self._last: RequestResponseCycle | None = None
        self._problem: ServiceError | None = None

    # What uvicorn calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self.deadlines.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._stop_waiting()
        self._taken()
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._held = memoryview(bytes(self._held) + data) if self._held else memoryview(data)
        self._parse_held()
        # uvicorn reads on whenever the running request waits for its caller to leave.
        if self._held:
            self.flow.pause_reading()

    def eof_received(self) -> None:
        self._await_taking()  # the transport closes, but not before all is taken

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    # What the parser calls

    def on_message_begin(self) -> None:
        if self._replays:
            return
        super().on_message_begin()
        self._part = _Part.HEADERS
        self._header_bytes = 0
        self._silent_bytes = 0
        if self.cycle is not None and not self._answering:
            self._wait(self.deadlines.header_s)

    def on_url(self, url: bytes) -> None:
        if self._replays:
            return
        self._header_bytes += len(url)
        _check_header_bytes(self._header_bytes)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is not _Part.HEADERS:
            return  # replayed, or a trailer field, of which nothing here makes use
        self._header_bytes += len(name) + len(value) + 4
        _check_header_bytes(self._header_bytes)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._replays:
            return
        version = self.parser.get_http_version()
        length = _body_length(version, self.headers)
        self._remaining = length or 0
        self._skips_body = self.parser.should_upgrade() and length != 0
        self.expect_100_continue &= version != "1.0"  # RFC 9110, section 10.1.1
        super().on_headers_complete()
        self._stop_waiting()
        self._part = _Part.BODY
        self._silent_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._remaining = max(0, self._remaining - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._skips_body:
            return
        self._part = _Part.NOTHING_YET
        super().on_message_complete()

    # What ends a request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self._held and not self.transport.is_closing():
            self._parse_held()
        if self._answering:
            if self.pipeline or self._held:
                self.flow.pause_reading()  # which uvicorn resumes with every answer
            return
        if self.transport.is_closing():
            self._await_taking()
        elif self._last is self.cycle:
            self._linger()
        elif self._problem is not None:
            self._refuse(self._problem)
        elif self._part is _Part.HEADERS:
            self._wait(self.deadlines.header_s)
        else:
            self._wait(self.deadlines.keep_alive_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _Exchange(self, cycle, app))

    def _leave(self) -> None:
        """Tells the application, of whose requests uvicorn tells only the last that came."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """None is offered; a server may ignore the header field (RFC 9110, section 7.8), and logs need not tell."""

    @property
    def _answering(self) -> bool:
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def problem_of(self, cycle: RequestResponseCycle) -> ServiceError | None:
        """What is wrong with the body of this request."""
        return self._problem if cycle is self.cycle and cycle.more_body else None

    def close_after(self, cycle: RequestResponseCycle) -> None:
        """This answer, which says so, is the last; but its end closes the connection gently."""
        self._last = cycle
        cycle.keep_alive = True  # else uvicorn closes it at once

    # What comes in

    def _parse_held(self) -> None:
        """Slice by slice, and no further while a request waits for its turn.

        A request of 30 bytes takes 10 KiB until it is answered, and there may be thousands in what is read.
        """
        while self._held and not self._deaf and not self.pipeline:
            end = max(_SLICE_BYTES, self._remaining)
            part, self._held = self._held[:end], self._held[end:]
            while part and not self._deaf:
                part = self._parse(part)
        if self._deaf:
            self._held = memoryview(b"")

    def _parse(self, data: memoryview) -> memoryview:
        """Feeds the parser; returns what follows a request that asked for another protocol."""
        self._silent_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_skipped_body()
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._fail(_problem(error))
            return data[:0]
        if self._silent_bytes > MAX_HEADER_BYTES and self._part is _Part.HEADERS:
            self._fail(_headers_too_large())
        elif self._silent_bytes > MAX_HEADER_BYTES and self._part is _Part.BODY:
            self._fail(BadInput("the body's chunks consist of framing, expected content"))
        return data[:0]

    def _parse_skipped_body(self) -> None:
        """Of a request that offers another protocol, the parser takes the body for that protocol's.

        Java's HTTP client offers h2c with each request. A new parser is told of the body, and reads on.
        """
        if not self._skips_body:
            return
        self._skips_body = False
        length = b"Content-Length: %d" % self._remaining
        framing = length if self._remaining else b"Transfer-Encoding: chunked"
        head = b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._replays = True
        self.parser.feed_data(head)
        self._replays = False

    def _fail(self, problem: ServiceError) -> None:
        """Answers what is no proper request, after all that came before it."""
        self._deaf = True
        if not self._answering:
            self._refuse(problem)
            return
        self._problem = problem
        if self._part is _Part.BODY:
            self.cycle.message_event.set()  # the application, should it read the body, answers

    def _refuse(self, problem: ServiceError) -> None:
        """An answer without the application."""
        content = answers.encode({"error": problem.message})
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", secrets.token_hex(16).encode()),
        ]
        lines = [b"%b: %b\r\n" % field for field in fields]
        self.transport.write(b"".join([STATUS_LINE[problem.status], *lines, b"\r\n", content]))
        logger.debug("refused", extra={"status": problem.status, "error": problem.message})
        self._linger()

    def _linger(self) -> None:
        """No more answers, and nothing more is read, but the caller has a while to take what it was told."""
        self._deaf = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self._stop_waiting()
        self._waiting = self.loop.call_later(LINGER_S, self.transport.abort)

    # Deadlines

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(seconds, self._overdue, seconds)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _overdue(self, seconds: float) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self._part is _Part.HEADERS:
            self._refuse(TooSlow(f"the request's headers were not complete within {seconds:g} s"))
        elif self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait for the last answer to be taken
        else:
            self.transport.close()

    def _await_taking(self) -> None:
        if self._sending is None and self.transport.get_write_buffer_size():
            self._sending = self.loop.call_later(self.deadlines.body_s, self.transport.abort)

    def _taken(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def configured(deadlines: Deadlines) -> type[DeadlineProtocol]:
    """The class of a server's connections, which uvicorn makes objects of."""
    return type("Connection", (DeadlineProtocol,), {"deadlines": deadlines})


class _Exchange:
    """One request's way through the application, and what the connection has to do with it."""

    def __init__(
        self, protocol: "DeadlineProtocol", cycle: RequestResponseCycle, app: ASGI3Application
    ) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._app = app

    async def __call__(
        self, scope: Scope, _receive: ASGIReceiveCallable, _send: ASGISendCallable
    ) -> None:
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> ASGIReceiveEvent:
        event = await self._cycle.receive()
        problem = self._protocol.problem_of(self._cycle)
        if problem is not None:
            raise problem
        return event

    async def _send(self, event: ASGISendEvent) -> None:
        cuts_off = event["type"] == "http.response.start" and self._cycle.more_body
        if event["type"] == "http.response.start" and cuts_off:
            kept = [
                field for field in event.get("headers", ()) if field[0].lower() != b"connection"
            ]
            event = {**event, "headers": [*kept, (b"connection", b"close")]}
        await self._cycle.send(event)
        if cuts_off:
            self._protocol.close_after(self._cycle)


def _body_length(version: str, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
    """0 without a body; None for one in chunks.

    Raises BadInput for what the parser lets pass (RFC 9112, sections 2.3, 3.2 and 6.1).
    """
    if version not in {"1.0", "1.1"}:
        raise BadInput(f"the request is of HTTP/{version}, expected HTTP/1.1")
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version != "1.0"):
        raise BadInput(f"the request has {hosts} Host fields, expected one")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise BadInput("the request has a Transfer-Encoding that is not served, expected chunked")
    if codings:
        return None
    return int(next((value for name, value in headers if name == b"content-length"), b"0"))


def _check_header_bytes(count: int) -> None:
    if count > MAX_HEADER_BYTES:
        raise _headers_too_large()


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request's headers have more than {MAX_HEADER_BYTES} bytes")


def _problem(error: httptools.HttpParserError) -> ServiceError:
    if isinstance(error.__context__, ServiceError):
        return error.__context__
    if isinstance(error, httptools.HttpParserCallbackError):
        return BadInput("the request's target is no path of this server")
    return BadInput(f"the request is not valid HTTP: {error}")
