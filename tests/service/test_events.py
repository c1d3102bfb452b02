"""`/events` over a real connection: live, resumable, and in nobody's way."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from runtime.events import MOST_FOLLOWERS

ServeStubs = Callable[..., Any]
Eventually = Callable[[Callable[[], object]], None]
KEY = "a-key-of-ours"


@pytest.fixture(scope="module")
def service(serve_stubs: ServeStubs) -> Any:
    return serve_stubs()


def predict(service: Any, request_id: str, body: bytes = b"image") -> httpx.Response:
    headers = {"X-Request-ID": request_id}
    answer: httpx.Response = service.client.post("/predictions/tiny", content=body, headers=headers)
    return answer


class Followed:
    """What comes of an event stream, event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def events(self) -> Iterator[dict[str, Any]]:
        event: dict[str, Any] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line and name:
                event[name] = json.loads(value) if name == "data" else value
            elif "data" in event:
                yield event
            if not line:
                event = {}

    def next(self) -> dict[str, Any]:
        return next(self.events())


@contextmanager
def follow(service: Any, query: str = "", **headers: str) -> Iterator[Followed]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with service.client.stream("GET", f"/events{query}", headers=named) as response:
        yield Followed(response)


def test_a_request_is_told_as_it_is_listed_when_it_ends(service: Any) -> None:
    with follow(service) as followed:
        assert followed.response.headers["Content-Type"].startswith("text/event-stream")
        assert followed.response.headers["Cache-Control"] == "no-store"
        assert "X-Request-ID" in followed.response.headers
        predict(service, "live")
        event = followed.next()
        assert event["event"] == "request"
        listed = service.client.get("/requests").json()["requests"]
        assert event["data"] == listed[0]
        predict(service, "refused", b"error 400 no image")
        refused = followed.next()["data"]
        assert (refused["status"], refused["error"]) == (400, "no image")


def test_one_that_comes_back_misses_nothing_in_between(service: Any) -> None:
    with follow(service) as followed:
        predict(service, "before")
        seen = followed.next()["id"]
    predict(service, "between")
    with follow(service, Last_Event_ID=seen) as followed:
        assert followed.next()["data"]["id"] == "between"


def test_it_begins_with_as_many_of_the_past_as_are_asked_for_and_ends_in_time(service: Any) -> None:
    predict(service, "one")
    predict(service, "two")
    with follow(service, "?last=2&seconds=0.1") as followed:
        assert [event["data"]["id"] for event in followed.events()] == ["one", "two"]


def test_a_handler_that_ends_and_the_next_one_are_told(serve_stubs: ServeStubs) -> None:
    service = serve_stubs()
    (handler,) = service.handlers()
    with follow(service) as followed:
        handler.kill()
        ended, ready = followed.next(), followed.next()
        assert (ended["event"], ready["event"]) == ("handler", "handler")
        assert (ended["data"]["pid"], ended["data"]["cause"]) == (handler.pid, "SIGKILL")
        (successor,) = service.handlers()
        assert (ready["data"]["state"], ready["data"]["pid"]) == ("ready", successor.pid)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("?last=-1", "query last: "),
        ("?last=257", "query last: "),
        ("?seconds=0", "query seconds: "),
        ("?seconds=x", "query seconds: "),
    ],
)
def test_what_cannot_be_asked_for_is_400(service: Any, query: str, sentence: str) -> None:
    answer = service.client.get(f"/events{query}")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)


def test_head_is_answered_and_over(service: Any) -> None:
    answer = service.client.head("/events")
    assert (answer.status_code, answer.content) == (200, b"")
    assert predict(service, "after").status_code == 200


def test_it_needs_a_key_where_keys_are_set(serve_stubs: ServeStubs) -> None:
    service = serve_stubs(CICADA_API_KEYS=KEY)
    assert service.client.get("/events").status_code == 401
    with follow(service, "?seconds=0.1", X_API_Key=KEY) as followed:
        assert followed.response.status_code == 200


def test_too_many_followers_are_refused_and_each_that_leaves_makes_room(
    service: Any, eventually: Eventually
) -> None:
    def is_refused() -> bool:
        with follow(service, "?seconds=0.01") as followed:
            return followed.response.status_code == 503

    eventually(lambda: not is_refused())  # those of the tests before have gone
    with ExitStack() as followers:
        for _ in range(MOST_FOLLOWERS):
            followed = followers.enter_context(follow(service, "?last=1"))
            assert followed.response.status_code == 200
        refused = service.client.get("/events")
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert str(MOST_FOLLOWERS) in refused.json()["error"]
        assert predict(service, "meanwhile").status_code == 200
    eventually(lambda: not is_refused())


def test_who_takes_nothing_holds_nobody_up(serve_stubs: ServeStubs) -> None:
    service = serve_stubs()
    with socket.create_connection(("127.0.0.1", service.port)) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
        with follow(service) as followed:
            for number in range(300):
                predict(service, f"r{number}")
                assert followed.next()["data"]["id"] == f"r{number}"
        start = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - start < 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_listens_keeps_the_service_from_nothing_when_it_ends(
    serve_stubs: ServeStubs, number: signal.Signals
) -> None:
    service = serve_stubs(CICADA_DRAIN_S="60")
    with follow(service) as followed:
        start = time.monotonic()
        service.process.send_signal(number)
        assert list(followed.events()) == []  # its end is a proper one
        assert service.process.wait(30) == 0
        assert time.monotonic() - start < 4
    assert not [event for event in service.events() if event["level"] == "error"]


def test_a_connection_can_be_used_again_after_its_events(service: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    for _ in range(2):
        connection.request("GET", "/events?seconds=0.05")
        assert b"retry: " in connection.getresponse().read()
    connection.close()
