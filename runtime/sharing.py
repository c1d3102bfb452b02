"""What pages of other origins may do: call the service (CORS), and see how long that took (Timing-Allow-Origin)."""

from collections.abc import Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime import reporting

METHODS: Final = ("GET", "HEAD", "POST")
REQUEST_HEADERS: Final = (
    "Authorization",
    "Cicada-Strategy",
    "Content-Encoding",
    "Inference-Header-Content-Length",
    "Last-Event-ID",
    "Priority",
    "X-API-Key",
    "X-Request-ID",
    "traceparent",
    "tracestate",
)
ANSWER_HEADERS: Final = (
    *reporting.NAMES,
    "Inference-Header-Content-Length",
    "Retry-After",
    "X-Request-ID",
    "traceparent",
    "tracestate",
)


class SharingMiddleware:
    """Lets pages of `origins` (`*`: of all) read every answer with its headers and its timing."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=REQUEST_HEADERS,
            expose_headers=ANSWER_HEADERS,
        )
        self._origins = ", ".join(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                # On every answer: a request without CORS, as of an <img>, tells no origin.
                MutableHeaders(scope=message)["Timing-Allow-Origin"] = self._origins
            await send(message)

        await self._app(scope, receive, marked)
