"""The server: one process that listens at once and stops gracefully."""

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

import uvicorn

from runtime import deadlines, logs, signals
from runtime.app import create_app
from runtime.service import Service
from runtime.settings import Settings

logger = logging.getLogger("cicada.server")

BACKLOG: Final = 2048
CLOSING_S: Final = 0.25
"""For the answers to those that were refused at the end of the drain."""


def serve(settings: Settings, *, command: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends the process at once.

    command: as in `create_app`.
    """
    logs.configure(settings.log_level)
    signals.end_at_once()
    with _listen(settings) as listener:
        host, port = listener.getsockname()[:2]
        app = create_app(settings, command=command)
        logger.info("listening", extra={"host": host, "port": port, "pid": os.getpid()})
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=deadlines.configured(_deadlines(settings)),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(settings.drain_s + CLOSING_S),
        )
        # The 70,000 objects that start-up made stay: the collector need not go through them while requests wait.
        gc.freeze()
        try:
            _Server(config, app.state.service).run(sockets=[listener])
        finally:
            logger.info("stopped")


def _deadlines(settings: Settings) -> deadlines.Deadlines:
    return deadlines.Deadlines(
        header_s=settings.header_timeout_s,
        body_s=settings.body_timeout_s,
        keep_alive_s=settings.keep_alive_s,
    )


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        # What the socket module says after it is said here.
        reason, *_ = (error.strerror or str(error)).split(" (while")
        sys.exit(f"cicada: cannot listen on {settings.host} port {settings.port}: {reason}")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._cause: str | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(1)
        self._cause = signal.Signals(sig).name
        self._service.pool.refuse_new()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit_s = self._service.settings.drain_s
        logger.info("draining", extra={"cause": self._cause, "limit_s": limit_s})
        self._service.drain(limit_s)
        asyncio.get_running_loop().call_later(limit_s + CLOSING_S, self._close_stalled)
        await super().shutdown(sockets)

    def _close_stalled(self) -> None:
        """Whoever has neither sent its request nor taken its answer by now keeps nobody waiting."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
