"""What the image's health check says of a service beside it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from runtime.health import why_not_ready
from runtime.settings import Settings


class Answering(HTTPServer):
    """Answers every GET with what it was told, and remembers what was asked."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = status, body
        self.asked: list[tuple[str, dict[str, str]]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(status: int, body: bytes) -> Iterator[Answering]:
    with Answering(status, body) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost"])  # noqa: S104
def test_a_ready_service_is_healthy(host: str) -> None:
    with answering(200, b'{"ready":true}') as server:
        assert why_not_ready(Settings(host=host, port=server.server_port)) is None
    ((path, headers),) = server.asked
    assert path == "/v2/health/ready"
    assert "X-API-Key" not in headers


def test_one_that_is_not_says_why() -> None:
    with answering(503, b'{"error":"no model is prepared"}') as server:
        assert why_not_ready(Settings(port=server.server_port)) == "no model is prepared"


def test_another_ones_answer_is_told_by_its_status() -> None:
    with answering(404, b"<html>") as server:
        assert why_not_ready(Settings(port=server.server_port)) == "answered 404"


def test_where_nobody_listens_nobody_is_healthy(free_port: int) -> None:
    reason = why_not_ready(Settings(port=free_port))
    assert reason is not None
    assert reason.startswith(f"no answer on port {free_port}")


def test_where_health_needs_a_key_it_shows_one() -> None:
    with answering(200, b"{}") as server:
        settings = Settings(
            port=server.server_port, api_keys="first-key,second-key", keys_for_health=True
        )
        assert why_not_ready(settings) is None
    ((_, headers),) = server.asked
    assert headers["X-Api-Key" if "X-Api-Key" in headers else "X-API-Key"] == "first-key"
