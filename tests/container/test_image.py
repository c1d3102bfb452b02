"""What is in the image, and what is not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Docker = Callable[..., str]

PACKAGES = """
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}))
"""
FILES = """
import pathlib
for path in pathlib.Path("/opt/app").iterdir():
    print(path.name)
"""
LEFT_OVER = """
import importlib.metadata, pathlib, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
kinds = {".a", ".h", ".hpp", ".pxd", ".pxi", ".pyi", ".pyx"}
print(*(path for path in packages.rglob("*") if path.name == "tests" or path.suffix in kinds))
print(*pathlib.Path("/tmp").iterdir())
commands = {point.name for point in importlib.metadata.entry_points(group="console_scripts")}
for file in pathlib.Path(sysconfig.get_path("scripts")).iterdir():
    if not file.name.lower().startswith(("activate", "python")) and file.name not in commands:
        print(file)
"""
DEPENDENCIES = re.compile(
    r"^\| dependencies, with .* \| (\d+) MB: torch (\d+), CUDA (\d+), all else (\d+) \|$",
    re.MULTILINE,
)
OURS = re.compile(r"^\| Cicada: .* \| ([\d.]+) MB \|$", re.MULTILINE)
MB = 1_000_000


def python(docker: Docker, image: str, script: str) -> str:
    return docker("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", script)


def config(docker: Docker, image: str) -> dict[str, Any]:
    (described,) = json.loads(docker("image", "inspect", image))
    return dict(described["Config"])


def test_it_says_how_it_is_run(docker: Docker, image: str) -> None:
    says = config(docker, image)
    assert says["Entrypoint"] == ["cicada"]  # no shell in between, which would keep the signals
    assert says["Cmd"] == ["serve"]
    assert says["User"] == "10001:0"  # a number: Kubernetes must see that it is not root
    assert says["Healthcheck"]["Test"] == ["CMD", "cicada", "health"]
    assert list(says["ExposedPorts"]) == ["8080/tcp"]
    assert not says.get("Volumes")  # else a function's image could have no model inside
    assert {"CICADA_WEIGHTS=/weights", "PORT=8080"} <= set(says["Env"])


def test_its_labels_are_those_of_the_open_container_initiative(
    docker: Docker, image: str, repository: Path
) -> None:
    labels = config(docker, image)["Labels"]
    names = {"title", "description", "version", "revision", "created", "base.name"}
    assert {f"org.opencontainers.image.{name}" for name in names} <= set(labels)
    version = re.search(
        r'^version = "(.+)"', (repository / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert version is not None
    assert labels["org.opencontainers.image.version"] == version[1]
    base = labels["org.opencontainers.image.base.name"]
    assert base == "docker.io/library/python:3.11-slim-bookworm"


def test_every_package_has_the_version_that_is_pinned(
    docker: Docker, image: str, repository: Path
) -> None:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pinned = {normal(name): version for name, version in (line.split("==") for line in lines)}
    installed = json.loads(python(docker, image, PACKAGES))
    assert {"torch", "torchvision", "fastapi", "opentelemetry-sdk"} <= set(map(normal, installed))
    ours = {normal(name): version for name, version in installed.items() if normal(name) in pinned}
    # A wheel for the CPU only has the same version with "+cpu" after it.
    assert {name: version.partition("+")[0] for name, version in ours.items()} == {
        name: pinned[name] for name in ours
    }


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_nothing_is_in_it_but_what_runs(docker: Docker, image: str) -> None:
    listed = python(docker, image, FILES).split()
    found = {name for name in listed if not name.endswith(".dist-info")}
    assert found == {"runtime", "handler", "models", "bench", "bin"}
    tools = "import importlib.util as i; print([n for n in ('pip', 'pytest', 'triton') if i.find_spec(n)])"
    assert python(docker, image, tools).strip() == "[]"
    assert not python(docker, image, LEFT_OVER).strip()


def test_what_a_model_of_the_users_may_import_is_still_there(docker: Docker, image: str) -> None:
    """Tests were taken out of these packages; torch's fx and export import the last two."""
    python(docker, image, "import numpy.testing, torch.testing, torch.export, sympy, networkx")


def test_who_runs_it_cannot_change_it(docker: Docker, image: str) -> None:
    script = "import os; print([p for p in ('/opt/app', '/opt/cicada', '/etc') if os.access(p, os.W_OK)])"
    for user in ("10001:0", "54321:0"):
        printed = docker(
            "run", "--rm", "--user", user, "--entrypoint", "python", image, "-c", script
        )
        assert printed.strip() == "[]"


def test_its_modules_are_compiled_since_a_read_only_container_could_not_keep_them(
    docker: Docker, image: str
) -> None:
    script = """
import importlib.util, pathlib
for name in ("runtime.cli", "runtime.server", "handler.process", "fastapi", "torch"):
    spec = importlib.util.find_spec(name)
    print(name, pathlib.Path(spec.cached).is_file())
"""
    assert "False" not in python(docker, image, script)


def layers(docker: Docker, image: str) -> dict[str, int]:
    """The bytes of each of the image's two large layers that the base has not."""
    lines = docker(
        "history", "--format", "{{.Size}}\t{{.CreatedBy}}", "--human=false", "--no-trunc", image
    )
    steps = dict.fromkeys(("COPY", "venv"), 0)
    for line in lines.splitlines():
        size, _, step = line.partition("\t")
        for name in steps:
            steps[name] = steps[name] or (int(size) if name in step else 0)
    return steps


def test_what_changes_with_every_commit_is_a_small_layer_above_the_large_one(
    docker: Docker, image: str
) -> None:
    steps = layers(docker, image)
    assert steps["COPY"] < 8 << 20 < steps["venv"]


def test_its_layers_are_as_large_as_readme_says(
    docker: Docker, image: str, repository: Path
) -> None:
    """Of the default index's torch; what the base takes is the base's."""
    readme = (repository / "README.md").read_text()
    dependencies, ours = DEPENDENCIES.search(readme), OURS.search(readme)
    assert dependencies is not None
    assert ours is not None
    total, *parts = map(int, dependencies.groups())
    assert sum(parts) == total
    steps = layers(docker, image)
    assert total * MB == pytest.approx(steps["venv"], rel=0.1)
    assert float(ours[1]) * MB == pytest.approx(steps["COPY"], rel=0.1)
