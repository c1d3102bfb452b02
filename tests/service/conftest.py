"""A pool of stub handlers, a small prepared model, and real servers over it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.worker import Worker
from models.store import Store

STUB = Path(__file__).with_name("stub_handler.py")
DEADLINE_S = 60.0


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop that the server runs on."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def stub_command() -> list[str]:
    """What starts a stub handler; more of its arguments may follow."""
    return [sys.executable, str(STUB)]


async def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


def _eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Awaits a condition, with a deadline."""
    return _until


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Waits for a condition, with a deadline."""
    return _eventually


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one small model."""
    store = tmp_path_factory.mktemp("service") / "weights"
    command = [sys.executable, "-m", "runtime.cli", "prepare", "resnet18", "--random", "0"]
    subprocess.run(
        [*command, "--weights", str(store)], check=True, capture_output=True, timeout=DEADLINE_S
    )
    return store


@pytest.fixture(scope="session")
def reference(weights: Path) -> nn.Module:
    """torchvision's own model with the prepared weights."""
    model: nn.Module = torchvision.models.resnet18(weights=None).eval()
    state: dict[str, Tensor] = {}
    for file in Store(weights).open("resnet18").path.glob("*.safetensors"):
        state |= load_file(file)
    names = model.state_dict().keys()
    model.load_state_dict({name: state[name] for name in names})
    return model


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """In the test itself torch computes with as many threads as a handler has: sums are rounded alike only then."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as the server's handlers have."""
    with _threads(1):
        yield


@pytest.fixture(scope="session")
def photo_tensor(photo: Path) -> Tensor:
    """The photo as torchvision's preset prepares it, 1 x 3 x 224 x 224."""
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    with Image.open(photo) as image:
        prepared: Tensor = preset(image)
    return prepared.unsqueeze(0)


class Server:
    """`cicada serve` as a process of its own, on a free port of this machine."""

    def __init__(
        self,
        log: Path,
        environment: dict[str, str],
        arguments: Sequence[str] = ("-m", "runtime.cli", "serve"),
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HOST": "127.0.0.1", "PORT": "0", **environment},
            )
        _eventually(lambda: self.events("listening") or self.process.poll() is not None)
        (listening,) = self.events("listening") or pytest.fail(self.log)
        self.port: int = listening["port"]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The whole lines of the log, or those of one event."""
        lines = self.log.split("\n")[:-1]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if name in {None, event["event"]}]

    def wait_until_ready(self) -> None:
        _eventually(lambda: self.client.get("/v2/health/ready").status_code == 200)

    def handlers(self) -> list[psutil.Process]:
        return list(self.process.children())

    def stop(self) -> int:
        """Ends the server as an orchestrator does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code: int = self.process.wait(DEADLINE_S)
        return code

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)


@contextmanager
def _server(log: Path, environment: dict[str, str]) -> Iterator[Server]:
    server = Server(log, environment)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def server(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server with one handler of one thread, which the tests share."""
    environment = {"CICADA_WEIGHTS": str(weights), "CICADA_THREADS": "1"}
    with _server(tmp_path_factory.mktemp("server") / "log", environment) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Iterator[Server]]:
    """Gives a ready server on a store, with more settings, and ends it afterwards."""

    def running(store: Path, settings: dict[str, str]) -> Iterator[Server]:
        environment = {"CICADA_WEIGHTS": str(store), "CICADA_THREADS": "1", **settings}
        with _server(tmp_path_factory.mktemp("serve") / "log", environment) as server:
            server.wait_until_ready()
            yield server

    return running


@pytest.fixture
def start_server(weights: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server of the test's own, with more settings; it may not be ready yet."""
    servers: list[Server] = []

    def start(**settings: str) -> Server:
        environment = {"CICADA_WEIGHTS": str(weights), "CICADA_THREADS": "1", **settings}
        servers.append(Server(tmp_path / f"log{len(servers)}", environment))
        return servers[-1]

    yield start
    for running in servers:
        running.close()


@pytest.fixture(scope="session")
def serve_stubs(
    tiny_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts a server over stub handlers, whose model is `tiny`, with more settings; it is ready."""
    servers: list[Server] = []

    def start(**settings: str) -> Server:
        log = tmp_path_factory.mktemp("stubs") / "log"
        environment = {"CICADA_WEIGHTS": str(tiny_weights), **settings}
        servers.append(Server(log, environment, [str(STUB.with_name("stub_service.py"))]))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield start
    for running in servers:
        running.close()


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """As many as the handlers have that tests start themselves."""
    with _threads(2):
        yield


@pytest.fixture(scope="session")
def logits() -> Callable[..., Tensor]:
    """What a handler answers under a strategy, [1, classes]."""

    def asked(
        handler: Worker, name: str, strategy: str, described: dict[str, Any], body: bytes
    ) -> Tensor:
        header, content = handler.infer(name, strategy, described, body)
        assert header["timeline"]["strategy"] == strategy
        return torch.from_numpy(np.frombuffer(content, dtype="<f4")).reshape(1, -1)

    return asked
