"""What the page shows is what the API tells, for everyone: by mouse, keyboard and screen reader, on any screen."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import FilePayload, Locator, Page, expect

OpenPage = Callable[..., Page]
ServeStubs = Callable[..., Any]
STRATEGIES: Final = ("traditional", "pisel", "cicada")
SECTIONS: Final = ("try", "requests", "now", "models")
PHONE: Final = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
KEY: Final = "a-key-of-ours"

pytestmark = pytest.mark.timeout(240)
expect.set_options(timeout=60_000)


def classify(page: Page, *strategies: str) -> None:
    boxes = page.locator("#strategies input")
    expect(boxes.first).to_be_visible()
    for box in boxes.all():
        box.set_checked(box.get_attribute("value") in strategies)
    page.click("#run")
    expect(page.locator("#progress")).to_have_text("done")


@dataclass(frozen=True)
class Drawn:
    """A bar as it is drawn: where it begins and ends on the screen."""

    layer: int
    name: str
    kind: str
    left: float
    right: float
    patterned: bool


class Chart:
    """One strategy's part of a figure, read from its drawing alone."""

    def __init__(self, band: Locator) -> None:
        read: dict[str, Any] = band.evaluate(
            """band => ({
              request: band.dataset.request,
              ticks: [...band.querySelectorAll('.tick')].map(
                line => [Number(line.dataset.ms), Number(line.getAttribute('x1'))]),
              floor: Number(band.querySelector('.floor line').getAttribute('x1')),
              bars: [...band.querySelectorAll('.bar')].map(bar => {
                const [shape, pattern] = bar.querySelectorAll('rect');
                const x = Number(shape.getAttribute('x'));
                return [Number(bar.dataset.layer), bar.dataset.name, bar.dataset.kind,
                        x, x + Number(shape.getAttribute('width')), Boolean(pattern)];
              }),
              rows: Object.fromEntries([...band.querySelectorAll('.row')].map(row => [
                row.dataset.row, [...new Set([...row.querySelectorAll('.bar')].map(bar => bar.dataset.kind))]])),
              colours: Object.fromEntries([...band.querySelectorAll('.bar[data-kind=execute]')].map(
                bar => [bar.dataset.layer, bar.querySelector('rect').getAttribute('fill')])),
            })"""
        )
        self.request: str = read["request"]
        self.bars = [Drawn(*bar) for bar in read["bars"]]
        self.rows: dict[str, list[str]] = read["rows"]
        self.colours: dict[str, str] = read["colours"]
        self.floor_x: float = read["floor"]
        self._ticks: list[list[float]] = read["ticks"]

    @property
    def per_ms(self) -> float:
        (first_ms, first_x), (last_ms, last_x) = self._ticks[0], self._ticks[-1]
        return (last_x - first_x) / (last_ms - first_ms)

    def ms(self, x: float) -> float:
        """The time at a place, read off the axis."""
        first_ms, first_x = self._ticks[0]
        return first_ms + (x - first_x) / self.per_ms


def check(chart: Chart, shown: dict[str, Any]) -> None:
    """Every span is one bar, where the axis says; every suspension is marked."""
    start = min(span["start_ms"] for span in shown["spans"])
    held = [{**suspension, "kind": "suspended"} for suspension in shown["suspensions"]]
    told = sorted(
        (
            span["layer"],
            span["kind"],
            span["start_ms"] - start,
            span["end_ms"] - start,
            span["name"],
        )
        for span in [*shown["spans"], *held]
    )
    read = sorted(
        (bar.layer, bar.kind, chart.ms(bar.left), chart.ms(bar.right), bar.name)
        for bar in chart.bars
    )
    assert [(layer, kind, name) for layer, kind, _, _, name in read] == [
        (layer, kind, name) for layer, kind, _, _, name in told
    ]
    length = max(end for _, _, _, end, _ in told)
    for (*_, left, right, _), (*_, first, last, _) in zip(read, told, strict=True):
        assert (left, right) == pytest.approx((first, last), abs=length * 1e-4)
    assert chart.ms(chart.floor_x) == pytest.approx(shown["figures"]["execute_ms"])


def executed_ms(shown: dict[str, Any]) -> float:
    return sum(
        float(span["end_ms"] - span["start_ms"])
        for span in shown["spans"]
        if span["kind"] == "execute"
    )


def test_a_photo_under_three_strategies_is_drawn_as_the_api_tells_it(
    service: Any, open_page: OpenPage, photo: Path
) -> None:
    page = open_page(service)
    classify(page, *STRATEGIES)
    bands = page.locator("#results .band").all()
    assert [band.get_attribute("data-strategy") for band in bands] == list(STRATEGIES)
    charts = [Chart(band) for band in bands]
    for chart, strategy in zip(charts, STRATEGIES, strict=True):
        shown = service.client.get(f"/requests/{chart.request}").json()
        assert shown["strategy"] == strategy
        check(chart, shown)
        assert chart.ms(chart.floor_x) == pytest.approx(executed_ms(shown))
        patterned = {bar.kind for bar in chart.bars if bar.patterned}
        assert patterned <= {"initialize", "suspended"}
        assert ("initialize" in patterned) == (strategy != "cicada")
        assert len(set(chart.colours.values())) == len(shown["layers"])
    assert len({round(chart.per_ms, 9) for chart in charts}) == 1  # one time axis
    answer = service.client.post("/predictions/resnet18", content=photo.read_bytes()).json()
    rows = page.locator("#results .labels li")
    expect(rows).to_have_count(len(answer))
    for row, label in zip(rows.all(), answer, strict=True):
        expect(row.locator(".label")).to_have_text(label["label"])
        expect(row.locator(".number")).to_have_text(f"{100 * label['probability']:.1f} %")


def test_each_strategy_may_have_a_time_axis_of_its_own(service: Any, open_page: OpenPage) -> None:
    page = open_page(service)
    classify(page, "traditional", "cicada")
    page.get_by_label("One time axis").uncheck()
    charts = [Chart(band) for band in page.locator("#results .band").all()]
    assert charts[0].per_ms != pytest.approx(charts[1].per_ms)
    for chart in charts:
        check(chart, service.client.get(f"/requests/{chart.request}").json())


def test_units_retrievals_and_suspensions_have_their_places(
    serve_stubs: ServeStubs, open_page: OpenPage
) -> None:
    service = serve_stubs()
    page = open_page(service)
    classify(page, "cicada")
    chart = Chart(page.locator("#results .band"))
    check(chart, service.client.get(f"/requests/{chart.request}").json())
    assert chart.rows == {
        "layer": ["construct"],
        "retrieval": ["retrieve", "suspended"],
        "weight": ["apply"],
        "compute": ["execute"],
    }
    boxes = page.locator("[data-row=retrieval] .bar[data-kind=retrieve]").all()
    first, second = (box.bounding_box() or pytest.fail("no box") for box in boxes)
    assert first["y"] + first["height"] <= second["y"] + 1  # side by side: in lanes of their own


def test_pointing_at_a_bar_tells_of_it(service: Any, open_page: OpenPage) -> None:
    page = open_page(service)
    classify(page, "cicada")
    longest = page.locator("#results .bar[data-kind=execute]").evaluate_all(
        "bars => bars.map(b => b.dataset.end - b.dataset.start).reduce((m, d, i, all) => d > all[m] ? i : m, 0)"
    )
    bar = page.locator("#results .bar[data-kind=execute]").nth(longest)
    bar.hover()
    start, end = (float(bar.get_attribute(f"data-{side}") or "") for side in ("start", "end"))
    tip = page.locator(".tip")
    expect(tip).to_be_visible()
    told = tip.inner_text().split("\n")
    assert told[:2] == [bar.get_attribute("data-name"), "execute"]
    numbers = [float(re.sub(r"[^\d.]", "", line)) for line in told[2:]]
    assert [line.split()[0] for line in told[2:]] == ["start", "duration"]
    assert numbers == pytest.approx([start, end - start], rel=0.01, abs=0.01)
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()


def test_what_a_finger_has_touched_stays_told(service: Any, open_page: OpenPage) -> None:
    page = open_page(service, **PHONE)
    classify(page, "traditional")
    page.locator("#results .bar[data-kind=initialize]").last.tap(force=True)
    expect(page.locator(".tip")).to_contain_text("initialize")


def test_the_keyboard_is_enough(service: Any, open_page: OpenPage) -> None:
    page = open_page(service)
    expect(page.locator("#strategies input").first).to_be_visible()
    page.locator("#strategies input[value=traditional]").focus()
    page.keyboard.press("Space")  # no more
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "run":
            break
    page.keyboard.press("Enter")
    expect(page.locator("#progress")).to_have_text("done")
    assert page.locator("#results .band").count() == 2

    bar = page.locator("#results .bar:focus")
    for _ in range(12):
        page.keyboard.press("Tab")
        if bar.count():
            break
    assert bar.get_attribute("role") == "img"
    name = re.compile(r"^conv1, (construct|initialize), start [\d.,]+ ms, duration [\d.,]+ ms$")
    assert name.match(bar.get_attribute("aria-label") or "")
    expect(page.locator(".tip")).to_contain_text("conv1")
    for key, row in (
        ("ArrowDown", "retrieval"), ("ArrowDown", "weight"), ("ArrowDown", "compute"), ("ArrowUp", "weight"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert bar.evaluate("bar => bar.closest('.row').dataset.row") == row
    page.keyboard.press("End")
    last = float(bar.get_attribute("data-start") or "")
    page.keyboard.press("ArrowLeft")
    assert float(bar.get_attribute("data-start") or "") <= last
    page.keyboard.press("Escape")
    expect(page.locator(".tip")).to_be_hidden()
    page.keyboard.press("Tab")  # the whole chart is one stop
    assert bar.count() == 0


def test_an_error_is_shown_as_the_apis_sentence(service: Any, open_page: OpenPage) -> None:
    page = open_page(service)
    text = FilePayload(name="<b>notes</b>.txt", mimeType="text/plain", buffer=b"not an image")
    page.set_input_files("#photo", text)
    expect(page.locator("#photo-name")).to_have_text("<b>notes</b>.txt, 12 B")
    classify(page, "mini")
    refused = service.client.post("/predictions/resnet18", content=b"not an image").json()["error"]
    expect(page.locator("#results .problem")).to_have_text(f"mini {refused}")
    page.click("#sample")
    classify(page, "mini")
    expect(page.locator("#results .band")).to_have_count(1)


def test_a_photo_can_be_dropped(service: Any, open_page: OpenPage, photo: Path) -> None:
    page = open_page(service)
    dropped = page.evaluate_handle(
        """async address => {
          const content = await (await fetch(address)).blob();
          const dropped = new DataTransfer();
          dropped.items.add(new File([content], 'dropped.jpg', {type: 'image/jpeg'}));
          return dropped;
        }""",
        "page/sample.jpg",
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})
    size = f"{photo.stat().st_size / 1000:.1f} kB"
    expect(page.locator("#photo-name")).to_have_text(f"dropped.jpg, {size}")
    assert (page.locator("#preview").get_attribute("src") or "").startswith("blob:")
    classify(page, "cicada")
    expect(page.locator("#results .labels li")).to_have_count(5)


def test_others_words_never_become_markup(service: Any, open_page: OpenPage, photo: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    page = open_page(service)
    answer = [{"label": hostile, "index": 0, "probability": 0.5}]
    headers = {"X-Request-ID": "hostile"}
    page.route("**/predictions/*", lambda route: route.fulfill(json=answer, headers=headers))
    service.client.post("/predictions/resnet18", content=photo.read_bytes(), headers=headers)
    classify(page, "cicada")
    expect(page.locator("#results .label")).to_have_text(hostile)
    listed = {"models": [], "damaged": [{"name": hostile, "fault": hostile}], "default": None}
    page.route("**/models", lambda route: route.fulfill(json=listed))
    page.click("nav >> text=Models")
    expect(page.locator("#models-list h2")).to_have_text(hostile)
    assert page.locator("img[src=x]").count() == 0


def test_requests_come_live_and_one_opens_with_its_files(
    service: Any, open_page: OpenPage, photo: Path
) -> None:
    page = open_page(service, "#requests")
    expect(page.locator("#connection")).to_have_text("live")
    headers = {"X-Request-ID": "from-elsewhere", "Cicada-Strategy": "preload"}
    service.client.post("/predictions/resnet18", content=photo.read_bytes(), headers=headers)
    row = page.locator("[data-id=from-elsewhere]")
    shown = service.client.get("/requests/from-elsewhere").json()
    for text in ("200", "resnet18", "preload"):
        expect(row).to_contain_text(text)
    parts = row.locator(".bars .part").evaluate_all(
        "all => all.map(e => parseFloat(e.style.width))"
    )
    whole = {name: shown[f"{name}_ms"] for name in ("receive", "queue", "pipeline")}
    whole["rest"] = shown["total_ms"] - sum(whole.values())
    scale = sum(parts) / shown["total_ms"]
    assert parts == pytest.approx([ms * scale for ms in whole.values()], abs=1e-3)

    row.click()
    expect(page.locator("#request-shown h1")).to_have_text("Request from-elsewhere")
    check(Chart(page.locator("#request-shown .band")), shown)
    assert page.url.endswith("#requests/from-elsewhere")
    assert json.loads(saved(page, "JSON", ".json")) == shown
    trace = service.client.get("/requests/from-elsewhere/trace").json()
    assert json.loads(saved(page, "Trace for Perfetto", ".trace.json")) == trace
    drawing = ET.fromstring(saved(page, "SVG", ".svg"))  # noqa: S314 our own
    titles = [title.text or "" for title in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(shown["spans"]) + len(shown["suspensions"])
    page.go_back()
    expect(row).to_be_visible()


def saved(page: Page, title: str, suffix: str) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=title, exact=True).click()
    assert download.value.suggested_filename == f"cicada-from-elsewhere{suffix}"
    return Path(download.value.path()).read_text()


def test_the_list_can_be_paused(serve_stubs: ServeStubs, open_page: OpenPage) -> None:
    service = serve_stubs()
    page = open_page(service, "#requests")
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#none-yet")).to_be_visible()
    page.click("#pause")
    with page.expect_response("**/requests/seen"):
        service.client.post("/predictions/tiny", content=b"i", headers={"X-Request-ID": "seen"})
        page.evaluate("fetch('requests/seen')")
    assert page.locator("#rows [role=row]").count() == 0
    page.click("#pause")
    expect(page.locator("[data-id=seen]")).to_be_visible()


def test_a_hidden_tab_listens_to_nothing_and_misses_nothing(
    serve_stubs: ServeStubs, open_page: OpenPage
) -> None:
    service = serve_stubs()
    page = open_page(service, "#requests")
    expect(page.locator("#connection")).to_have_text("live")
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
        hide(page, hidden=True)
    service.client.post("/predictions/tiny", content=b"i", headers={"X-Request-ID": "unseen"})
    with page.expect_request("**/events"):
        hide(page, hidden=False)
    expect(page.locator("[data-id=unseen]")).to_be_visible()


def hide(page: Page, *, hidden: bool) -> None:
    page.evaluate(
        """hidden => {
          Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
          document.dispatchEvent(new Event('visibilitychange'));
        }""",
        hidden,
    )


def test_a_killed_handler_and_its_successor_are_seen(
    serve_stubs: ServeStubs, open_page: OpenPage
) -> None:
    service = serve_stubs(CICADA_HANDLERS="2")
    page = open_page(service, "#now")
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator(".handler[data-state=idle]")).to_have_count(2)
    victim, other = service.handlers()
    victim.kill()
    expect(page.locator("#notices")).to_contain_text("A handler was killed by SIGKILL")
    expect(page.locator("#ended")).to_contain_text(f"pid {victim.pid} was killed by SIGKILL")
    expect(page.locator(f".handler[data-pid='{victim.pid}']")).to_have_count(0)
    expect(page.locator(".handler[data-state=idle]")).to_have_count(2)
    pids = page.locator(".handler").evaluate_all("all => all.map(each => Number(each.dataset.pid))")
    assert set(pids) == {handler.pid for handler in service.handlers()}
    assert other.pid in pids


def test_now_shows_who_works_on_what_and_how_many_wait(
    serve_stubs: ServeStubs, open_page: OpenPage
) -> None:
    service = serve_stubs(CICADA_QUEUE="3", CICADA_TIMEOUT_S="600")
    page = open_page(service, "#now")
    asked = [
        threading.Thread(target=abandoned, args=(service, name)) for name in ("hangs", "waits")
    ]
    asked[0].start()
    working = page.locator(".handler[data-state=working]")
    expect(working).to_contain_text("hangs")
    asked[1].start()
    tile = page.locator(".tile", has_text="Queue")
    expect(tile.locator(".value")).to_have_text("1")
    expect(tile).to_contain_text("of 3 that may wait")
    for handler in service.handlers():
        handler.kill()
    for each in asked:
        each.join(60)
    expect(page.locator(".tile", has_text="Last minute").first).to_contain_text("1 failed")
    expect(page.locator("#charts canvas")).to_have_count(4)


def abandoned(service: Any, name: str) -> None:
    body = b"hang" if name == "hangs" else b"image"
    service.client.post("/predictions/tiny", content=body, headers={"X-Request-ID": name})


def test_models_are_shown_with_their_layers(service: Any, open_page: OpenPage) -> None:
    page = open_page(service, "#models")
    told = service.client.get("/models/resnet18").json()
    card = page.locator("article.model")
    for fact in (
        told["version"],
        str(told["layers"]),
        "block",
        "safetensors",
        "1000",
    ):
        expect(card).to_contain_text(fact)
    card.locator("summary").first.click()
    rows = card.locator("table.layers tbody tr")
    expect(rows).to_have_count(told["layers"])
    for row, layer in zip(rows.all(), told["contents"], strict=True):
        cells = [row.locator("th").inner_text(), *row.locator("td").all_inner_texts()]
        assert cells[0] == f"{layer['index']} {layer['name']}"
        assert cells[3] == f"{layer['parameters']:,}"
        assert cells[5] == (layer["file"] or "\N{EN DASH}")


def test_a_key_is_asked_for_where_keys_are_set(
    serve_stubs: ServeStubs, open_page: OpenPage
) -> None:
    service = serve_stubs(CICADA_API_KEYS=KEY, CICADA_KEYS_FOR_HEALTH="1")
    page = open_page(service, "#requests")
    expect(page.locator("#key")).to_be_visible()
    expect(page.locator("#key-problem")).to_contain_text("expected an API key")
    page.fill("#key-value", "a-wrong-key")
    page.keyboard.press("Enter")
    expect(page.locator("#key-problem")).to_have_text("the API key is not known")
    page.fill("#key-value", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#connection")).to_have_text("live")
    page.click("nav >> text=Try")
    classify(page, "cicada", "mini")
    expect(page.locator("#results .band")).to_have_count(2)
    page.click("nav >> text=Now")
    expect(page.locator(".handler")).to_have_count(1)
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")  # the tab remembers
    expect(page.locator("#key")).to_be_hidden()


def test_without_a_key_the_sentence_is_shown_and_asked_again_only_when_wanted(
    serve_stubs: ServeStubs, open_page: OpenPage
) -> None:
    page = open_page(serve_stubs(CICADA_API_KEYS=KEY), "#models")
    page.click("#key-cancel")
    expect(page.locator("#connection")).to_have_text("key needed")
    expect(page.locator("article.model")).to_have_count(1)  # metadata need none
    page.click("nav >> text=Now")
    expect(page.locator("#key")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#now-problem")).to_contain_text("expected an API key")


def test_the_page_comes_back_when_the_service_does(
    serve_stubs: ServeStubs, open_page: OpenPage, free_port: int
) -> None:
    service = serve_stubs(PORT=str(free_port))
    page = open_page(service, "#requests")
    expect(page.locator("#connection")).to_have_text("live")
    service.close()
    expect(page.locator("#connection")).to_have_text("reconnecting")
    again = serve_stubs(PORT=str(free_port))
    again.client.post("/predictions/tiny", content=b"i", headers={"X-Request-ID": "after"})
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("[data-id=after]")).to_be_visible()


def test_light_and_dark_follow_the_system_until_the_button_says_otherwise(
    serve_stubs: ServeStubs, open_page: OpenPage
) -> None:
    page = open_page(serve_stubs(), color_scheme="dark")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    expect(page.locator("#theme")).to_have_text("Theme: light")
    light = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: light")
    assert page.evaluate(ground) == light


@pytest.mark.parametrize(
    "options",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, PHONE],
    ids=["light", "dark", "phone"],
)
def test_axe_finds_no_serious_fault_and_nothing_is_wider_than_the_screen(
    service: Any, open_page: OpenPage, options: dict[str, Any]
) -> None:
    service.client.post("/predictions/resnet18", content=b"not an image")
    page = open_page(service, reduced_motion="reduce", **options)
    classify(page, "traditional", "cicada")
    service.client.post("/predictions/resnet18", content=b"not an image")
    for section in SECTIONS:
        page.click(f"nav a[href='#{section}']")
        expect_whole(page, section)
        inspect(page, section)
    page.click("nav a[href='#requests']")
    page.locator("#rows .code.good").first.click()
    expect(page.locator("#request-shown .band")).to_have_count(1)
    inspect(page, "request")


def expect_whole(page: Page, section: str) -> None:
    if section == "try":
        expect(page.locator("#results .band")).to_have_count(2)
    elif section == "requests":
        expect(page.locator("#rows .code.odd").first).to_be_visible()
    elif section == "now":
        expect(page.locator("#charts canvas")).to_have_count(4)
    else:
        page.locator(".model summary").first.click()
        expect(page.locator("table.layers")).to_be_visible()


def inspect(page: Page, what: str) -> None:
    found = Axe().run(page).response["violations"]
    serious = [
        (fault["id"], [node["html"] for node in fault["nodes"]])
        for fault in found
        if fault["impact"] in {"serious", "critical"}
    ]
    assert serious == [], what
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen, what
