"""API keys: what needs one, what does not, and that a key is seen nowhere."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from runtime import access
from runtime.app import create_app
from runtime.settings import Settings, SettingsError

KEYS = ("first-key-of-ours", "second!key_of-ours")
INFERENCE = ("/predictions/tiny", "/v2/models/tiny/infer", "/invocations")


@pytest.fixture
def client_of(stub_command: list[str], tiny_weights: Path) -> Any:
    @asynccontextmanager
    async def client(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
        app = create_app(Settings(**{"weights": tiny_weights, **settings}), command=stub_command)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://cicada") as opened,
        ):
            yield opened, app

    return client


@pytest.mark.anyio
@pytest.mark.parametrize("path", INFERENCE)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong-key"},
        {"Authorization": f"Bearer {KEYS[0]}x"},
        {"Authorization": f"Bearer {KEYS[0][:-1]}"},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": ",".join(KEYS)},
        {"X-API-Key": ",".join(KEYS)},
        {"X-API-Key": ""},
        {"X-API-Key": b"\xff" * 20},
    ],
)
async def test_without_a_key_there_is_no_inference(
    client_of: Any, path: str, headers: dict[str, Any]
) -> None:
    async with client_of(api_keys=",".join(KEYS)) as (client, app):
        response = await client.post(path, content=b"image", headers=headers)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == 'Bearer realm="cicada"'
        assert "X-Request-ID" in response.headers
        assert set(response.json()) == {"error"}
        assert len(app.state.service.records) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "X-API-Key"])
async def test_each_key_opens_in_either_header(client_of: Any, key: str, scheme: str) -> None:
    header = {"X-API-Key": key} if scheme == "X-API-Key" else {"Authorization": f"{scheme} {key}"}
    async with client_of(api_keys=",".join(KEYS)) as (client, _):
        answer = await client.post("/predictions/tiny", content=b"image", headers=header)
        assert answer.status_code == 200
        request_id = answer.headers["X-Request-ID"]
        for path in ("/requests", f"/requests/{request_id}", f"/requests/{request_id}/trace"):
            assert (await client.get(path)).status_code == 401
            assert (await client.head(path)).status_code == 401
            assert (await client.get(path, headers=header)).status_code == 200


OPEN = (
    *("/v2", "/v2/health/live", "/v2/models/tiny", "/_/health", "/models/tiny"),
    *("/", "/docs", "/openapi.json"),
)


@pytest.mark.anyio
async def test_health_and_metrics_are_open_until_they_are_switched(client_of: Any) -> None:
    def statuses(answers: list[httpx.Response]) -> list[int]:
        return [answer.status_code for answer in answers]

    async with client_of(api_keys=KEYS[0]) as (client, _):
        answers = [await client.get(path) for path in (*OPEN, "/metrics")]
        assert statuses(answers) == [200] * 9
    async with client_of(api_keys=KEYS[0], keys_for_health=True) as (client, _):
        answers = [await client.get(path) for path in (*OPEN, "/metrics")]
        assert statuses(answers) == [401] * 5 + [200] * 4
    async with client_of(api_keys=KEYS[0], keys_for_metrics=True) as (client, _):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/v2/health/live")).status_code == 200
        header = {"X-API-Key": KEYS[0]}
        assert (await client.get("/metrics", headers=header)).status_code == 200


@pytest.mark.anyio
async def test_without_keys_everything_is_open_and_described_so(client_of: Any) -> None:
    async with client_of() as (client, _):
        assert (await client.post("/predictions/tiny", content=b"image")).status_code == 200
        assert "securitySchemes" not in (await client.get("/openapi.json")).json()["components"]


@pytest.mark.anyio
async def test_the_description_says_which_routes_need_a_key(client_of: Any) -> None:
    async with client_of(api_keys=KEYS[0]) as (client, _):
        description = (await client.get("/openapi.json")).json()
    guarded = {
        path
        for path, operations in description["paths"].items()
        if any("401" in operation["responses"] for operation in operations.values())
    }
    assert guarded == {
        "/v2/models/{model}/infer",
        "/v2/models/{model}/versions/{version}/infer",
        "/predictions/{model}",
        "/invocations",
        "/events",
        "/status",
        "/status/history",
        "/requests",
        "/requests/{request_id}",
        "/requests/{request_id}/trace",
    }
    assert set(description["components"]["securitySchemes"]) == {"bearer", "key"}


@pytest.mark.anyio
async def test_every_route_that_is_open_by_name_exists(client_of: Any) -> None:
    async with client_of() as (client, _):
        described = set((await client.get("/openapi.json")).json()["paths"])
    assert described >= access.HEALTH | access.METRICS


@pytest.mark.parametrize("given", ["short", "a b c d e f", "good-key-1,", ",", "clé-clé-clé"])
def test_a_key_that_cannot_be_one_is_refused_and_not_shown(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CICADA_API_KEYS", given)
    with pytest.raises(SettingsError) as refused:
        Settings()
    assert str(refused.value) == (
        "CICADA_API_KEYS is not usable: expected keys of 8 to 256 visible ASCII characters, between commas"
    )


def test_a_key_is_in_no_log_no_answer_and_no_handler(
    start_server: Callable[..., Any], photo: Path
) -> None:
    server = start_server(CICADA_API_KEYS=",".join(KEYS), CICADA_LOG_LEVEL="debug")
    server.wait_until_ready()
    texts = []
    for headers in ({"X-API-Key": KEYS[0]}, {"Authorization": f"Bearer {KEYS[1]}"}, {}):
        for path in ("/predictions/resnet18", "/v2/models/resnet18/infer", "/nothing"):
            answer = server.client.post(path, content=photo.read_bytes(), headers=headers)
            texts.append(answer.text + str(answer.headers))
    assert any("probability" in text for text in texts), texts
    (handler,) = server.handlers()
    environment = Path(f"/proc/{handler.pid}/environ").read_bytes().decode()
    texts += [server.log, environment]
    texts += [str(server.client.get(path).text) for path in ("/metrics", "/openapi.json")]
    assert not [text for text in texts if any(key in text for key in KEYS)]
    assert "CICADA_THREADS=1" in environment
    assert "CICADA_API_KEYS" not in os.environ


def test_the_command_shows_the_key_that_it_is_given(
    serve_stubs: Callable[..., Any], photo: Path
) -> None:
    server = serve_stubs(CICADA_API_KEYS=KEYS[0])
    command = [sys.executable, "-m", "runtime.cli", "invoke", str(photo), "--model", "tiny"]
    for given, code, said in (
        ((), 1, "expected an API key"),
        (("--api-key", "another-key"), 1, "the API key is not known"),
        (("--api-key", KEYS[0], "--timeline"), 0, ""),
    ):
        run = subprocess.run(
            [*command, "--url", server.url, *given],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (run.returncode, said in run.stderr) == (code, True), run.stderr
