"""Grafana's dashboard, as the classes that Grafana generates from its own schemas read it.

Theirs of version 11.6, the newest that there is at PyPI; the compose file's Grafana is of version 12.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


@pytest.fixture
def dashboard(repository: Path) -> dict[str, Any]:
    file = repository / "docker" / "grafana" / "dashboards" / "cicada.json"
    return dict(json.loads(file.read_text()))


def unread(dashboard: dict[str, Any]) -> list[str]:
    """The fields, of panels' and queries' kinds too, that Grafana has no place for, or reads as something else."""
    register_default_plugins()
    read = json.loads(JSONEncoder(sort_keys=True, indent=2).encode(Dashboard.from_json(dashboard)))
    return list(differences(dashboard, read))


def differences(given: Any, read: Any, where: str = "$") -> Iterator[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            yield from differences(value, read.get(name), f"{where}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif given != read:
        yield where


def test_grafana_reads_every_field_of_the_dashboard(dashboard: dict[str, Any]) -> None:
    assert unread(dashboard) == []


def test_a_wrong_field_is_found(dashboard: dict[str, Any]) -> None:
    panel = dashboard["panels"][0]
    panel["options"]["legent"] = {}
    panel["targets"][0]["expression"] = "up"
    assert unread(dashboard) == ["$.panels[0].options.legent", "$.panels[0].targets[0].expression"]
