"""The files of the page as they are served: whole, closed to all else, and open without a key."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import pages

ServeStubs = Callable[..., Any]
FILES = sorted(
    path.relative_to(pages.FOLDER).as_posix()
    for path in pages.FOLDER.rglob("*")
    if path.is_file() and path.suffix in pages.MEDIA_TYPES
)


@pytest.fixture(scope="module")
def service(serve_stubs: ServeStubs) -> Any:
    return serve_stubs(CICADA_API_KEYS="a-key-of-ours")


@pytest.mark.parametrize("path", ["/", *(f"/page/{file}" for file in FILES)])
def test_every_file_is_served_without_a_key_and_under_the_policy(service: Any, path: str) -> None:
    answer = service.client.get(path)
    assert answer.status_code == 200
    file = "index.html" if path == "/" else path.removeprefix("/page/")
    assert answer.content == (pages.FOLDER / file).read_bytes()
    assert answer.headers["Content-Security-Policy"] == pages.POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    again = service.client.get(path, headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert service.client.head(path).status_code == 200


@pytest.mark.parametrize("path", ["nothing.js", "../settings.py", "%2e%2e/settings.py", "", "."])
def test_there_is_nothing_else_below_it(service: Any, path: str) -> None:
    assert service.client.get(f"/page/{path}").status_code == 404


def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    directives = dict(directive.split(" ", 1) for directive in pages.POLICY.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == "'self'"
    assert directives["connect-src"] == "'self'"
    assert "unsafe" not in pages.POLICY


def own(*suffixes: str) -> list[str]:
    return [file for file in FILES if file.endswith(suffixes) and not file.startswith("uplot/")]


@pytest.mark.parametrize("file", own(".js"))
def test_no_text_becomes_markup(file: str) -> None:
    text = (pages.FOLDER / file).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


@pytest.mark.parametrize("file", own(".js", ".html", ".css"))
def test_every_address_is_relative(file: str) -> None:
    text = (pages.FOLDER / file).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|[\"'(]/(?!/)\w|@import", text)


def test_the_sample_is_the_photo_of_known_provenance(photo: Path) -> None:
    assert (pages.FOLDER / "sample.jpg").read_bytes() == photo.read_bytes()


def test_the_vendored_library_has_its_licence_with_it() -> None:
    folder = pages.FOLDER / "uplot"
    assert "MIT" in (folder / "LICENSE").read_text()
    assert {path.name for path in folder.iterdir()} >= {"uPlot.iife.min.js", "uPlot.min.css"}
