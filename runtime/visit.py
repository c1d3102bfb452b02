"""Every request from outside the routes: its id, its record, its log line, and the last resort for errors."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import Fault, render
from runtime.requests import Record

logger = logging.getLogger("cicada.request")

ID_HEADER: Final = "X-Request-ID"
_UNAUTHORIZED: Final = 401
_VALID_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")


class VisitMiddleware:
    """Gives every request a Record (`request.state.record`) and hands it to `finish` when its status is known,
    and to `leave` when it has ended.

    Every answer carries X-Request-ID. HEAD is served as GET; the server leaves the body out.
    """

    def __init__(
        self, app: ASGIApp, finish: Callable[[Record], None], leave: Callable[[Record], None]
    ) -> None:
        self._app = app
        self._finish = finish
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(_request_id(Headers(scope=scope)))
        told = {"record": record, "is_head": scope["method"] == "HEAD"}
        inner = {**scope, "state": {**scope.get("state", {}), **told}}
        if scope["method"] == "HEAD":
            inner["method"] = "GET"
        try:
            await _Visit(record, self._finish).run(self._app, inner, receive, send)
        finally:
            self._leave(record)


class LastResortMiddleware:
    """Answers what no route has foreseen: no traceback reaches a caller. Within all that marks answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            logger.exception("unexpected fault", extra={"id": scope["state"]["record"].id})
            if started:
                raise
            await render(Request(scope), Fault.unexpected())(scope, receive, send)


class _Visit:
    def __init__(self, record: Record, finish: Callable[[Record], None]) -> None:
        self._record = record
        self._finish = finish

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._mark(MutableHeaders(scope=message))
                self._end(message["status"], scope)
            await send(message)

        await app(scope, receive, marked)

    def _mark(self, headers: MutableHeaders) -> None:
        headers[ID_HEADER] = self._record.id
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"

    def _end(self, status: int, scope: Scope) -> None:
        record = self._record
        record.status = status
        if record.answered_ns is None:
            record.answered_ns = time.monotonic_ns()
        self._finish(record)
        # Probes and scrapes come every second, whether there is work or not; who tries keys is of interest.
        level = logging.INFO if record.inference or status == _UNAUTHORIZED else logging.DEBUG
        logger.log(level, "request", extra=_fields(record, scope))


def _request_id(headers: Headers) -> str:
    given = headers.get(ID_HEADER, "")
    return given if _VALID_ID.fullmatch(given) else secrets.token_hex(16)


def _fields(record: Record, scope: Scope) -> dict[str, Any]:
    route = scope.get("route")
    return {
        "id": record.id,
        "route": getattr(route, "path", None),
        "model": record.model,
        "version": record.version,
        "strategy": record.strategy,
        "status": record.status,
        "receive_ms": record.receive_ms,
        "queue_ms": record.queue_ms,
        "pipeline_ms": record.timeline.figures.pipeline_ms if record.timeline else None,
        "total_ms": record.total_ms,
        # What the caller did wrong may quote the caller; what we did wrong does not.
        "error": record.error if (record.status or 0) >= 500 else None,
    }
