"""The server: one process that listens at once and stops gracefully."""

import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from runtime import logs
from runtime.app import create_app
from runtime.service import Service
from runtime.settings import Settings

logger = logging.getLogger("cicada.server")

BACKLOG = 2048


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT; a second one ends the process at once."""
    logs.configure(settings.log_level)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    with _listen(settings) as listener:
        host, port = listener.getsockname()[:2]
        app = create_app(settings)
        logger.info("listening", extra={"host": host, "port": port, "pid": os.getpid()})
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(settings.drain_s) + 1,
        )
        try:
            _Server(config, app.state.service).run(sockets=[listener])
        finally:
            logger.info("stopped")


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[
            0
        ]  # what follows says it again
        sys.exit(f"cicada: cannot listen on {settings.host} port {settings.port}: {reason}")


def _exit(_number: int, _frame: FrameType | None) -> None:
    """Before uvicorn takes the signals over, and when it raises them anew after its own shutdown."""
    sys.exit(0)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(1)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("draining", extra={"limit_s": self._service.settings.drain_s})
        self._service.pool.drain(self._service.settings.drain_s)
        await super().shutdown(sockets)
