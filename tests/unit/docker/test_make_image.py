"""What `make image` tells the engine, for which another program stands in here."""

import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

ENGINE: Final = '#!/bin/sh\nprintf "%s\\n" "$@"\n'


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """The Makefile alone, in no checkout."""
    folder = tmp_path / "cicada"
    folder.mkdir()
    shutil.copy(repository / "Makefile", folder)
    return folder


def told(folder: Path) -> dict[str, str]:
    """The build's arguments."""
    engine = folder.parent / "docker"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    path = f"{folder.parent}:{os.environ['PATH']}"
    printed = subprocess.check_output(
        ["make", "--silent", "image"],
        cwd=folder,
        env=os.environ | {"PATH": path, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        text=True,
    )
    return dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    command = ("git", *identity, *arguments)
    return subprocess.check_output(command, cwd=folder, text=True).strip()


def test_it_says_when_it_was_built(folder: Path) -> None:
    age = datetime.now(UTC) - datetime.fromisoformat(told(folder)["CREATED"])
    assert timedelta() <= age < timedelta(minutes=1)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git (Debian: git)")
def test_it_says_of_which_commit_it_is(folder: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "First")
    assert told(folder)["REVISION"] == git(folder, "rev-parse", "HEAD")


def test_outside_a_checkout_the_commit_is_unknown(folder: Path) -> None:
    assert told(folder)["REVISION"] == "unknown"
