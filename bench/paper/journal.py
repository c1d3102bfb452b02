"""What was measured, step by step, so that an interrupted run goes on where it was."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from models.errors import ModelError


class OtherRun(ModelError):
    """The folder holds a run with other choices."""


class Journal:
    """A file of JSON lines, one for each step; a line that was cut off by an interruption counts as none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: dict[str, Any] = {}
        self._end = 0
        if path.exists():
            self._load()

    def _load(self) -> None:
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            told = json.loads(line)
            self._steps[told["step"]] = told["data"]
            self._end += len(line)

    def __contains__(self, step: str) -> bool:
        return step in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> dict[str, Any]:
        """In the order in which they were first measured."""
        return dict(self._steps)

    def add(self, step: str, data: Any) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"step": step, "at": at, "data": data}) + "\n"
        with self._path.open("ab") as file:
            file.truncate(self._end)
            file.write(line.encode())
        self._end += len(line.encode())
        self._steps[step] = json.loads(line)["data"]


def claim(
    path: Path, choices: dict[str, Any], environment: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Begins a run in a folder, or goes on with it; returns the sessions that took part in it.

    choices: what must be the same for going on. environment: of a session that measures; each one is
    kept, since a run may go on after an update or a restart. Raises OtherRun.
    """
    plain = json.loads(json.dumps(choices))
    told: dict[str, Any] = {"choices": plain, "sessions": []}
    if path.exists():
        told = json.loads(path.read_text())
        if told["choices"] != plain:
            differing = sorted(
                name
                for name in {*plain, *told["choices"]}
                if plain.get(name) != told["choices"].get(name)
            )
            raise OtherRun(
                f"{path.parent} holds a run with another {', '.join(differing)}: "
                "choose another folder, or remove this one"
            )
    if environment is not None:
        told["sessions"].append(environment)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(told, indent=1) + "\n")
    partial.replace(path)
    sessions: list[dict[str, Any]] = told["sessions"]
    return sessions
