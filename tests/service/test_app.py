"""The application over stub handlers: what a handler does decides what the caller sees."""

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import http_sf
import httpx
import pytest
from fastapi import FastAPI

from models.manifest import InputSpec, LayerEntry, Manifest
from models.store import Store
from runtime import open_inference
from runtime.app import create_app
from runtime.settings import Settings

pytestmark = pytest.mark.anyio

Until = Callable[[Callable[[], object]], Awaitable[None]]
SIDE = 2


def prepare(store: Store, name: str) -> str:
    """A model without weights, whose input is 3 x 2 x 2 and which has 3 classes; returns its version."""
    layer = LayerEntry(index=0, name="relu", file=None, bytes=0, sha256=None, parameters=())
    manifest = Manifest(
        format_version=1,
        architecture=name,
        image_size=SIDE,
        granularity="block",
        weight_format="safetensors",
        classes=3,
        input=InputSpec(
            resize=SIDE, crop=SIDE, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear"
        ),
        labels=None,
        source="random:0",
        layers=(layer,),
    )
    with store.writer(name) as writer:
        return writer.publish(manifest).version


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    prepare(Store(tmp_path / "weights"), "tiny")
    return tmp_path / "weights"


class Apps:
    def __init__(self, command: list[str], weights: Path, until: Until) -> None:
        self._command = command
        self._weights = weights
        self._until = until

    @asynccontextmanager
    async def client(
        self, *arguments: str, ready: bool = True, **settings: Any
    ) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
        chosen = Settings(**{"weights": self._weights, "timeout_s": 20.0, **settings})
        app = create_app(chosen, command=[*self._command, *arguments])
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://cicada"
            ) as client,
        ):
            if ready:
                await self._until(lambda: app.state.service.pool.ready)
            yield client, app


@pytest.fixture
def apps(stub_command: list[str], weights: Path, until: Until) -> Apps:
    return Apps(stub_command, weights, until)


def tensor(**changes: Any) -> dict[str, Any]:
    return {
        "name": "input",
        "shape": [1, 3, SIDE, SIDE],
        "datatype": "FP32",
        "data": [0.5] * 12,
        **changes,
    }


def nested(rows: int = 1) -> list[Any]:
    return [[[[0.0] * SIDE] * SIDE] * 3] * rows


async def test_a_prediction_is_labels_and_headers(apps: Apps) -> None:
    async with apps.client() as (client, app):
        response = await client.post("/predictions/tiny?top=2", content=b"image")
        assert response.status_code == 200
        assert [answer["index"] for answer in response.json()] == [0, 1]
        headers = response.headers
        assert headers["Cicada-Model"] == "tiny"
        assert headers["Cicada-Version"] == "0123456789ab"
        assert headers["Cicada-Strategy"] == "cicada"
        assert headers["Cicada-Layers"] == "3"
        assert headers["Cicada-Work"] == "layer=1.500, weight=2.000, compute=0.250"
        assert headers["Cicada-Placeholder"] == "bytes=42, usage=61.250"
        names = [name for name, _ in parsed(headers["Server-Timing"], "list")]
        assert [str(name) for name in names] == [
            "receive", "queue", "input", "construct", "initialize",
            "retrieve", "apply", "execute", "pipeline", "total",
        ]  # fmt: skip
        record = app.state.service.records.get(headers["X-Request-ID"])
        assert record.receive_ms + record.queue_ms <= record.total_ms


def parsed(value: str, kind: str) -> Any:
    return http_sf.parse(value.encode(), tltype=kind)


async def test_every_header_is_a_structured_field(apps: Apps) -> None:
    async with apps.client() as (client, _):
        headers = (await client.post("/predictions/tiny", content=b"image")).headers
    parsed(headers["Server-Timing"], "list")
    for name in ("Work", "Wait", "Idle"):
        assert list(parsed(headers[f"Cicada-{name}"], "dictionary")) == [
            "layer",
            "weight",
            "compute",
        ]
    for name in ("Utilization", "Occupancy", "Layers", "Strategy", "Model"):
        parsed(headers[f"Cicada-{name}"], "item")
    assert list(parsed(headers["Cicada-Placeholder"], "dictionary")) == ["bytes", "usage"]


@pytest.mark.parametrize(("top", "count"), [("1", 1), ("3", 3), ("4", 3), ("999999999999", 3)])
async def test_top_is_clamped_to_the_classes_there_are(apps: Apps, top: str, count: int) -> None:
    async with apps.client() as (client, _):
        answer = (await client.post(f"/predictions/tiny?top={top}", content=b"image")).json()
        assert len(answer) == count


@pytest.mark.parametrize("top", ["0", "-1", "many", "1.5", ""])
async def test_a_top_that_is_no_count_is_bad_input(apps: Apps, top: str) -> None:
    async with apps.client() as (client, _):
        response = await client.post(f"/predictions/tiny?top={top}", content=b"image")
        assert response.status_code == 400
        assert response.json()["error"].startswith("query top: ")


async def test_numbers_that_are_not_finite_become_null(apps: Apps) -> None:
    async with apps.client() as (client, _):
        labels = (await client.post("/predictions/tiny", content=b"image")).json()
        assert labels[1] == {
            "label": "cicada",
            "index": 1,
            "probability": None,
            "finite": False,
        }
        assert [label.get("finite") for label in labels] == [None, False, None]
        response = await client.post("/v2/models/tiny/infer", json={"inputs": [tensor()]})
        logits = response.json()["outputs"][0]
        assert logits["data"] == [1.0, None, -0.5]
        assert logits["parameters"] == {"finite": False}


@pytest.mark.parametrize(
    ("header", "parameter", "expected"),
    [
        (None, None, "mini"),
        ("pisel", None, "pisel"),
        (None, "preload", "preload"),
        ("traditional", "preload", "traditional"),
    ],
)
async def test_the_header_names_the_strategy_else_the_parameter_else_the_setting(
    apps: Apps, header: str | None, parameter: str | None, expected: str
) -> None:
    body = {"inputs": [tensor()], "parameters": {"strategy": parameter} if parameter else {}}
    async with apps.client(strategy="mini") as (client, _):
        headers = {"Cicada-Strategy": header} if header else {}
        response = await client.post("/v2/models/tiny/infer", json=body, headers=headers)
        assert response.headers["Cicada-Strategy"] == expected


@pytest.mark.parametrize(
    "send",
    [
        {"headers": {"Cicada-Strategy": "fast"}, "json": {"inputs": [tensor()]}},
        {"json": {"inputs": [tensor()], "parameters": {"strategy": "fast"}}},
        {"json": {"inputs": [tensor()], "parameters": {"strategy": ["cicada"]}}},
    ],
)
async def test_an_unknown_strategy_is_answered_with_the_known_ones(
    apps: Apps, send: dict[str, Any]
) -> None:
    async with apps.client() as (client, _):
        response = await client.post("/v2/models/tiny/infer", **send)
        assert response.status_code == 400
        assert "traditional, pisel, mini, preload, cicada" in response.json()["error"]


async def test_an_inference_answers_as_the_protocol_says(apps: Apps, weights: Path) -> None:
    version = Store(weights).open("tiny").version
    outputs = [{"name": "logits"}, {"name": "labels", "parameters": {"top": 1}}]
    body = {"id": "mine", "inputs": [tensor(data=nested())], "outputs": outputs}
    async with apps.client() as (client, app):
        response = await client.post(f"/v2/models/tiny/versions/{version}/infer", json=body)
        (handler,) = app.state.service.pool.pids
    logits = {"name": "logits", "datatype": "FP32", "shape": [1, 3], "data": [1.0, None, -0.5]}
    assert response.json() == {
        "model_name": "tiny",
        "model_version": version,
        "id": "mine",
        "outputs": [
            {**logits, "parameters": {"finite": False}},
            {"name": "labels", "datatype": "BYTES", "shape": [1, 1], "data": [str(handler)]},
        ],
    }


async def test_all_outputs_are_answered_where_none_is_named(apps: Apps) -> None:
    async with apps.client() as (client, _):
        unnamed: list[dict[str, Any]] = [{}, {"outputs": None}, {"outputs": []}]
        for outputs in unnamed:
            body = {"inputs": [tensor()], **outputs}
            answer = (await client.post("/v2/models/tiny/infer", json=body)).json()
            shapes = {output["name"]: output["shape"] for output in answer["outputs"]}
            assert shapes == {"logits": [1, 3], "probabilities": [1, 3], "labels": [1, 3]}


async def test_outputs_come_in_the_order_asked_for(apps: Apps) -> None:
    names = ["labels", "probabilities", "logits"]
    body = {"inputs": [tensor()], "outputs": [{"name": name} for name in names]}
    async with apps.client() as (client, _):
        response = await client.post("/v2/models/tiny/infer", json=body)
        assert [output["name"] for output in response.json()["outputs"]] == names


def _inputs(*inputs: Any) -> str:
    return json.dumps({"inputs": inputs})


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "the body is not JSON: EOF"),
        ("{", "the body is not JSON: EOF"),
        ("[" * 100_000, "the body is not JSON: recursion limit"),
        ('{"inputs": [NaN]}', "the body is not JSON: expected value"),
        ("[]", "the request: input should be a valid dictionary"),
        ("{}", "inputs: field required"),
        ('{"inputs": 5}', "inputs: input should be a valid list"),
        (_inputs(), "inputs are [], expected exactly one, named 'input'"),
        (_inputs(tensor(), tensor()), "inputs are ['input', 'input'], expected exactly one"),
        (_inputs(tensor(name="x")), "inputs are ['x'], expected exactly one"),
        (_inputs(tensor(datatype="INT8")),
         "input 'input' has datatype 'INT8', expected one of FP32, FP64, FP16, BF16, UINT8, BYTES"),
        (_inputs(tensor(data=None)), "input 'input' has neither data nor binary_data_size"),
        (_inputs(tensor(shape=[1.0, 3, 2, 2])), "inputs.0.shape.0: input should be a valid integer"),
        (_inputs(tensor(shape=["1", 3, 2, 2])), "inputs.0.shape.0: input should be a valid integer"),
        (_inputs(tensor(parameters={"binary_data_size": 48}, data=None)),
         "has binary_data_size, expected the header Inference-Header-Content-Length with it"),
        (_inputs(tensor(shape=[3, 2, 2])), "has shape [3, 2, 2], expected [n, 3, 2, 2]"),
        (_inputs(tensor(shape=[0, 3, 2, 2], data=[])), "has shape [0, 3, 2, 2], expected [n, 3, 2, 2]"),
        (_inputs(tensor(shape=[-1, 3, 2, 2])), "has shape [-1, 3, 2, 2], expected [n, 3, 2, 2]"),
        (_inputs(tensor(shape=[1, 3, 2, 9])), "has shape [1, 3, 2, 9], expected [n, 3, 2, 2]"),
        (_inputs(tensor(shape=[10**30, 3, 2, 2])), "expected sizes below 2147483648"),
        (_inputs(tensor(shape=[10**9, 3, 2, 2])),
         "has shape [1000000000, 3, 2, 2]: 48000000000 bytes in FP32, over the limit"),
        (_inputs(tensor(shape=[10**5, 3, 2, 2])), "has 12 elements, expected 1200000 elements"),
        (_inputs(tensor(data=[1.0] * 11)), "has 11 elements, expected 12 elements"),
        (_inputs(tensor(data=nested(2))), "has 24 elements, expected 12 elements"),
        (_inputs(tensor(data=[[1.0] * 12])), "is nested otherwise, expected 12 elements"),
        (_inputs(tensor(data=[[1.0], [1.0, 2.0]])), "is nested otherwise, expected 12 elements"),
        (_inputs(tensor(data=["1.0"] * 12)), "holds '1.0', expected numbers"),
        (_inputs(tensor(data=[True] * 12)), "holds True, expected numbers"),
        (_inputs(tensor(data=[None] * 12)), "holds None, expected numbers"),
        (_inputs(tensor(data={"a": 1})), "is {'a': 1}, expected 12 elements"),
        (_inputs(tensor(data=[10**40] * 12)), "holds a number beyond the range of FP32"),
        (_inputs(tensor(data=[1e39] * 12)), "holds a number beyond the range of FP32"),
        ('{"inputs": [{"name": "input", "shape": [1,3,2,2], "datatype": "FP32", "data": '
         + json.dumps([0] * 11)[:-1] + ", 1e999]}]}", "beyond the range of FP32"),
        (json.dumps({"inputs": [tensor()], "outputs": [{"name": "x"}]}),
         "output 'x' is unknown, expected one of logits, probabilities, labels"),
    ],
)  # fmt: skip
async def test_a_bad_inference_request_is_told_what_was_expected(
    apps: Apps, body: str, sentence: str
) -> None:
    async with apps.client() as (client, app):
        response = await client.post("/v2/models/tiny/infer", content=body)
        assert (response.status_code, sentence in response.json()["error"]) == (400, True), (
            response.text
        )
        assert app.state.service.pool.running == 0


async def test_numbers_may_be_whole(apps: Apps) -> None:
    async with apps.client() as (client, _):
        body = {"inputs": [tensor(data=[*range(11), 2.5])]}
        assert (await client.post("/v2/models/tiny/infer", json=body)).status_code == 200


async def test_metadata_tells_inputs_outputs_and_versions(apps: Apps, weights: Path) -> None:
    version = Store(weights).open("tiny").version
    async with apps.client() as (client, _):
        server = (await client.get("/v2")).json()
        assert server["name"] == "cicada"
        assert server["extensions"] == ["binary_tensor_data", "classification", "parameters"]
        for path in ("/v2/models/tiny", f"/v2/models/tiny/versions/{version}"):
            assert (await client.get(path)).json() == {
                "name": "tiny",
                "versions": [version],
                "platform": "pytorch_safetensors",
                "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 3, 2, 2]}],
                "outputs": [
                    {"name": "logits", "datatype": "FP32", "shape": [-1, 3]},
                    {"name": "probabilities", "datatype": "FP32", "shape": [-1, 3]},
                    {"name": "labels", "datatype": "BYTES", "shape": [-1, -1]},
                ],
            }
            ready = (await client.get(f"{path}/ready")).json()
            assert ready == {"name": "tiny", "ready": True}


@pytest.mark.parametrize(
    ("method", "path", "sentence"),
    [
        ("GET", "/v2/models/huge", "model 'huge' is not prepared; prepared are tiny"),
        ("GET", "/v2/models/huge/ready", "model 'huge' is not prepared"),
        ("GET", "/v2/models/..%2f..%2fetc", "no such path"),
        ("GET", "/v2/models/%2e%2e", "is not prepared"),
        ("GET", "/v2/models/tiny/versions/1", "model 'tiny' has no version '1', it has "),
        ("POST", "/v2/models/huge/infer", "model 'huge' is not prepared"),
        ("POST", "/v2/models/tiny/versions/1/infer", "model 'tiny' has no version '1'"),
        ("POST", "/predictions/huge", "model 'huge' is not prepared"),
        ("GET", "/requests/none", "no request of that id"),
        ("GET", "/requests/none/trace", "no request of that id"),
        ("GET", "/nothing", "no such path"),
    ],
)
async def test_what_does_not_exist_is_404(
    apps: Apps, method: str, path: str, sentence: str
) -> None:
    async with apps.client() as (client, _):
        response = await client.request(method, path)
        assert (response.status_code, sentence in response.json()["error"]) == (404, True), (
            response.text
        )


async def test_another_method_is_405_and_names_the_right_one(apps: Apps) -> None:
    async with apps.client() as (client, _):
        response = await client.get("/predictions/tiny")
        assert response.status_code == 405
        assert response.headers["Allow"] == "POST"
        assert response.json() == {"error": "GET is not allowed on this path, expected POST"}


@pytest.mark.parametrize(
    "files",
    [
        {"file": ("a.jpg", b"image", "image/jpeg")},
        {"other": (None, b"text"), "file": ("a.jpg", b"image")},
    ],
)
async def test_a_form_carries_the_image_in_its_field_file(
    apps: Apps, files: dict[str, Any]
) -> None:
    async with apps.client() as (client, _):
        assert (await client.post("/predictions/tiny", files=files)).status_code == 200


async def test_a_form_carries_a_large_file_as_it_is(apps: Apps) -> None:
    async with apps.client() as (client, _):
        image = b"error 400 " + b"\r\n--x" * 40 + b"x" * (2 << 20)
        response = await client.post("/predictions/tiny", files={"file": ("a.jpg", image)})
        assert response.json()["error"].encode() == image[10:256]


@pytest.mark.parametrize(
    ("send", "sentence"),
    [
        ({"files": {"image": ("a.jpg", b"image")}}, "no file in a field named 'file'"),
        ({"files": {"file": (None, b"text")}}, "no file in a field named 'file'"),
        ({"files": {"file": ("a.jpg", b"")}}, "the body is empty, expected an image"),
        ({"content": b""}, "the body is empty, expected an image"),
        (
            {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
            "the multipart form cannot be read: Missing boundary",
        ),
        (
            {"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=b"}},
            "the multipart form cannot be read",
        ),
    ],
)
async def test_a_body_without_an_image_is_bad_input(
    apps: Apps, send: dict[str, Any], sentence: str
) -> None:
    async with apps.client() as (client, _):
        response = await client.post("/predictions/tiny", **send)
        assert (response.status_code, sentence in response.json()["error"]) == (400, True), (
            response.text
        )


async def test_an_encoded_body_is_415(apps: Apps) -> None:
    async with apps.client() as (client, _):
        headers = {"Content-Encoding": "br"}
        response = await client.post("/predictions/tiny", content=b"x", headers=headers)
        assert response.status_code == 415


async def test_json_that_would_hold_up_everyone_is_413_and_points_to_binary_data(
    apps: Apps,
) -> None:
    async with apps.client() as (client, _):
        response = await client.post(
            "/v2/models/tiny/infer", content=b" " * (open_inference.MAX_JSON_BYTES + 1)
        )
        assert response.status_code == 413
        assert "binary" in response.json()["error"]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_413(apps: Apps, declared: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 10

    async with apps.client(max_body_bytes=100) as (client, _):
        content = b"x" * 101 if declared else chunks()
        response = await client.post("/predictions/tiny", content=content)
        assert response.status_code == 413
        assert "over the limit of 100 bytes" in response.json()["error"]
        assert response.headers["Connection"] == "close"
        assert (await client.post("/predictions/tiny", content=b"x" * 100)).status_code == 200


@pytest.mark.parametrize(
    ("command", "status", "sentence"),
    [
        ("die SIGSEGV", 502, "the handler at work on this request was killed by SIGSEGV"),
        ("exit 3", 502, "the handler at work on this request exited with code 3"),
        ("hang", 504, "the request took longer than 0.5 s"),
        ("error 400 a text, expected an image", 400, "a text, expected an image"),
        ("error 500 model 'tiny': fc is damaged", 500, "model 'tiny': fc is damaged"),
    ],
)
async def test_what_befalls_the_handler_reaches_the_caller_and_the_record(
    apps: Apps, command: str, status: int, sentence: str
) -> None:
    async with apps.client(timeout_s=0.5) as (client, _):
        headers = {"X-Request-ID": "mine"}
        response = await client.post("/predictions/tiny", content=command, headers=headers)
        assert (response.status_code, response.json()) == (status, {"error": sentence})
        assert response.headers["X-Request-ID"] == "mine"
        record = (await client.get("/requests/mine")).json()
        assert (record["status"], record["error"]) == (status, sentence)
        assert record["spans"] == []
        metrics = (await client.get("/metrics")).text
        labels = f'model="tiny",status="{status}",strategy="cicada"'
        assert f"cicada_requests_total{{{labels}}} 1.0" in metrics


async def test_a_full_queue_is_429(apps: Apps, tmp_path: Path, until: Until) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with apps.client(queue=1) as (client, app):
        pool = app.state.service.pool
        held = asyncio.create_task(client.post("/predictions/tiny", content=f"hold {fifo}"))
        await until(lambda: pool.running == 1)
        waiting = asyncio.create_task(client.post("/predictions/tiny", content=b"image"))
        await until(lambda: pool.waiting == 1)
        refused = await client.post("/predictions/tiny", content=b"image")
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        metrics = (await client.get("/metrics")).text
        assert "cicada_queue_depth 1.0" in metrics
        assert "cicada_in_flight 1.0" in metrics
        await asyncio.to_thread(fifo.write_bytes, b"")
        assert [(await task).status_code for task in (held, waiting)] == [200, 200]


async def test_a_service_without_a_model_is_live_but_not_ready(apps: Apps, tmp_path: Path) -> None:
    async with apps.client(weights=tmp_path / "empty") as (client, _):
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        for path in ("/v2/health/ready", "/ping", "/_/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["error"].startswith("no model is prepared")
            assert response.headers["Retry-After"] == "1"
        response = await client.post("/predictions/tiny", content=b"image")
        assert response.status_code == 404
        assert response.json() == {"error": "model 'tiny' is not prepared; no model is prepared"}


async def test_a_service_whose_handlers_do_not_start_says_why(apps: Apps, until: Until) -> None:
    restart = 'cicada_handler_restarts_total{cause="exit"}'
    async with apps.client("--start", "exits", ready=False) as (client, app):
        metrics = app.state.service.metrics
        await until(lambda: restart.encode() in metrics.exposition("", ["tiny"])[0])  # counted last
        assert (await client.get("/_/health")).status_code == 200
        response = await client.get("/v2/health/ready")
        assert response.status_code == 503
        assert "the last one exited with code 7" in response.json()["error"]
        assert restart in (await client.get("/metrics")).text


async def test_a_damaged_manifest_is_500_and_names_the_model(apps: Apps, weights: Path) -> None:
    (weights / "tiny" / "manifest.json").write_text("{")
    async with apps.client() as (client, _):
        response = await client.post("/predictions/tiny", content=b"image")
        assert response.status_code == 500
        assert "model 'tiny'" in response.json()["error"]
        response = await client.get("/v2/health/ready")
        assert "tiny must be prepared anew" in response.json()["error"]


async def test_the_only_model_is_the_default(apps: Apps, weights: Path) -> None:
    async with apps.client() as (client, _):
        assert (await client.post("/invocations", content=b"i")).headers["Cicada-Model"] == "tiny"
        prepare(Store(weights), "other")
        response = await client.post("/invocations", content=b"image")
        assert response.status_code == 404
        assert "CICADA_DEFAULT_MODEL is not set and prepared are other, tiny" in response.text
    async with apps.client(default_model="other") as (client, _):
        assert (await client.post("/invocations", content=b"i")).headers["Cicada-Model"] == "other"


async def test_invocations_take_an_inference_request_as_json(apps: Apps) -> None:
    async with apps.client() as (client, _):
        response = await client.post("/invocations", json={"inputs": [tensor()]})
        assert response.json()["model_name"] == "tiny"


@pytest.mark.parametrize("given", ["mine", "a" * 128, "A.b_c~d-0"])
async def test_a_valid_request_id_is_kept(apps: Apps, given: str) -> None:
    async with apps.client() as (client, _):
        response = await client.get("/v2", headers={"X-Request-ID": given})
        assert response.headers["X-Request-ID"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "é", "a,b", "../x", "a\tb"])
async def test_an_invalid_request_id_is_replaced(apps: Apps, given: str) -> None:
    async with apps.client() as (client, _):
        headers = [(b"X-Request-ID", given.encode())]
        first, second = [
            (await client.get("/v2", headers=headers)).headers["X-Request-ID"] for _ in range(2)
        ]
        assert len(first) == 32
        assert first != second


async def test_an_unexpected_fault_is_told_without_a_traceback(
    apps: Apps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with apps.client() as (client, app):
        monkeypatch.setattr(app.state.service.store, "open", lambda *_: 1 / 0)
        response = await client.post("/predictions/tiny", content=b"image")
        assert response.status_code == 500
        assert response.json()["error"].startswith("an unexpected fault of the service")
        assert response.headers["X-Request-ID"] in {r.__dict__.get("id") for r in caplog.records}
        assert "ZeroDivisionError" in caplog.text
        assert "ZeroDivision" not in response.text


async def test_requests_are_listed_latest_first_and_shown_with_their_spans(apps: Apps) -> None:
    async with apps.client() as (client, _):
        for request_id in ("one", "two"):
            headers = {"X-Request-ID": request_id}
            await client.post("/predictions/tiny", content=b"image", headers=headers)
        listed = (await client.get("/requests")).json()["requests"]
        assert [request["id"] for request in listed] == ["two", "one"]
        shown = (await client.get("/requests/one")).json()
        assert shown["model"] == "tiny"
        assert shown["figures"]["placeholder_usage_ms"] == 61.25
        assert shown["layers"] == ["conv1", "relu", "fc"]
        assert {span["name"] for span in shown["spans"]} == {"conv1", "relu", "fc"}
        assert math.isclose(
            shown["suspensions"][0]["start_ms"] + 1e-5, shown["suspensions"][0]["end_ms"]
        )
        trace = (await client.get("/requests/one/trace")).json()
        assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


async def test_of_two_requests_with_one_id_the_later_is_shown(apps: Apps) -> None:
    async with apps.client() as (client, _):
        for content in (b"image", b"error 400 no"):
            await client.post("/predictions/tiny", content=content, headers={"X-Request-ID": "x"})
        assert (await client.get("/requests/x")).json()["status"] == 400
        assert len((await client.get("/requests")).json()["requests"]) == 1


async def test_only_the_last_256_requests_are_kept(apps: Apps) -> None:
    async with apps.client() as (client, _):
        for number in range(260):
            headers = {"X-Request-ID": f"r{number}"}
            await client.post("/predictions/none", headers=headers)
        listed = (await client.get("/requests")).json()["requests"]
        assert [request["id"] for request in listed] == [f"r{n}" for n in range(259, 3, -1)]


async def test_metrics_speak_openmetrics_when_asked(apps: Apps) -> None:
    async with apps.client() as (client, _):
        await client.post("/predictions/tiny", content=b"image")
        await client.post("/predictions/nobody-knows", content=b"image")
        plain = await client.get("/metrics")
        assert plain.headers["Content-Type"].startswith("text/plain; version=")
        assert 'model="unknown",status="404"' in plain.text
        assert "nobody-knows" not in plain.text
        assert (
            'cicada_span_seconds_count{kind="execute",model="tiny",strategy="cicada"} 1.0'
            in plain.text
        )
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        open_metrics = await client.get("/metrics", headers=accept)
        assert open_metrics.headers["Content-Type"].startswith("application/openmetrics-text")
        assert open_metrics.text.endswith("# EOF\n")


async def test_the_description_names_every_route(apps: Apps) -> None:
    async with apps.client() as (client, _):
        description = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    assert set(description["paths"]) == {
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/{model}",
        "/v2/models/{model}/versions/{version}",
        "/v2/models/{model}/ready",
        "/v2/models/{model}/versions/{version}/ready",
        "/v2/models/{model}/infer",
        "/v2/models/{model}/versions/{version}/infer",
        "/predictions/{model}",
        "/invocations",
        "/ping",
        "/_/ready",
        "/_/health",
        "/models",
        "/models/{model}",
        "/strategies",
        "/events",
        "/status",
        "/status/history",
        "/requests",
        "/requests/{request_id}",
        "/requests/{request_id}/trace",
        "/metrics",
    }
    body = description["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]
    assert "application/json" in body["content"]
    text = json.dumps(description)
    assert "422" not in text  # what the framework would answer; here it is 400
    references = set(re.findall(r'"\$ref": "(.*?)"', text))
    assert references
    for reference in references:
        node = description
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]
