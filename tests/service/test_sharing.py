"""What pages of other origins may do with the service; no handler is needed for that."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from handler.timeline import Figures, Span, UnitTimes
from runtime import frames
from runtime.app import create_app
from runtime.pool import Answer, Job
from runtime.settings import Settings

pytestmark = pytest.mark.anyio

PAGE = "https://page.example"
OTHER = "https://other.example:8443"


@pytest.fixture
def client(tmp_path: Path) -> Callable[..., httpx.AsyncClient]:
    def make(*origins: str) -> httpx.AsyncClient:
        app = create_app(Settings(weights=tmp_path / "weights", cors_origins=origins or None))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://cicada")

    return make


def names(value: str) -> set[str]:
    return {name.strip().lower() for name in value.split(",")}


def preflight(
    origin: str, method: str = "POST", headers: str = "cicada-strategy"
) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": headers,
    }


async def test_without_the_setting_nothing_is_shared(
    client: Callable[..., httpx.AsyncClient],
) -> None:
    async with client() as asking:
        answer = await asking.get("/v2/health/live", headers={"Origin": PAGE})
        assert answer.status_code == 200
        refused = await asking.options("/predictions/m", headers=preflight(PAGE))
        assert refused.status_code == 405
    for response in (answer, refused):
        shared = [name for name in response.headers if name.startswith(("access-", "timing-"))]
        assert shared == []


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/models/none", "/nowhere"])
async def test_every_answer_is_shared_with_the_origins_named(
    client: Callable[..., httpx.AsyncClient], path: str
) -> None:
    async with client(PAGE, OTHER) as asking:
        for origin in (PAGE, OTHER):
            headers = (await asking.get(path, headers={"Origin": origin})).headers
            assert headers["Access-Control-Allow-Origin"] == origin
            assert "Origin" in headers["Vary"]
            assert names(headers["Access-Control-Expose-Headers"]) >= {
                *("server-timing", "cicada-work", "cicada-wait", "cicada-version"),
                *("x-request-id", "retry-after", "traceparent", "inference-header-content-length"),
            }
            assert headers["Timing-Allow-Origin"] == f"{PAGE}, {OTHER}"


async def test_an_origin_that_is_not_named_gets_an_answer_that_its_browser_withholds(
    client: Callable[..., httpx.AsyncClient],
) -> None:
    async with client(PAGE) as asking:
        headers = (await asking.get("/v2/health/live", headers={"Origin": OTHER})).headers
        refused = await asking.options("/predictions/m", headers=preflight(OTHER))
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Timing-Allow-Origin"] == PAGE
    assert refused.status_code == 400
    assert "Access-Control-Allow-Origin" not in refused.headers


async def test_an_image_of_a_page_tells_no_origin_and_still_has_its_timing_shared(
    client: Callable[..., httpx.AsyncClient],
) -> None:
    async with client("*") as asking:
        headers = (await asking.get("/v2/health/live")).headers
    assert headers["Timing-Allow-Origin"] == "*"


async def test_a_fault_is_shared_as_well(
    client: Callable[..., httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.service.Service.model", lambda *_: 1 / 0)
    async with client("*") as asking:
        answer = await asking.get("/v2/models/any", headers={"Origin": PAGE})
    assert answer.status_code == 500
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert answer.headers["X-Request-ID"]


@pytest.mark.parametrize(
    "headers",
    [
        "cicada-strategy, content-type, x-request-id, priority",
        "inference-header-content-length,content-encoding",
        "traceparent, tracestate",
    ],
)
async def test_a_preflight_allows_what_the_routes_take(
    client: Callable[..., httpx.AsyncClient], headers: str
) -> None:
    async with client(PAGE) as asking:
        answer = await asking.options("/predictions/m", headers=preflight(PAGE, headers=headers))
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert names(answer.headers["Access-Control-Allow-Methods"]) == {"get", "head", "post"}
    assert names(answer.headers["Access-Control-Allow-Headers"]) >= names(headers)
    assert answer.headers["X-Request-ID"]


async def test_a_preflight_refuses_another_method_and_header(
    client: Callable[..., httpx.AsyncClient],
) -> None:
    async with client(PAGE) as asking:
        for asked in (preflight(PAGE, method="DELETE"), preflight(PAGE, headers="cookie2")):
            assert (await asking.options("/predictions/m", headers=asked)).status_code == 400


@pytest.mark.parametrize(
    "hostile",
    [
        "a\r\nSet-Cookie: a=b",
        "a\x00b",
        "é",
        " ",
        "a" * 129,
        "a, b",
        '"quoted"',
    ],
)
async def test_a_hostile_id_reaches_no_header(
    client: Callable[..., httpx.AsyncClient], hostile: str
) -> None:
    async with client("*") as asking:
        asked = [(b"X-Request-ID", hostile.encode())]
        headers = (await asking.get("/v2/models/none", headers=asked)).headers
    assert len(headers["X-Request-ID"]) == 32
    assert "set-cookie" not in headers
    assert all(value.isprintable() and value.isascii() for value in headers.values())


@pytest.mark.parametrize(
    "name", ["a%0d%0aSet-Cookie:%20a=b", "%C3%A9", "a%00b", "..%2f..%2fetc", "A" * 300]
)
async def test_a_hostile_model_name_reaches_no_header(
    client: Callable[..., httpx.AsyncClient], name: str
) -> None:
    async with client() as asking:
        answers = [
            await asking.get(f"/v2/models/{name}"),
            await asking.post(f"/predictions/{name}", content=b"x"),
            await asking.post("/invocations", headers={"Cicada-Strategy": "x\ty"}, content=b"x"),
        ]
    for answer in answers:
        assert answer.status_code in {400, 404}
        assert set(answer.headers) == {"content-length", "content-type", "x-request-id"}


async def test_405_names_the_methods_there_are(client: Callable[..., httpx.AsyncClient]) -> None:
    async with client() as asking:
        probe = await asking.delete("/v2/health/live")
        inference = await asking.get("/predictions/m")
    assert (probe.status_code, probe.headers["Allow"]) == (405, "GET, HEAD")
    assert (inference.status_code, inference.headers["Allow"]) == (405, "POST")


async def test_a_hostile_label_stays_in_the_body(tiny_weights: Path) -> None:
    hostile = 'a\r\nSet-Cookie: a=b\x00\u2028"é'
    app = create_app(Settings(weights=tiny_weights))

    async def infer(job: Job) -> Answer:
        none = UnitTimes(0.0, 0.0, 0.0)
        timeline = frames.Timeline(
            strategy="cicada",
            model="tiny",
            version="0123456789ab",
            layers=(hostile,),
            arrival_ns=0,
            decoded_ns=(0, 0),
            spans=(Span(0, "execute", 0, 1),),
            suspensions=(),
            placeholder_bytes=0,
            figures=Figures(1, 0, 0, 0, 0, 0, 0, 0, none, none, none, 1, 1, 0, 0),
        )
        result = frames.Result(
            type="result",
            id=job.header["id"],
            model="tiny",
            version="0123456789ab",
            outputs=(),
            labels=((frames.Label(label=hostile, index=0, probability=1.0),),),
            timeline=timeline,
        )
        return Answer(result, b"")

    app.state.service.pool.infer = infer
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://cicada"
    ) as asking:
        answer = await asking.post("/predictions/tiny", content=b"image")
    assert answer.json() == [{"label": hostile, "index": 0, "probability": 1.0}]
    assert "set-cookie" not in answer.headers
    assert all(value.isprintable() and value.isascii() for value in answer.headers.values())
