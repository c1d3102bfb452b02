"""What no honest client sends. After each case the next, honest request is answered as ever.

Images have a suite of their own, tests/unit/handler/test_images.py.
"""

import json
import random
import re
import socket
import string
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

Eventually = Callable[[Callable[[], object]], None]

SIDE = 224
COUNT = 3 * SIDE * SIDE
PATHS = 10_000
CONNECTIONS = 200


@pytest.fixture(scope="module")
def honest(server: Any, photo: Path) -> Callable[[], None]:
    """Asks honestly, and expects the answer that there was at first."""
    image = photo.read_bytes()
    first = server.client.post("/predictions/resnet18", content=image)
    assert first.status_code == 200

    def ask() -> None:
        answer = server.client.post("/predictions/resnet18", content=image)
        assert (answer.status_code, answer.json()) == (200, first.json())

    return ask


@pytest.fixture(autouse=True)
def _the_next_request_is_answered(server: Any, honest: Callable[[], None]) -> Iterator[None]:
    ended = len(server.events("handler ended"))
    yield
    honest()
    assert len(server.events("handler ended")) == ended
    assert not server.events("unexpected fault")


def tensor(**changes: Any) -> dict[str, Any]:
    base = {"name": "input", "shape": [1, 3, SIDE, SIDE], "datatype": "FP32", "data": [0.5]}
    return {**base, **changes}


def whole(**changes: Any) -> dict[str, Any]:
    return {"inputs": [tensor(**changes)]}


MALFORMED = [
    b"",
    b" ",
    b"\0",
    b"{",
    b"}",
    b"null",
    b"true",
    b"5",
    b'"text"',
    b"[]",
    b"{}",
    b"{]",
    b"{'inputs': []}",
    b'{"inputs": [],}',
    b'{"inputs": []} x',
    b'{"inputs": []}{"inputs": []}',
    b'{"inputs"',
    b'{"inputs": nul',
    b'{"inputs": [1, 2',
    b'{"inputs": "\\u12"}',
    b'{"inputs": "\\ud800"}',
    b'{"inputs": "\xff\xfe"}',
    b'\xef\xbb\xbf{"inputs": []}',
    '{"inputs": []}'.encode("utf-16"),
    b'{"inputs": NaN}',
    b'{"inputs": Infinity}',
    b'{"inputs": -Infinity}',
    b'{"inputs": 01}',
    b'{"inputs": +1}',
    b'{"inputs": .5}',
    b'{"inputs": 1e}',
    b'{"inputs": 0x10}',
    b'{"inputs": /* */ []}',
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"inputs": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"inputs": ' + b"9" * 100_000 + b"}",
    b'{"inputs": 1e' + b"9" * 10_000 + b"}",
    b'{"inputs": "' + b"a" * 5_000_000 + b'"}',
    b'{"inputs": [' + b"{}," * 100_000 + b"{}]}",
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_json_is_bad_input(server: Any, body: bytes) -> None:
    answer = server.client.post("/v2/models/resnet18/infer", content=body)
    assert_refused(answer)


def assert_refused(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in (statuses or (400,)), answer.text[:300]
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert 0 < len(error) < 1000
    assert "\n" not in error
    assert "Traceback" not in error


WRONG: list[dict[str, Any]] = [
    whole(shape=[]),
    whole(shape=[1]),
    whole(shape=[1, 3, SIDE]),
    whole(shape=[1, 3, SIDE, SIDE, 1]),
    whole(shape=[0, 3, SIDE, SIDE]),
    whole(shape=[-1, 3, SIDE, SIDE]),
    whole(shape=[1, -3, SIDE, -SIDE]),
    whole(shape=[1 << 62, 3, SIDE, SIDE]),
    whole(shape=[1 << 64, 3, SIDE, SIDE]),
    whole(shape=[10**400, 3, SIDE, SIDE]),
    whole(shape=[2**32 + 1, 3, SIDE, SIDE]),
    whole(shape=[1.0, 3, SIDE, SIDE]),
    whole(shape=["1", 3, SIDE, SIDE]),
    whole(shape=[True, 3, SIDE, SIDE]),
    whole(shape=None),
    whole(shape={"0": 1}),
    whole(shape=[1] * 100_000),
    whole(datatype=None),
    whole(datatype="FP32\0"),
    whole(datatype="object"),
    whole(datatype="<f4"),
    whole(datatype=["FP32"]),
    whole(name=None),
    whole(name="../input"),
    whole(name="input\r\nX: y"),
    whole(data=None),
    whole(data="AAAA"),
    whole(data={"0": 0.5}),
    whole(data=[None] * COUNT),
    whole(data=["0.5"] * COUNT),
    whole(data=[[0.5] * SIDE] * 3),
    whole(data=[0.5] * (COUNT - 1)),
    whole(data=[0.5] * (COUNT + 1)),
    whole(data=[[[[0.5]]]]),
    whole(data=[1e39] * COUNT),
    whole(data=[10**400] + [0.5] * (COUNT - 1)),
    whole(parameters=5),
    whole(parameters={"binary_data_size": 4 * COUNT}),
    whole(parameters={"binary_data_size": -1}),
    {"inputs": [tensor()] * 1000},
    {"inputs": [tensor(data=[0.5] * COUNT)], "outputs": [{"name": "logits"}] * 3 + [{"name": "x"}]},
    {"inputs": [tensor(data=[0.5] * COUNT)], "outputs": {"name": "logits"}},
    {"inputs": [tensor(data=[0.5] * COUNT)], "outputs": [{"name": 5}]},
    {"inputs": [tensor(data=[0.5] * COUNT)], "id": 5},
    {"inputs": [tensor(data=[0.5] * COUNT)], "parameters": {"strategy": {"a": 1}}},
    {"inputs": [tensor(data=[0.5] * COUNT)], "parameters": {"strategy": "cicada\r\nX: y"}},
    {"inputs": [tensor(data=[0.5] * COUNT)], "parameters": []},
]


@pytest.mark.parametrize("body", WRONG, ids=range(len(WRONG)))
def test_wrong_tensors_are_bad_input(server: Any, body: dict[str, Any]) -> None:
    answer = server.client.post("/v2/models/resnet18/infer", content=json.dumps(body))
    assert_refused(answer)


SIZE = 4 * COUNT
LENGTHS = [
    (SIZE - 1, SIZE),
    (SIZE + 1, SIZE),
    (SIZE, SIZE - 1),
    (SIZE, SIZE + 1),
    (SIZE, 0),
    (0, SIZE),
    (0, 0),
    (-SIZE, SIZE),
    (2**31, SIZE),
    (2**32 + SIZE, SIZE),
    (2**63, SIZE),
    (2**63 + SIZE, SIZE),
    (2**64 + SIZE, SIZE),
    (str(SIZE), SIZE),
    (float(SIZE), SIZE),
    (None, SIZE),
    (True, SIZE),
]


@pytest.mark.parametrize(("declared", "sent"), LENGTHS)
def test_binary_lengths_that_do_not_fit_are_bad_input(
    server: Any, declared: object, sent: int
) -> None:
    described = tensor(parameters={"binary_data_size": declared})
    del described["data"]
    header = json.dumps({"inputs": [described]}).encode()
    answer = server.client.post(
        "/v2/models/resnet18/infer",
        content=header + bytes(sent),
        headers={"Inference-Header-Content-Length": str(len(header))},
    )
    assert_refused(answer)


@pytest.mark.parametrize(
    "length",
    [
        "-1",
        "1",
        "x",
        "",
        "1e3",
        "0x10",
        "9" * 30,
        str(2**63),
        str(2**64),
        "\uff11\uff12",
        "+5",
        "5, 5",
    ],
)
def test_a_json_length_that_is_none_is_bad_input(server: Any, length: str) -> None:
    described = tensor(parameters={"binary_data_size": SIZE})
    del described["data"]
    header = json.dumps({"inputs": [described]}).encode()
    answer = server.client.post(
        "/v2/models/resnet18/infer",
        content=header + bytes(SIZE),
        headers=[(b"Inference-Header-Content-Length", length.encode())],
    )
    assert_refused(answer)


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x80000001])
def test_any_bits_are_numbers_in_binary_and_the_answer_is_json(server: Any, bits: int) -> None:
    described = tensor(parameters={"binary_data_size": SIZE})
    del described["data"]
    header = json.dumps({"inputs": [described]}).encode()
    answer = server.client.post(
        "/v2/models/resnet18/infer",
        content=header + struct.pack("<I", bits) * COUNT,
        headers={"Inference-Header-Content-Length": str(len(header))},
    )
    assert answer.status_code in {200, 400}
    json.loads(answer.text, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def exchange(port: int, sent: bytes) -> bytes:
    """All that the server says until it closes the connection, which it is asked to."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
        return received


def said(port: int, sent: bytes) -> bytes:
    """The same, asked for an answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def head(*fields: str, line: str = "POST /predictions/resnet18 HTTP/1.1") -> bytes:
    return "\r\n".join([line, "Host: a", *fields, "", ""]).encode("latin-1")


HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
SMUGGLED = {
    "two lengths": head("Content-Length: 5", "Content-Length: 6") + b"12345" + HIDDEN,
    "a list of lengths": head("Content-Length: 5, 5") + b"12345" + HIDDEN,
    "length and chunks": head("Content-Length: 5", "Transfer-Encoding: chunked")
    + b"0\r\n\r\n"
    + HIDDEN,
    "chunks and length": head("Transfer-Encoding: chunked", "Content-Length: 5")
    + b"0\r\n\r\n"
    + HIDDEN,
    "two codings": head("Transfer-Encoding: chunked", "Transfer-Encoding: identity") + b"0\r\n\r\n",
    "an unknown coding": head("Transfer-Encoding: xchunked") + b"0\r\n\r\n" + HIDDEN,
    "chunked, then another": head("Transfer-Encoding: chunked, gzip") + b"0\r\n\r\n" + HIDDEN,
    "a negative length": head("Content-Length: -1") + HIDDEN,
    "a signed length": head("Content-Length: +5") + b"12345" + HIDDEN,
    "a hexadecimal length": head("Content-Length: 0x5") + b"12345" + HIDDEN,
    "a huge length": head("Content-Length: " + "9" * 40) + HIDDEN,
    "a length of 2^64": head(f"Content-Length: {2**64}") + HIDDEN,
    "a space before the colon": head("Content-Length : 5") + b"12345" + HIDDEN,
    "a folded field": head("X: a", " b", "Content-Length: 5") + b"12345",
    "a field without a colon": head("Content-Length 5") + b"12345" + HIDDEN,
    "a negative chunk": head("Transfer-Encoding: chunked") + b"-5\r\n12345\r\n0\r\n\r\n" + HIDDEN,
    "a chunk of 2^64": head("Transfer-Encoding: chunked") + b"1" + b"0" * 16 + b"\r\n" + HIDDEN,
    "a chunk without an end": head("Transfer-Encoding: chunked") + b"5\r\n12345678",
    "a bare line feed": b"POST /predictions/resnet18 HTTP/1.1\nHost: a\nContent-Length: 5\n\n12345",
    "a bare carriage return": head("X: a\rContent-Length: 5") + b"12345",
    "a null in a field": head("X: a\0b"),
    "no host": b"GET /v2 HTTP/1.1\r\n\r\n",
    "two hosts": head("Host: b", line="GET /v2 HTTP/1.1"),
    "an old version": head(line="GET /v2 HTTP/0.9"),
    "a new version": head(line="GET /v2 HTTP/9.9"),
    "no version": b"GET /v2\r\n\r\n",
    "the second version": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a proxy's line": head(line="GET http://169.254.169.254/latest HTTP/1.1"),
    "a tunnel": head(line="CONNECT example.org:443 HTTP/1.1"),
    "an asterisk": head(line="OPTIONS * HTTP/1.1"),
    "a long path": head(line=f"GET /{'a' * 200_000} HTTP/1.1"),
    "a long field": head(f"X: {'a' * 1_000_000}"),
    "many fields": head(*(f"X-{number}: a" for number in range(20_000))),
    "an upgrade": head(
        "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", line="GET /v2 HTTP/1.1",
    ),
    "an upgrade to the second version": head(
        "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk",
        line="GET /v2 HTTP/1.1",
    ),
    "expecting": head("Expect: the-unexpected", "Content-Length: 5") + b"12345",
    "noise": random.Random(0).randbytes(10_000),
}  # fmt: skip


@pytest.mark.parametrize("name", SMUGGLED)
def test_no_second_request_hides_in_a_first_of_two_lengths(server: Any, name: str) -> None:
    before = len(server.events("request"))
    answer = exchange(server.port, SMUGGLED[name])
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
    assert all(status < 500 or status == 501 for status in statuses), answer[:500]
    assert b"Traceback" not in answer
    ambiguous = name in {"two lengths", "length and chunks", "chunks and length", "two codings"}
    if ambiguous:
        assert len(statuses) <= 1, answer[:500]
        assert set(statuses) <= {400}, answer[:500]
    assert len(server.events("request")) - before <= 2


def test_hundreds_of_connections_that_stall_keep_nobody_waiting(
    server: Any, honest: Callable[[], None]
) -> None:
    beginnings = [
        b"",
        b"G",
        b"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nX: ",
        head("Content-Length: 1000000"),
        head("Content-Length: 1000000") + b"x" * 1000,
        head("Transfer-Encoding: chunked") + b"5\r\n1",
    ]
    with ExitStack() as open_ones:
        connections = [
            open_ones.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(CONNECTIONS)
        ]
        for number, connection in enumerate(connections):
            connection.sendall(beginnings[number % len(beginnings)])
        for _ in range(3):
            for connection in connections[2 :: len(beginnings)]:
                connection.sendall(b"x")
            honest()
            assert server.client.get("/v2/health/live").elapsed.total_seconds() < 1


def test_connections_closed_by_half_or_reset_leave_nothing(
    server: Any, photo: Path, eventually: Eventually
) -> None:
    image = photo.read_bytes()
    request = head(f"Content-Length: {len(image)}") + image
    process: psutil.Process = server.process
    server.client.get("/v2/health/live")
    before = process.num_fds()
    exchange(
        server.port, request
    )  # who closes its half has left, as with other servers of its kind
    for length in (1, 40, len(request) - len(image), len(request) - 1, len(request)):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request[:length])
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    eventually(lambda: process.num_fds() <= before)


def test_random_paths_and_methods_leave_the_metrics_small(server: Any) -> None:
    chance = random.Random(1)
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"]
    starts = ["/", "/v2/models/", "/predictions/", "/v2/", "/requests/", "/v2/models/resnet18/"]
    letters = string.ascii_letters + string.digits + "-._~%/!$&'()*+,;=:@?"
    server.client.get("/metrics")
    before = len(server.client.get("/metrics").text.splitlines())
    memory = server.process.memory_info().rss
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        reader = connection.makefile("rb")
        for _ in range(PATHS):
            rest = "".join(chance.choices(letters, k=chance.randrange(40)))
            rest = re.sub("%(?![0-9a-f]{2})", "%2e", rest)
            method = chance.choice(methods)
            line = f"{method} {chance.choice(starts)}{rest} HTTP/1.1"
            connection.sendall(head("Content-Length: 0", line=line))
            assert _status(reader, has_body=method != "HEAD") in {200, 400, 404, 405}, line
    lines = server.client.get("/metrics").text.splitlines()
    assert len(lines) - before < 400
    assert not [line for line in lines if "requests_total" in line and "unknown" not in line and "resnet18" not in line and not line.startswith("#")]  # fmt: skip  # noqa: E501
    assert server.process.memory_info().rss - memory < 64 << 20


def _status(reader: Any, *, has_body: bool) -> int:
    status = int(reader.readline().split()[1])
    length = 0
    while (line := reader.readline()) != b"\r\n":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if has_body:
        reader.read(length)
    return status


@pytest.mark.parametrize(
    "value",
    ["a\x0bb", "é", "a" * 5000, "${jndi:ldap://x}", "<script>", "'; --", "%0d%0aX: y", "\x7f"],
)
def test_nothing_from_a_caller_shapes_a_header_or_a_line_of_the_log(
    server: Any, photo: Path, value: str
) -> None:
    names = ("X-Request-ID", "Cicada-Strategy", "Priority", "traceparent", "Content-Type", "Accept")
    for name in names:
        image = photo.read_bytes()
        fields = (f"Content-Length: {len(image)}", "Connection: close")
        field = f"{name}: {value}\r\n\r\n".encode()
        answer = said(server.port, head(*fields).removesuffix(b"\r\n") + field + image)
        assert re.match(rb"HTTP/1\.1 (200|400|415) ", answer), answer[:200]
        assert value.encode() not in answer.partition(b"\r\n\r\n")[0]
    assert all(line.startswith("{") for line in server.log.splitlines())
    assert value not in server.log
