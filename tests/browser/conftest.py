"""The page in a real browser, headless Chromium, over a real service; nothing may be asked of any other host."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

STUBS = Path(__file__).parent.parent / "service" / "stub_service.py"
DEADLINE_S = 60.0
RELOADS = 10
"""Of a page whose files were lost: Chromium drops what is on its way when an interface comes or goes."""
NOWHERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path: Debian's, since what Playwright would download comes from elsewhere."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """For a module: Playwright's loop must not run beside other tests' own."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=[NOWHERE])
        yield launched
        launched.close()


class Service:
    """`cicada serve` as a process of its own, ready."""

    def __init__(self, log: Path, environment: dict[str, str], arguments: list[str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HOST": "127.0.0.1", "PORT": "0", **environment},
            )
        self._until(lambda: self._events("listening") or self.process.poll() is not None)
        (listening,) = self._events("listening") or pytest.fail(log.read_text())
        self.port: int = listening["port"]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)
        self._until(lambda: self._events("handler ready"))

    def _events(self, name: str) -> list[dict[str, Any]]:
        lines = [line for line in self._log.read_text().split("\n")[:-1] if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def _until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.02)

    def handlers(self) -> list[psutil.Process]:
        return list(self.process.children())

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(DEADLINE_S)


@contextmanager
def _services(folder: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def start(*arguments: str, **settings: str) -> Service:
        log = folder / f"log{len(started)}"
        started.append(Service(log, settings, list(arguments)))
        return started[-1]

    try:
        yield start
    finally:
        for service in started:
            service.close()


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("browser") / "weights"
    command = [sys.executable, "-m", "runtime.cli", "prepare", "resnet18", "--random", "0"]
    subprocess.run(
        [*command, "--weights", str(store)], check=True, capture_output=True, timeout=DEADLINE_S
    )
    return store


@pytest.fixture(scope="module")
def serve(
    chromium: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Service]]:
    """Starts services that a module's tests share."""
    del chromium  # without a browser nothing need be started
    with _services(tmp_path_factory.mktemp("services")) as start:
        yield start


@pytest.fixture(scope="module")
def service(serve: Callable[..., Service], weights: Path) -> Service:
    """A real one, with one handler."""
    settings = {"CICADA_WEIGHTS": str(weights), "CICADA_THREADS": "1"}
    return serve("-m", "runtime.cli", "serve", **settings)


@pytest.fixture
def serve_stubs(
    chromium: str, tiny_weights: Path, tmp_path: Path
) -> Iterator[Callable[..., Service]]:
    """Starts a service over stub handlers of the test's own."""
    del chromium
    with _services(tmp_path) as start:
        weights = {"CICADA_WEIGHTS": str(tiny_weights)}
        yield lambda **settings: start(str(STUBS), **{**weights, **settings})


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a service. In the end no request has left its host, and no script has failed."""
    contexts: list[BrowserContext] = []
    asked: list[tuple[str, str]] = []
    faults: list[str] = []

    def opened(service: Service, section: str = "", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.on("request", lambda request: asked.append((service.url, request.url)))
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.set_default_timeout(DEADLINE_S * 1000)
        lost: list[str] = []
        page.on("requestfailed", lambda request: lost.append(str(request.failure)))
        page.goto(f"{service.url}/{section}")
        for _ in range(RELOADS):
            if "net::ERR_NETWORK_CHANGED" not in lost:
                break
            lost.clear()
            page.reload()
        return page

    yield opened
    for context in contexts:
        context.close()
    own = [urlsplit(url) for _, url in asked if not url.startswith(("blob:", "data:"))]
    assert own
    assert {url.hostname for url in own} == {"127.0.0.1"}
    for home, url in asked:
        assert url.startswith((f"{home}/", f"blob:{home}/", "data:")), url
    assert not faults
