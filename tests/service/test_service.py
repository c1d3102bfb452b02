"""The real server with real handler processes, over real HTTP."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torchvision
from torch import Tensor, nn

from handler.strategies import STRATEGIES

Eventually = Callable[[Callable[[], object]], None]
Server = Any
StartServer = Callable[..., Server]
CLASSES = 1000


def inference(value: Tensor, **more: Any) -> dict[str, Any]:
    tensor = {
        "name": "input",
        "shape": list(value.shape),
        "datatype": "FP32",
        "data": value.flatten().tolist(),
    }
    return {"inputs": [tensor], **more}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logits_over_http_are_torchvisions(
    server: Server, reference: nn.Module, strategy: str
) -> None:
    value = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    body = inference(value, parameters={"strategy": strategy})
    response = server.client.post("/v2/models/resnet18/infer", json=body)
    assert response.status_code == 200, response.text
    output = response.json()["outputs"][0]
    assert (output["name"], output["shape"]) == ("logits", [2, CLASSES])
    with torch.inference_mode():
        expected = reference(value)
    assert torch.equal(torch.tensor(output["data"]).reshape(2, CLASSES), expected)
    assert response.headers["Cicada-Strategy"] == strategy


@pytest.mark.usefixtures("one_thread")
def test_a_photo_gets_the_labels_that_torchvision_gives_it(
    server: Server, reference: nn.Module, photo: Path, photo_tensor: Tensor
) -> None:
    response = server.client.post("/predictions/resnet18?top=7", content=photo.read_bytes())
    with torch.inference_mode():
        values, indices = torch.softmax(reference(photo_tensor), dim=1).topk(7)
    categories = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    expected = [categories[index] for index in indices[0].tolist()]
    assert [answer["label"] for answer in response.json()] == expected
    given = torch.tensor([answer["probability"] for answer in response.json()])
    assert torch.allclose(given, values[0], rtol=1e-4)


def test_raw_form_and_chunked_bodies_are_answered_alike(server: Server, photo: Path) -> None:
    image = photo.read_bytes()
    chunks = (image[start : start + 1000] for start in range(0, len(image), 1000))
    answers = [
        server.client.post("/predictions/resnet18", content=image).json(),
        server.client.post("/predictions/resnet18", files={"file": image}).json(),
        server.client.post("/predictions/resnet18", content=chunks).json(),
        server.client.post("/invocations", content=image).json(),
    ]
    assert len(answers[0]) == 5
    assert answers == [answers[0]] * 4


def test_the_times_of_the_parts_fit_into_the_whole(server: Server, photo: Path) -> None:
    response = server.client.post("/predictions/resnet18", content=photo.read_bytes())
    shown = server.client.get(f"/requests/{response.headers['X-Request-ID']}").json()
    assert 0 <= shown["receive_ms"] + shown["queue_ms"] <= shown["total_ms"]
    assert 0 < shown["pipeline_ms"] <= shown["total_ms"]
    assert 0 < shown["figures"]["utilization"] <= shown["figures"]["occupancy"] <= 1
    ends = [span["end_ms"] for span in shown["spans"]]
    assert shown["receive_ms"] <= min(span["start_ms"] for span in shown["spans"])
    assert max(ends) <= shown["total_ms"]
    executed = [span["name"] for span in shown["spans"] if span["kind"] == "execute"]
    assert executed == shown["layers"]


def test_what_is_no_image_is_bad_input(server: Server) -> None:
    response = server.client.post("/predictions/resnet18", content=b"GET me a dog")
    assert response.status_code == 400
    assert "image" in response.json()["error"]


@pytest.mark.parametrize(
    "path",
    ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/resnet18", "/ping", "/_/ready"],
)
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == get.headers["Content-Length"]
    assert "X-Request-ID" in head.headers


def test_a_body_declared_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(
            b"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"
        )
        answer = _read_to_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"over the limit of 33554432 bytes" in answer


def _read_to_the_end(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def test_a_caller_that_leaves_is_noted_and_delays_nobody(
    server: Server, photo: Path, eventually: Eventually
) -> None:
    image = photo.read_bytes()
    for strategy in ("traditional", "cicada"):
        head = (
            f"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nX-Request-ID: left-{strategy}\r\n"
            f"Cicada-Strategy: {strategy}\r\nContent-Length: {len(image)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + image)
        eventually(lambda: server.client.get(f"/requests/left-{strategy}").status_code == 200)  # noqa: B023
        assert server.client.get(f"/requests/left-{strategy}").json()["status"] == 499
    assert server.client.post("/predictions/resnet18", content=image).status_code == 200
    assert len(server.handlers()) == 1
    assert not server.events("handler ended")


def test_invoke_prints_labels_and_times(server: Server, photo: Path) -> None:
    run = _cicada("invoke", str(photo), "--url", server.url, "--strategy", "mini", "--top", "2")
    assert run.returncode == 0, run.stderr
    for shown in ("probability", "pipeline", "compute", "utilization", "mini", "resnet18"):
        assert shown in run.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "none"], "model 'none' is not prepared; prepared are resnet18"),
        (["--model", "a/b"], "no such path"),
        (["--strategy", "fast"], "strategy 'fast' is unknown, expected one of traditional"),
    ],
)
def test_invoke_tells_the_servers_sentence(
    server: Server, photo: Path, arguments: list[str], sentence: str
) -> None:
    run = _cicada("invoke", str(photo), "--url", server.url, *arguments)
    assert run.returncode == 1
    assert run.stderr.startswith(f"cicada: {sentence}")
    assert run.stdout == ""


def test_invoke_tells_that_nobody_answers(photo: Path, free_port: int) -> None:
    run = _cicada("invoke", str(photo), "--url", f"http://127.0.0.1:{free_port}")
    assert run.returncode == 1
    assert "does not answer" in run.stderr


def _cicada(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **(environment or {})},
    )


def test_it_listens_before_a_handler_is_ready_and_a_request_waits_for_one(
    start_server: StartServer, photo: Path
) -> None:
    server = start_server()
    assert server.client.get("/v2/health/live").status_code == 200
    assert server.client.get("/v2/health/ready").status_code == 503
    response = server.client.post("/predictions/resnet18", content=photo.read_bytes())
    assert response.status_code == 200
    assert server.client.get("/v2/health/ready").status_code == 200


def test_a_killed_handler_is_replaced_and_the_next_request_is_served(
    start_server: StartServer, photo: Path, eventually: Eventually
) -> None:
    server = start_server()
    server.wait_until_ready()
    (handler,) = server.handlers()
    handler.kill()
    eventually(lambda: server.events("handler ended"))
    response = server.client.post("/predictions/resnet18", content=photo.read_bytes())
    assert response.status_code == 200
    (ended,) = server.events("handler ended")
    assert (ended["cause"], ended["sentence"]) == ("SIGKILL", "was killed by SIGKILL")
    assert (
        'cicada_handler_restarts_total{cause="SIGKILL"} 1.0' in server.client.get("/metrics").text
    )


def test_handlers_die_with_a_server_that_is_killed(
    start_server: StartServer, eventually: Eventually
) -> None:
    server = start_server()
    server.wait_until_ready()
    (handler,) = server.handlers()
    server.process.kill()
    eventually(lambda: not _alive(handler))


def test_even_a_handler_that_is_still_starting_dies_with_its_server(
    start_server: StartServer, eventually: Eventually
) -> None:
    server = start_server()
    eventually(server.handlers)
    (handler,) = server.handlers()
    server.process.kill()
    eventually(lambda: not _alive(handler))


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_request_under_way_finish(
    start_server: StartServer, photo: Path, eventually: Eventually, number: signal.Signals
) -> None:
    server = start_server()
    server.wait_until_ready()
    (handler,) = server.handlers()
    statuses: list[int] = []

    def ask() -> None:
        headers = {"Cicada-Strategy": "traditional"}
        response = server.client.post(
            "/predictions/resnet18", content=photo.read_bytes(), headers=headers
        )
        statuses.append(response.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: statuses or "cicada_in_flight 1.0" in _metrics(server))
    server.process.send_signal(number)
    asking.join(60)
    assert statuses == [200]
    assert server.process.wait(60) == 0
    assert not _alive(handler)
    assert [event["event"] for event in server.events()][-1] == "stopped"


def _metrics(server: Server) -> str:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        return _read_to_the_end(connection).decode()


def test_a_signal_during_start_up_ends_it_too(
    start_server: StartServer, eventually: Eventually
) -> None:
    server = start_server()
    eventually(server.handlers)
    (handler,) = server.handlers()
    assert server.stop() == 0
    assert not _alive(handler)


def test_a_second_signal_ends_it_at_once(
    start_server: StartServer, photo: Path, eventually: Eventually
) -> None:
    server = start_server(CICADA_DRAIN_S="60")
    image = photo.read_bytes()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:  # never sends its body
        connection.sendall(
            f"POST /predictions/resnet18 HTTP/1.1\r\nHost: a\r\nContent-Length: {len(image)}\r\n\r\n".encode()
        )
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.events("draining"))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 1


def test_the_log_is_json_with_a_line_for_each_inference(
    start_server: StartServer, photo: Path
) -> None:
    server = start_server()
    response = server.client.post("/predictions/resnet18", content=photo.read_bytes())
    server.client.get("/v2")
    server.client.post("/predictions/none", content=b"secret")
    assert server.stop() == 0
    assert all(line.startswith("{") for line in server.log.splitlines())
    first, second = server.events("request")
    assert first["id"] == response.headers["X-Request-ID"]
    assert (first["model"], first["strategy"], first["status"]) == ("resnet18", "cicada", 200)
    assert first["version"] == response.headers["Cicada-Version"]
    assert first["pipeline_ms"] <= first["total_ms"]
    assert (second["status"], second["model"], second["error"]) == (404, None, None)
    assert [event["event"] for event in server.events()] == [
        "listening",
        "handler ready",
        "request",
        "request",
        "draining",
        "stopped",
    ]
    assert "secret" not in server.log


def test_a_port_in_use_is_one_sentence(server: Server) -> None:
    run = _cicada("serve", environment={"HOST": "127.0.0.1", "PORT": str(server.port)})
    assert run.returncode == 1
    assert (
        run.stderr
        == f"cicada: cannot listen on 127.0.0.1 port {server.port}: Address already in use\n"
    )


def test_a_wrong_setting_is_one_sentence_and_exit_code_2() -> None:
    run = _cicada("serve", environment={"CICADA_HANDLERS": "none"})
    assert run.returncode == 2
    assert run.stderr.startswith("cicada: CICADA_HANDLERS is 'none': ")
    assert run.stderr.count("\n") == 1
