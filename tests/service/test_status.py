"""`/status` tells the truth about handlers, queue and memory, and `/status/history` about the last minutes."""

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime import limits

ServeStubs = Callable[..., Any]
Eventually = Callable[[Callable[[], object]], None]


def status(service: Any) -> dict[str, Any]:
    shown: dict[str, Any] = service.client.get("/status").json()
    return shown


def test_an_idle_service_says_so(serve_stubs: ServeStubs, eventually: Eventually) -> None:
    service = serve_stubs(CICADA_HANDLERS="2", CICADA_QUEUE="7")
    eventually(lambda: [each["state"] for each in status(service)["handlers"]] == ["idle"] * 2)
    shown = status(service)
    assert (shown["ready"], shown["why_not_ready"]) == (True, None)
    assert {handler["pid"] for handler in shown["handlers"]} == {
        handler.pid for handler in service.handlers()
    }
    assert shown["queue"] == {"waiting": 0, "limit": 7}
    assert shown["memory"]["limit_bytes"] == limits.available_memory()
    assert shown["memory"]["reserved_bytes"] == 0
    assert shown["ended"] == []
    assert [recent["minutes"] for recent in shown["recent"]] == [1, 10]


def test_who_works_on_what_and_who_waits(
    serve_stubs: ServeStubs, tmp_path: Path, eventually: Eventually
) -> None:
    service = serve_stubs()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def ask(request_id: str, body: bytes) -> None:
        headers = {"X-Request-ID": request_id}
        service.client.post("/predictions/tiny", content=body, headers=headers)

    asking = [threading.Thread(target=ask, args=("held", f"hold {fifo}".encode()))]
    asking[0].start()
    eventually(lambda: status(service)["handlers"][0]["state"] == "working")
    asking.append(threading.Thread(target=ask, args=("next", b"image")))
    asking[1].start()
    eventually(lambda: status(service)["queue"]["waiting"] == 1)
    (handler,) = status(service)["handlers"]
    assert (handler["request"], handler["done"]) == ("held", 0)
    assert handler["memory_bytes"] > 0
    latest = service.client.get("/status/history").json()["steps"][-1]
    assert (latest["waiting"], latest["working"]) == (1, 1)
    fifo.write_bytes(b"")
    for each in asking:
        each.join(20)
    eventually(lambda: status(service)["handlers"][0]["done"] == 2)
    (handler,) = status(service)["handlers"]
    assert (handler["state"], handler["request"]) == ("idle", None)


def test_a_handler_that_died_is_told_of_and_its_place_taken(
    serve_stubs: ServeStubs, eventually: Eventually
) -> None:
    service = serve_stubs()
    (handler,) = service.handlers()
    service.client.post("/predictions/tiny", content=b"die SIGSEGV")
    eventually(lambda: status(service)["handlers"][0]["state"] == "idle")
    shown = status(service)
    (place,) = shown["handlers"]
    assert place["pid"] not in {None, handler.pid}
    assert place["done"] == 0
    (end,) = shown["ended"]
    assert (end["pid"], end["cause"], end["sentence"]) == (
        handler.pid,
        "SIGSEGV",
        "was killed by SIGSEGV",
    )


def test_requests_of_the_last_minutes_are_counted_by_their_end(serve_stubs: ServeStubs) -> None:
    service = serve_stubs()
    totals = []
    for body in (b"image", b"image", b"error 400 no", b"exit 3"):
        answer = service.client.post("/predictions/tiny", content=body)
        shown = service.client.get(f"/requests/{answer.headers['X-Request-ID']}").json()
        totals += [shown["total_ms"]] if answer.status_code == 200 else []
    for recent in status(service)["recent"]:
        counts = (recent["answered"], recent["refused"], recent["failed"])
        assert counts == (2, 1, 1)
        assert recent["p50_ms"] == pytest.approx(min(totals), rel=0.02)
        assert recent["p99_ms"] == pytest.approx(max(totals), rel=0.02)
        assert 0 < recent["per_second"] <= 4
    history = service.client.get("/status/history").json()
    assert history["step_s"] == 5
    assert sum(step["answered"] for step in history["steps"]) == 2
    latest = history["steps"][-1]
    age_s = (datetime.now(UTC) - datetime.fromisoformat(latest["at"])).total_seconds()
    assert -1 < age_s < 6
    assert (latest["memory_bytes"] is None) == (limits.memory_used() is None)
