"""A real engine, Cicada's image built once, and all that is gone afterwards.

Where no engine runs, these tests are skipped; `.ci/run` starts one where the machine has the means. What builds leave
without a name goes too: the engine would keep half a gigabyte of each run as its cache.
"""

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch
import torchvision

DEADLINE_S: Final = 90.0
LIMIT_S: Final = 1500
"""For one test, in which the image may be built."""
STORE_USER: Final = "54321:0"
"""No one in particular, of group 0: as OpenShift has users."""
HARDENED: Final = (
    "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL",
    "--security-opt", "no-new-privileges", "--pids-limit", "256",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def docker(*arguments: str, check: bool = True, timeout_s: float = LIMIT_S) -> str:
    """What the engine's command prints; it may fail only where `check` says so."""
    done = subprocess.run(
        ["docker", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )
    if check and done.returncode != 0:
        pytest.fail(f"docker {' '.join(arguments)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout + ("" if check else done.stderr)


def _why_no_engine() -> str | None:
    if shutil.which("docker") is None:
        return "no container engine: there is no command `docker`"
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no container engine: {done.stderr.strip()}"


def _unnamed_images() -> set[str]:
    listed = docker("image", "ls", "--quiet", "--no-trunc", "--filter", "dangling=true")
    return set(listed.split())


@pytest.fixture(scope="session", name="docker")
def _docker() -> Iterator[Callable[..., str]]:
    """The engine's command: `docker("ps", "--all")` is what it prints."""
    reason = _why_no_engine()
    if reason is not None:
        pytest.skip(reason)
    before = _unnamed_images()
    yield docker
    for image in _unnamed_images() - before:
        docker("image", "rm", image, check=False)


@pytest.fixture(scope="session")
def hardened() -> tuple[str, ...]:
    """The options that take from a container all that it can do without."""
    return HARDENED


@pytest.fixture(scope="session")
def tag() -> str:
    """What all that this run of the tests makes is named after."""
    return f"cicada-test-{secrets.token_hex(4)}"


Build = Callable[..., str]


@pytest.fixture(scope="session")
def build(docker: Callable[..., str], tag: str) -> Iterator[Build]:
    """Builds an image: `build(name, *arguments)` is its name; with the host's network, as pip may need it."""
    built: list[str] = []

    def build(name: str, *arguments: str) -> str:
        image = f"{tag}-{name}"
        docker("build", "--quiet", "--network", "host", "--tag", image, *arguments)
        built.append(image)
        return image

    yield build
    for image in reversed(built):
        docker("image", "rm", "--force", image, check=False)


@pytest.fixture(scope="session")
def image(build: Build, repository: Path) -> str:
    """Cicada's image, built as README says."""
    return build("image", str(repository))


def _seconds(at: str) -> float:
    """Of the engine's nanoseconds, which Python does not read."""
    return datetime.fromisoformat(f"{at[:26].rstrip('Z')}+00:00").timestamp()


class Container:
    """A container that runs or ran."""

    def __init__(self, identifier: str) -> None:
        self.id = identifier
        self.client = httpx.Client(
            timeout=DEADLINE_S, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def inspect(self) -> dict[str, Any]:
        (described,) = json.loads(docker("inspect", self.id))
        return dict(described)

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.inspect()["State"])

    @property
    def started_s(self) -> float:
        """When the engine started it, on this machine's clock."""
        return _seconds(self.state["StartedAt"])

    @property
    def finished_s(self) -> float:
        """When it ended, on the same clock."""
        return _seconds(self.state["FinishedAt"])

    @property
    def signalled_s(self) -> float:
        """When the engine last sent it a signal, on the same clock."""
        told = docker(
            "events", "--since", "0", "--until", str(time.time()), "--format", "{{.TimeNano}}",
            "--filter", f"container={self.id}", "--filter", "event=kill",
        )  # fmt: skip
        return int(told.split()[-1]) / 1e9

    @property
    def address(self) -> str:
        address: str = self.inspect()["NetworkSettings"]["IPAddress"]
        assert address, f"the container ended, or has no network\n{self.log}"
        return address

    def serves_at(self, port: int = 8080) -> str:
        """Its URL; later requests need only their path."""
        url = f"http://{self.address}:{port}"
        self.client.base_url = httpx.URL(url)
        return url

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def answers(self, path: str, **headers: str) -> bool:
        """Whether a GET is answered with 200."""
        try:
            return self.get(path, **headers).status_code == 200
        except httpx.TransportError:
            return False

    def predict(self, photo: Path, model: str, **headers: str) -> httpx.Response:
        return self.client.post(
            f"/predictions/{model}", content=photo.read_bytes(), headers=headers
        )

    def metric(self, *names: str) -> float:
        """The sum of these metrics' series, all of one moment."""
        wanted = tuple(f"{name}{after}" for name in names for after in (" ", "{"))
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(wanted))

    def execute(self, *command: str, check: bool = True) -> str:
        return docker("exec", self.id, *command, check=check)

    @property
    def log(self) -> str:
        return docker("logs", self.id, check=False)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [line for line in self.log.splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Until it holds, while the container runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.state["Running"], f"the container ended\n{self.log}"
            assert time.monotonic() < deadline, f"did not come true in time\n{self.log}"
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        self.wait_until(lambda: self.answers("/v2/health/ready"))

    def stop(self, grace_s: int = 10) -> float:
        """Ends it as `docker stop` does; the seconds that it took."""
        start = time.monotonic()
        docker("stop", "--time", str(grace_s), self.id)
        return time.monotonic() - start


Run = Callable[..., Container]


@pytest.fixture
def run(image: str) -> Iterator[Run]:
    """Starts a container: `run(*options, image=..., command=...)`; it may not answer yet."""
    started: list[Container] = []

    def start(
        *options: str, image: str = image, command: Sequence[str] = (), port: int | None = 8080
    ) -> Container:
        container = Container(docker("create", *options, image, *command).strip())
        started.append(container)
        docker("start", container.id)
        if port is not None:
            container.serves_at(port)
        return container

    yield start
    for container in started:
        container.client.close()
        docker("rm", "--force", "--volumes", container.id, check=False)


class Weights:
    """A volume with a store, to which models are added when a test needs them."""

    def __init__(self, volume: str, image: str) -> None:
        self.volume = volume
        self._image = image
        self._prepared: set[str] = set()
        docker("volume", "create", volume)

    def with_models(self, *models: str, at: str = "/weights") -> tuple[str, str]:
        """The option that mounts the volume, read-only, with these models in it."""
        for model in models:
            if model not in self._prepared:
                docker(
                    "run", "--rm", "--network", "none", *HARDENED, "--user", STORE_USER,
                    "--volume", f"{self.volume}:/weights", self._image, "prepare", model, "--random", "0",
                )  # fmt: skip
                self._prepared.add(model)
        return "--volume", f"{self.volume}:{at}:ro"

    def files(self, model: str) -> list[Path]:
        """The model's weight files, where the engine keeps them."""
        (described,) = json.loads(docker("volume", "inspect", self.volume))
        return sorted((Path(described["Mountpoint"]) / model).resolve().glob("*.safetensors"))


@pytest.fixture(scope="session")
def weights(image: str, tag: str) -> Iterator[Weights]:
    """Random weights, prepared by the image itself, by a user that it does not know, without a network."""
    volume = f"{tag}-weights"
    yield Weights(volume, image)
    docker("volume", "rm", "--force", volume, check=False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own checkpoint: a ResNet-18 that tells 102 flowers apart."""
    file = tmp_path_factory.mktemp("checkpoint") / "flowers.pth"
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(weights=None, num_classes=102).state_dict(), file)
    return file


@pytest.fixture(scope="session")
def function(build: Build, image: str, repository: Path, checkpoint: Path) -> str:
    """A function's own image, with the model `flowers` inside."""
    return build(
        "function",
        "--file", str(repository / "docker" / "function.Dockerfile"),
        "--build-arg", f"IMAGE={image}",
        "--build-arg", "MODEL=flowers",
        "--build-arg", f"PREPARE=--architecture resnet18 --checkpoint {checkpoint.name}",
        str(checkpoint.parent),
    )  # fmt: skip
