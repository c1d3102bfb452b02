"""`docker compose up`: from nothing to a service that answers."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

Docker = Callable[..., str]
Compose = Callable[..., str]


@pytest.fixture
def compose(
    image: str, tag: str, repository: Path, free_port: int, tmp_path: Path
) -> Iterator[Compose]:
    """The file of this repository, under a name of the test's own."""
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("there is no docker-compose")
    settings = {
        "CICADA_IMAGE": image,
        "CICADA_MODEL": "resnet18",
        "CICADA_PREPARE": "--random 0",
        "CICADA_MEMORY": "1g",
        "CICADA_CPUS": "1",
        "PORT": str(free_port),
        "REPLAY_MINUTES": "1",
        "REPLAY_SPEEDUP": "6",
        "REPLAY_OUT": str(tmp_path / "replay"),
    }

    def compose(*arguments: str, check: bool = True) -> str:
        command = [program, "--project-name", f"{tag}-compose", *arguments]
        done = subprocess.run(
            command,
            cwd=repository,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{arguments}\n{done.stdout}{done.stderr}")
        return done.stdout

    yield compose
    compose(
        "--profile", "replay", "--profile", "observability", "down", "--volumes", "--timeout", "15"
    )


def inspected(docker: Docker, compose: Compose, service: str) -> dict[str, Any]:
    (described,) = json.loads(docker("inspect", compose("ps", "--quiet", service).strip()))
    return dict(described)


def test_up_prepares_a_model_and_serves_it_within_limits(
    compose: Compose, docker: Docker, photo: Path, free_port: int
) -> None:
    compose("up", "--detach", "--no-build")
    service = f"http://127.0.0.1:{free_port}"
    wait_until_healthy(docker, compose)
    answer = httpx.post(f"{service}/invocations", content=photo.read_bytes(), timeout=60)
    assert (answer.status_code, answer.headers["Cicada-Model"]) == (200, "resnet18")
    host = inspected(docker, compose, "cicada")["HostConfig"]
    assert (host["Memory"], host["NanoCpus"]) == (1 << 30, 1_000_000_000)
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert inspected(docker, compose, "prepare")["State"]["ExitCode"] == 0
    compose("stop", "cicada")
    assert inspected(docker, compose, "cicada")["State"]["ExitCode"] == 0


def test_what_is_prepared_is_not_prepared_again(compose: Compose) -> None:
    said = []
    for _ in range(2):
        compose("run", "--rm", "-T", "prepare")
        said.append(
            compose("run", "--rm", "-T", "--entrypoint", "cicada inspect --json", "prepare")
        )
    first, second = map(json.loads, said)
    assert [model["name"] for model in first["models"]] == ["resnet18"]
    assert second == first


def test_the_profile_replay_drives_the_service(
    compose: Compose, docker: Docker, tmp_path: Path
) -> None:
    compose("--profile", "replay", "up", "--detach", "--no-build")
    assert docker("wait", inspected(docker, compose, "replay")["Id"]).strip() == "0", compose(
        "logs", "replay"
    )
    summary = json.loads((tmp_path / "replay" / "summary.json").read_text())
    assert summary["complete"]
    assert summary["answered"] == summary["arrivals"]["invocations"] > 0
    assert [row["model"] for row in summary["models"]] == ["resnet18"]


def test_the_profile_observability_has_what_prometheus_and_grafana_need(
    compose: Compose, repository: Path
) -> None:
    """Their images cannot be had everywhere; what they are given is checked."""
    described = yaml.safe_load(compose("--profile", "observability", "config"))
    services = described["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observability"]
        image, _, version = services[name]["image"].partition(":")
        assert image in {"prom/prometheus", "grafana/grafana"}
        assert version
        mounted = [
            volume.split(":")[0] for volume in services[name]["volumes"] if volume.startswith("/")
        ]
        assert mounted
        assert all(Path(path).exists() for path in mounted)
    grafana = repository / "docker" / "grafana"
    (source,) = yaml.safe_load((grafana / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    dashboard = json.loads((grafana / "dashboards/cicada.json").read_text())
    asked = {
        target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel["targets"]
    }
    assert asked == {source["uid"]}
    (provider,) = yaml.safe_load((grafana / "provisioning/dashboards/cicada.yaml").read_text())[
        "providers"
    ]
    targets = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in targets


def wait_until_healthy(docker: Docker, compose: Compose) -> None:
    deadline = time.monotonic() + 90
    while inspected(docker, compose, "cicada")["State"]["Health"]["Status"] != "healthy":
        assert time.monotonic() < deadline, compose("logs", "cicada")
        time.sleep(0.2)
