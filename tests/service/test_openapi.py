"""The OpenAPI description against the service: schemathesis asks what it allows, and what it does not."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from models.store import Store
from runtime import reporting

SERVER: Final = Path(__file__).with_name("stub_server.py")
# That a tensor's shape is the model's, or that a body is compressed as its header says, no schema can tell;
# nor whether a header is in a list of codings, since their names may be in any case.
MAY_BE_REFUSED: Final = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "415"]
"""
# Without `seconds` the stream of events ends when its caller goes; tests/service/test_events.py does so.
ENDING: Final = """
[parameters]
"query.seconds" = 0.05
"""
OF_WHAT_THERE_IS: Final = f"""{ENDING}
"path.model" = "tiny"
"path.version" = "{{version}}"
"path.request_id" = "mine"
"""


@pytest.fixture(scope="module")
def url(tiny_weights: Path) -> Iterator[str]:
    """A service over stub handlers."""
    with subprocess.Popen(
        [sys.executable, str(SERVER), "--weights", str(tiny_weights)],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def described(url: str) -> dict[str, Any]:
    description: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    return description


def schemathesis(url: str, folder: Path, configuration: str, *arguments: str) -> str:
    """What it tells; it ends with an error on a finding."""
    settings = folder / "schemathesis.toml"
    settings.write_text(configuration)
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("--config-file", str(settings)),
            *("run", f"{url}/openapi.json"),
            *("--generation-deterministic", "--continue-on-failure", "--no-color"),
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(240)
def test_schemathesis_has_no_finding_among_what_there_is(
    url: str, tiny_weights: Path, tmp_path: Path
) -> None:
    headers = {"X-Request-ID": "mine"}
    httpx.post(f"{url}/predictions/tiny", content=b"image", headers=headers).raise_for_status()
    chosen = OF_WHAT_THERE_IS.format(version=Store(tiny_weights).open("tiny").version)
    told = schemathesis(
        *(url, tmp_path, MAY_BE_REFUSED + chosen),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "20"),
    )
    assert "24 selected / 24 total" in told


@pytest.mark.timeout(240)
def test_schemathesis_has_no_finding_among_what_it_makes_up(url: str, tmp_path: Path) -> None:
    schemathesis(url, tmp_path, MAY_BE_REFUSED + ENDING, "--max-examples", "5")


class Loaded(HTMLParser):
    """What a browser loads with a page: scripts, styles, images."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            found = [value for name, value in attrs if name in {"src", "href"} and value]
            self.addresses.extend(found)


def test_docs_load_nothing_from_elsewhere(url: str) -> None:
    page = httpx.get(f"{url}/docs")
    assert page.status_code == 200
    loaded = Loaded(page.text).addresses
    assert loaded == ["docs/swagger-ui.css", "data:,", "docs/swagger-ui-bundle.js"]
    assert not re.search(r"https?://", page.text)
    types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
    for address in (loaded[0], loaded[2]):
        asset = httpx.get(f"{url}/{address}")
        assert asset.status_code == 200
        assert asset.headers["Content-Type"] == types[address.rpartition(".")[2]]
        assert asset.headers["ETag"]
    styles = httpx.get(f"{url}/docs/swagger-ui.css").text
    assert not re.search(r"@import|url\((?!\"?data:)", styles)
    assert httpx.get(f"{url}/docs/../settings.py").status_code == 404


def operations(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_answer_has_its_id_and_every_error_its_body(described: dict[str, Any]) -> None:
    for name, operation in operations(described):
        for status, response in operation["responses"].items():
            assert response["headers"]["X-Request-ID"]["required"], (name, status)
            if int(status) >= 400:
                reference = response["content"]["application/json"]["schema"]["$ref"]
                assert reference == "#/components/schemas/ErrorBody", (name, status)
            retry = response["headers"].get("Retry-After", {"required": False})
            assert retry["required"] == (status in {"429", "503"}), (name, status)


def test_an_inference_describes_every_header_that_it_answers_with(
    described: dict[str, Any], url: str
) -> None:
    answered = httpx.post(f"{url}/predictions/tiny", content=b"image").headers
    operation = described["paths"]["/predictions/{model}"]["post"]
    headers = operation["responses"]["200"]["headers"]
    required = {name.lower() for name, header in headers.items() if header["required"]}
    assert required == {*(name.lower() for name in reporting.NAMES), "x-request-id"}
    of_the_message = {"content-length", "content-type", "date"}
    assert set(answered) - of_the_message == required


def test_every_inference_tells_its_errors(described: dict[str, Any]) -> None:
    inferences = {
        name: set(operation["responses"])
        for name, operation in operations(described)
        if name.startswith("POST")
    }
    assert len(inferences) == 4
    for statuses in inferences.values():
        assert statuses >= {
            "200",
            "400",
            "404",
            "408",
            "413",
            "415",
            "429",
            "500",
            "502",
            "503",
            "504",
        }
