"""`make screenshots`: the pictures in docs/page that README shows. Not a test: pytest runs it when it is named."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

FOLDER: Final = Path(__file__).parent.parent.parent / "docs" / "page"
COLOURS: Final = 160
LOAD_S: Final = 75
ATTEMPTS: Final = 15
DESK: Final[dict[str, Any]] = {"viewport": {"width": 1080, "height": 860}}
PHONE: Final[dict[str, Any]] = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 1.5,
    "is_mobile": True,
    "has_touch": True,
}

pytestmark = pytest.mark.timeout(600)
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels of random weights mean nothing, but their timings do."""
    store = tmp_path_factory.mktemp("screenshots") / "weights"
    for name in ("resnet50", "vit_b_32"):
        command = [sys.executable, "-m", "runtime.cli", "prepare", name, "--random", "0"]
        subprocess.run([*command, "--weights", str(store)], check=True, capture_output=True)
    return store


@pytest.fixture(scope="module")
def service(serve: Callable[..., Any], weights: Path, photo: Path) -> Any:
    settings = {"CICADA_HANDLERS": "2", "CICADA_DEFAULT_MODEL": "resnet50"}
    running = serve("-m", "runtime.cli", "serve", CICADA_WEIGHTS=str(weights), **settings)
    load(running, photo.read_bytes())
    return running


def load(service: Any, photo: bytes) -> None:
    """Callers of several kinds for a while, one that sends rubbish, and a handler that dies."""
    end = time.monotonic() + LOAD_S
    chance = random.Random(0)

    def call() -> None:
        while time.monotonic() < end:
            strategy = chance.choice(("cicada", "cicada", "cicada", "mini", "pisel", "traditional"))
            body = photo if chance.random() < 0.93 else b"not an image"
            model = chance.choice(("resnet50", "resnet50", "vit_b_32"))
            headers = {"Cicada-Strategy": strategy}
            service.client.post(f"/predictions/{model}", content=body, headers=headers)
            time.sleep(chance.expovariate(1.5))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    time.sleep(LOAD_S / 2)
    service.handlers()[0].kill()
    for caller in callers:
        caller.join()


def keep(page: Page, name: str, **options: Any) -> None:
    """A palette makes it a third as large, and nothing of it is seen."""
    page.mouse.move(1, 1)
    page.evaluate("scrollTo(0, 0)")
    FOLDER.mkdir(exist_ok=True)
    with Image.open(BytesIO(page.screenshot(**options))) as shot:
        small = shot.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        small.save(FOLDER / f"{name}.png", optimize=True)


def classify(page: Page) -> None:
    """Until the machine does nothing else meanwhile: the floors of all strategies are then alike."""
    expect(page.locator("#strategies input").first).to_be_visible()
    for attempt in range(ATTEMPTS):
        page.click("#run")
        expect(page.locator("#progress")).to_have_text("done")
        floors = page.locator(".floor").evaluate_all("all => all.map(e => Number(e.dataset.ms))")
        if attempt > 0 and max(floors) < 1.15 * min(floors):  # the first one finds caches cold
            return


def test_light(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service, color_scheme="light", **DESK)
    classify(page)
    keep(page, "light", full_page=True)


def test_dark(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service, "#now", color_scheme="dark", **DESK)
    expect(page.locator("#charts canvas")).to_have_count(4)
    keep(page, "dark", full_page=True)


def test_phone(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service, "#requests", color_scheme="light", **PHONE)
    expect(page.locator("#rows .code.good").first).to_be_visible()
    keep(page, "phone-requests")
    answered = page.locator("#rows [role=row]", has=page.locator(".code.good"))
    answered.filter(has_text="pisel").first.click()
    expect(page.locator("#request-shown .band")).to_have_count(1)
    keep(page, "phone-timeline")
