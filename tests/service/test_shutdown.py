"""SIGTERM and SIGINT at every moment: what is under way finishes, who stalls is left, the exit code is 0."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

Eventually = Callable[[Callable[[], object]], None]
StartServer = Callable[..., Any]

STALLED = {
    "says nothing": b"",
    "half a request line": b"POST /predic",
    "half the headers": b"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nContent-Le",
    "no body": b"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
    "half the body": b"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1234",
    "half a chunk": b"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12",
    "answered, kept alive": b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n",
}


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_connections_that_stall_or_idle_are_closed_within_the_drain(
    start_server: StartServer,
) -> None:
    server = start_server(CICADA_DRAIN_S="1")
    server.wait_until_ready()
    connections = {name: connect(server.port) for name in STALLED}
    for name, said in STALLED.items():
        connections[name].sendall(said)
    server.client.get("/v2/health/live")  # what was said before has been read
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 4
    assert all(is_closed(connection) for connection in connections.values())
    for connection in connections.values():
        connection.close()
    assert not [event for event in server.events() if event["level"] == "error"]


def test_while_it_drains_nobody_is_taken_and_who_is_at_work_finishes(
    start_server: StartServer, photo: Path, eventually: Eventually
) -> None:
    server = start_server(CICADA_DRAIN_S="20")
    server.wait_until_ready()
    (handler,) = server.handlers()
    statuses: list[int] = []

    def ask() -> None:
        response = server.client.post("/predictions/resnet18", content=photo.read_bytes())
        statuses.append(response.status_code)

    handler.suspend()  # so that the request is under way for as long as the test wants
    asking = threading.Thread(target=ask)
    asking.start()
    with connect(server.port) as metrics:
        eventually(lambda: "cicada_in_flight 1.0" in exchange(metrics, "/metrics"))
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.events("draining"))
        assert server.events("draining")[0]["cause"] == "SIGTERM"
        with pytest.raises(ConnectionRefusedError):
            connect(server.port)
    assert statuses == []
    handler.resume()
    asking.join(60)
    assert statuses == [200], server.log
    assert server.process.wait(60) == 0


def exchange(connection: socket.socket, path: str) -> str:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(re.findall(rb"content-length: (\d+)", head)[0])
    while len(body) < length:
        body += connection.recv(65536)
    return body.decode()


def test_what_does_not_finish_within_the_drain_is_told_so(
    start_server: StartServer, photo: Path, eventually: Eventually
) -> None:
    server = start_server(CICADA_DRAIN_S="0.5")
    server.wait_until_ready()
    (handler,) = server.handlers()
    answers: list[Any] = []

    def ask() -> None:
        answers.append(server.client.post("/predictions/resnet18", content=photo.read_bytes()))

    handler.suspend()
    asking = threading.Thread(target=ask)
    asking.start()
    with connect(server.port) as metrics:
        eventually(lambda: "cicada_in_flight 1.0" in exchange(metrics, "/metrics"))
        assert server.stop() == 0
    asking.join(20)
    (answer,) = answers
    assert answer.status_code == 503
    assert answer.json() == {"error": "the service is shutting down"}
    assert not psutil.pid_exists(handler.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_from_the_moment_that_it_is_caught(
    weights: Path, eventually: Eventually, number: signal.Signals
) -> None:
    """Before the server, even before its modules, are loaded."""
    process = psutil.Popen(
        [sys.executable, "-m", "runtime.cli", "serve"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "CICADA_WEIGHTS": str(weights), "HOST": "127.0.0.1", "PORT": "0"},
    )
    eventually(lambda: catches(process.pid, signal.SIGTERM))
    process.send_signal(number)
    assert process.wait(30) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"SigCgt:\s*([0-9a-f]+)", status)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("event", ["listening", "handler ready"])
def test_a_signal_ends_it_at_every_later_step_of_its_start(
    start_server: StartServer, eventually: Eventually, event: str
) -> None:
    server = start_server()
    eventually(lambda: server.events(event))
    handlers = server.handlers()
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 4
    assert not [handler for handler in handlers if handler.is_running()]


def test_a_second_signal_ends_it_at_once(start_server: StartServer, eventually: Eventually) -> None:
    server = start_server(CICADA_DRAIN_S="60")
    server.wait_until_ready()
    (handler,) = server.handlers()
    with connect(server.port) as connection:
        connection.sendall(STALLED["no body"])
        server.client.get("/v2/health/live")
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: server.events("draining"))
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 1
        assert time.monotonic() - start < 2
    eventually(lambda: not handler.is_running() or handler.status() == psutil.STATUS_ZOMBIE)
