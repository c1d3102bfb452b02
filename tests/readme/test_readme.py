"""Every command of the README runs as it stands there, and answers what stands there.

Commands stand in fences: `sh` holds a script; `console` holds commands after `$ `, each followed by what it
prints, where a line `...` leaves lines out. A comment on the line before a fence says what is special about it:

    <!-- outside -->  needs a service outside this machine: not run
    <!-- server -->   serves until interrupted: runs beside the commands that follow, up to the next server
    <!-- ci -->       is run by .ci/run, which runs this test
    <!-- container --> needs a container engine: is run by tests/container/test_readme.py

Measured numbers may differ from those shown; names, statuses, structure and words may not, nor what a model answers.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, get_args

import httpx
import psutil
import pytest
import torch
import torchvision

from runtime.app import create_app
from runtime.settings import Settings, variable

PORT_IN_README: Final = "8080"
ANSWER_WITHOUT_COMMANDS: Final = {"json", "text"}
NUMBER: Final = re.compile(r"\b[0-9a-f]{12,}\b|\d+(\.\d+)?(e[+-]?\d+)?")
HEADERS_SHOWN_EXACTLY: Final = {"cicada-model", "cicada-layers"}
HEADERS_NEVER_TWICE_ALIKE: Final = {"date"}

Marker = Literal["outside", "server", "ci", "container"]


@dataclass(frozen=True, slots=True)
class Command:
    line: int
    script: str
    shown: str
    marker: Marker | None


def commands(markdown: str) -> Iterator[Command]:
    """The commands in the order of the text; raises ValueError on a fence that would escape the test."""
    lines = markdown.splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"\s*(`{3,})(.*)", lines[number])
        if fence is None:
            number += 1
            continue
        end = lines.index(fence[1], number + 1)
        yield from _fence_commands(
            fence[2], lines[number + 1 : end], number + 2, _marker(lines[max(number - 1, 0)])
        )
        number = end + 1


def _marker(line: str) -> Marker | None:
    comment = re.fullmatch(r"<!-- (.*) -->", line)
    if comment is None:
        return None
    if comment[1] not in get_args(Marker):
        raise ValueError(f"{line} before a fence: expected one of {', '.join(get_args(Marker))}")
    return cast("Marker", comment[1])


def _fence_commands(
    language: str, body: list[str], line: int, marker: Marker | None
) -> Iterator[Command]:
    if language == "sh":
        yield Command(line, "\n".join(body), "", marker)
    elif language == "console":
        yield from _console_commands(body, line, marker)
    elif language not in ANSWER_WITHOUT_COMMANDS:
        raise ValueError(f"line {line}: a fence of {language!r}: commands stand in sh or console")
    elif any(text.startswith("$ ") for text in body):
        raise ValueError(f"line {line}: a command in a fence of {language!r}, expected console")


def _console_commands(body: list[str], line: int, marker: Marker | None) -> Iterator[Command]:
    starts = [index for index, text in enumerate(body) if text.startswith("$ ")]
    if not starts or starts[0] != 0:
        raise ValueError(f"line {line}: a console fence starts with a command after '$ '")
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        last = start
        while body[last].endswith("\\"):
            last += 1
        script = "\n".join([body[start].removeprefix("$ "), *body[start + 1 : last + 1]])
        yield Command(line + start, script, "\n".join(body[last + 1 : end]), marker)


def check_answer(shown: str, real: str) -> None:
    if shown.startswith("HTTP/"):
        _check_http(shown, real)
    elif shown.startswith(("[", "{")):
        _check_json(shown, real)
    elif shown:
        _check_text(shown, real)


def _check_http(shown: str, real: str) -> None:
    shown_head, _, shown_body = shown.partition("\n\n")
    head, _, body = real.replace("\r\n", "\n").partition("\n\n")
    shown_status, *shown_headers = shown_head.splitlines()
    status, *headers = head.splitlines()
    assert status.strip() == shown_status.strip()
    answered = dict(_header(line) for line in headers)
    for name, value in map(_header, shown_headers):
        assert name in answered, f"the README shows the header {name}; answered were {answered}"
        if name in HEADERS_SHOWN_EXACTLY:
            assert answered[name] == value, name
        elif name not in HEADERS_NEVER_TWICE_ALIKE:
            assert _shape(answered[name]) == _shape(value), name
    if shown_body.strip():
        _check_json(shown_body, body)


def _check_json(shown: str, real: str) -> None:
    expected, found = json.loads(shown), json.loads(real)
    assert _structure(found) == _structure(expected)
    assert list(_fractions(found)) == pytest.approx(list(_fractions(expected)), abs=1e-3)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _check_text(shown: str, real: str) -> None:
    remaining = iter([_shape(line) for line in real.splitlines()])
    for line in shown.splitlines():
        if line.strip() not in {"", "..."}:
            assert _shape(line) in remaining, f"the README shows {line!r}; printed was\n{real}"


def _shape(text: str) -> str:
    """The text with all numbers, versions and ids alike, and without what a table's widths depend on."""
    without_rules = re.sub(r"[─━═-]{2,}", "--", NUMBER.sub("0", text))
    return " ".join(without_rules.split())


def _structure(value: object) -> object:
    if isinstance(value, dict):
        return {key: _structure(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_structure(member) for member in value]
    return "number" if isinstance(value, int | float) else type(value).__name__


def _fractions(value: object) -> Iterator[float]:
    """Probabilities and the like: processors may round them otherwise."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _fractions(member)


class Terminal:
    """Runs the README's commands in a copy of the repository, one server at a time beside them."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = str(port)
        self._server: subprocess.Popen[str] | None = None
        self._printed = folder / "server.log"
        # No weights are downloaded for a test: a proxy where nobody listens refuses at once. Nor does pip install
        # what is not there yet, as the environment is the developer's.
        nowhere = {
            "https_proxy": "http://127.0.0.1:9",
            "TORCH_HOME": str(folder / "torch"),
            "PIP_NO_INDEX": "1",
        }
        # curl takes an error for an answer like any other, unless its settings say not to.
        (folder / ".curlrc").write_text("fail-with-body\n")
        self._environment = os.environ | nowhere | {"PORT": self._port, "CURL_HOME": str(folder)}

    def run(self, command: Command) -> str:
        """What the command prints; it may end with an error only where the README shows one."""
        shows_error = re.match(r"HTTP/\S+ [45]", command.shown) is not None
        done = subprocess.run(
            self._shell(command),
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        failed = f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        assert (done.returncode != 0) == shows_error, failed
        return done.stdout

    def serve(self, command: Command) -> str:
        self.interrupt_server()
        with self._printed.open("w") as log:
            self._server = subprocess.Popen(
                self._shell(command),
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        self._wait_until_ready(self._server, deadline=time.monotonic() + 120)
        return self._printed.read_text()

    def interrupt_server(self) -> None:
        """Ends the server as Ctrl-C does: the whole foreground group is interrupted, and nothing stays."""
        if self._server is None:
            return
        server, self._server = self._server, None
        started = psutil.Process(server.pid).children(recursive=True)
        os.killpg(server.pid, signal.SIGINT)
        try:
            status = server.wait(timeout=30)
            _, alive = psutil.wait_procs(started, timeout=5)
        except subprocess.TimeoutExpired:
            self._kill(server)
            raise
        printed = self._printed.read_text()
        assert not alive, f"{alive} outlived the server\n{printed}"
        assert status in {0, -signal.SIGINT, 128 + signal.SIGINT}, printed
        assert "Traceback" not in printed, printed

    def close(self) -> None:
        if self._server is not None:
            self._kill(self._server)

    def _shell(self, command: Command) -> list[str]:
        script = command.script.replace(PORT_IN_README, self._port)
        return ["bash", "-euo", "pipefail", "-c", script]

    def _wait_until_ready(self, server: subprocess.Popen[str], deadline: float) -> None:
        while time.monotonic() < deadline:
            assert server.poll() is None, f"the server ended\n{self._printed.read_text()}"
            try:
                url = f"http://127.0.0.1:{self._port}/v2/health/ready"
                if httpx.get(url, timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        pytest.fail(f"the server was not ready in time\n{self._printed.read_text()}")

    @staticmethod
    def _kill(server: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _lay_out_environment(environment: Path, folder: Path) -> None:
    """The environment under its place in the copy, with make's stamps newer than what they stamp.

    A link to the whole would let `make run` in the copy install the copy into the developer's own.
    """
    folder.mkdir()
    for entry in environment.iterdir():
        if not entry.name.startswith(".installed"):
            (folder / entry.name).symlink_to(entry)
    for stamp in (".installed", ".installed-dev"):
        (folder / stamp).touch()


@pytest.fixture
def terminal(repository: Path, tmp_path: Path, free_port: int) -> Iterator[Terminal]:
    copy = tmp_path / "cicada"
    left_out = shutil.ignore_patterns(".git", ".*_cache", ".venv", "__pycache__", "weights")
    shutil.copytree(repository, copy, ignore=left_out)
    _lay_out_environment(Path(sys.prefix), copy / ".venv")
    # The reader's own checkpoint, which the README's example prepares.
    flowers = torchvision.models.resnet18(weights=None, num_classes=102)
    torch.save(flowers.state_dict(), copy / "flowers.pth")
    opened = Terminal(copy, free_port)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


@pytest.mark.timeout(900)
def test_every_command_runs_and_answers_what_the_readme_shows(
    readme: str, terminal: Terminal
) -> None:
    here = [command for command in commands(readme) if command.marker in {None, "server"}]
    assert here
    for command in here:
        try:
            execute = terminal.serve if command.marker == "server" else terminal.run
            check_answer(command.shown, execute(command))
        except AssertionError as error:
            error.add_note(f"README.md, line {command.line}: {command.script}")
            raise
    terminal.interrupt_server()


def test_commands_left_to_ci_are_run_there(readme: str, repository: Path) -> None:
    ran = (repository / ".ci" / "run").read_text().splitlines()
    left = [command.script for command in commands(readme) if command.marker == "ci"]
    assert {line for script in left for line in script.splitlines()} <= set(ran)


def test_the_settings_table_is_complete_and_its_defaults_hold(readme: str) -> None:
    rows = re.findall(
        r"^\| `((?:CICADA_)?[A-Z_]+)` \| (?:`([^`]+)`|unset) \|", readme, re.MULTILINE
    )
    defaults = {variable(name): field.default for name, field in Settings.model_fields.items()}
    assert dict(rows) == {name: _as_typed(value) for name, value in defaults.items()}


def test_the_table_of_routes_is_complete(readme: str, tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`(?:GET|POST) /.*?`) \|", readme, re.MULTILINE)
    shown = {
        route.replace("{version}", "{v}") for row in rows for route in re.findall("`(.+?)`", row)
    }
    description = create_app(Settings(weights=tmp_path)).openapi()
    served = {
        f"{method.upper()} {path}"
        for path, methods in description["paths"].items()
        for method in methods
        if "/versions/" not in path
    }
    assert shown == served | {"GET /docs", "GET /"}


def _as_typed(default: object) -> str:
    if default is None:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize(
    "markdown",
    [
        "```\nmake run\n```",
        "```bash\nmake run\n```",
        "```text\n$ make run\n```",
        "```console\nmake run\n```",
        "<!-- skip -->\n```sh\nmake run\n```",
    ],
)
def test_a_fence_that_would_escape_the_test_is_refused(markdown: str) -> None:
    with pytest.raises(ValueError, match=r"fence|command"):
        list(commands(markdown))


def test_commands_are_read_with_their_answers_and_markers() -> None:
    markdown = (
        "text\n<!-- server -->\n```sh\nmake run\n```\n"
        "```console\n$ curl \\\n  -i here\nHTTP/1.1 200 OK\n$ true\n```\n"
    )
    assert list(commands(markdown)) == [
        Command(4, "make run", "", "server"),
        Command(7, "curl \\\n  -i here", "HTTP/1.1 200 OK", None),
        Command(10, "true", "", None),
    ]


SHOWN: Final = 'HTTP/1.1 200 OK\ncicada-layers: 22\nserver-timing: queue;dur=0.1\n\n[{"label": "suit", "index": 834}]'


def test_an_answer_may_differ_in_what_was_measured() -> None:
    check_answer(
        SHOWN,
        "HTTP/1.1 200 OK\r\ndate: today\r\nCicada-Layers: 22\r\nServer-Timing: queue;dur=27\r\n\r\n"
        '[{"label":"fox","index":1}]',
    )
    check_answer("layer  1.5 ms\n...\n----", "head\nlayer 12 ms\nweight 3 ms\n--------")


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ("200 OK", "404 Not Found"),
        ("cicada-layers: 22", "cicada-layers: 23"),
        ("server-timing: queue;dur=0.1", "server-timing: input;dur=0.1"),
        ("server-timing: queue;dur=0.1\n", ""),
        ('"index": 834', '"index": "834"'),
        ('[{"label": "suit", "index": 834}]', "[]"),
    ],
)
def test_an_answer_may_not_differ_in_anything_else(shown: str, real: str) -> None:
    assert shown in SHOWN
    with pytest.raises(AssertionError):
        check_answer(SHOWN, SHOWN.replace(shown, real))


def test_what_a_model_answers_is_shown_as_it_is() -> None:
    check_answer('[{"index": 3, "probability": 0.25}]', '[{"index":5,"probability":0.2500001}]')
    with pytest.raises(AssertionError):
        check_answer("[[1.0, 0.5]]", "[[1.0, 0.56]]")


def test_printed_lines_stand_in_the_order_shown() -> None:
    with pytest.raises(AssertionError, match="the README shows 'b'"):
        check_answer("a\nb", "b\na")
