"""README's commands about containers run as they stand there, one after another."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Docker = Callable[..., str]

FENCE = re.compile(r"^<!-- container -->\n```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
WRAPPER = '''#!{python}
"""The engine's command with this test's own names: README's are those of a reader's images and volumes."""
import os, re, sys

def renamed(argument):
    if argument in ("cicada", "flowers", "sentences"):
        return f"{tag}-readme-{{argument}}"
    if argument.startswith("weights:"):
        return f"{tag}-readme-{{argument}}"
    return argument.replace("8080:8080", "{port}:8080")

command, *arguments = map(renamed, sys.argv[1:])
if command == "build":  # pip may need the host's network
    arguments = ["--network", "host", "--build-arg", "IMAGE={tag}-readme-cicada", *arguments]
os.execv("{docker}", ["docker", command, *arguments])
'''


@pytest.fixture
def terminal(
    docker: Docker,
    tag: str,
    repository: Path,
    checkpoint: Path,
    tmp_path: Path,
    free_port: int,
) -> Iterator[Callable[[str], str]]:
    """Runs a script in a copy of the repository; the image is built from the layers that are there already."""
    copy = tmp_path / "cicada"
    left_out = shutil.ignore_patterns(".git", ".*_cache", ".venv", "__pycache__", "weights")
    shutil.copytree(repository, copy, ignore=left_out)
    shutil.copy(checkpoint, copy)
    (copy / ".venv").symlink_to(sys.prefix)
    wrapper = tmp_path / "bin" / "docker"
    wrapper.parent.mkdir()
    wrapper.write_text(
        WRAPPER.format(
            python=sys.executable, tag=tag, port=free_port, docker=shutil.which("docker")
        )
    )
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}:{os.environ['PATH']}"

    def run(script: str) -> str:
        done = subprocess.run(
            [
                "bash",
                "-euo",
                "pipefail",
                "-c",
                script.replace("localhost:8080", f"localhost:{free_port}"),
            ],
            cwd=copy,
            env=os.environ | {"PATH": path, "DOCKER_BUILDKIT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    yield run
    names = [f"{tag}-readme-{name}" for name in ("sentences", "flowers", "cicada")]
    docker("rm", "--force", *names, check=False)
    docker("volume", "rm", "--force", f"{tag}-readme-weights", check=False)
    for name in names:
        docker("image", "rm", "--force", name, check=False)


@pytest.mark.usefixtures("image")  # whose layers are then there
def test_its_commands_run(terminal: Callable[[str], str], repository: Path) -> None:
    scripts = FENCE.findall((repository / "README.md").read_text())
    assert len(scripts) >= 3
    printed = [terminal(script) for script in scripts]
    assert sum('"probability"' in text for text in printed) == 2
    (similarities,) = filter(None, (re.search(r"\[\[.*\]\]", text) for text in printed))
    assert [len(row) for row in json.loads(similarities[0])] == [2, 2]
