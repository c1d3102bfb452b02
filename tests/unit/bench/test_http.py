"""`cicada bench http` in a small form: what it tells, not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from bench import http
from bench.health import HealthProbe, Unhealthy
from bench.http import BenchFailed

CHOSEN: Final[dict[str, Any]] = {
    "model": "resnet18",
    "kinds": ["image"],
    "clients": ["1"],
    "seconds": 1.0,
    "requests": 10,
    "image": None,
    "folder": None,
}


def cicada(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.cli", "bench", "http", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def _services() -> set[psutil.Process]:
    """Those of other tests may be running."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if "serve" in child.cmdline()}


def test_every_kind_and_number_of_clients_has_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    work = tmp_path / "work"
    work.mkdir()
    before = _services()
    done = cicada(
        *("--model", "resnet18", "--clients", "1,2", "--seconds", "20", "--requests", "3"),
        *("--json", str(figures), "--folder", str(work)),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(figures.read_text())
    assert told["environment"]["cores"] >= 1
    rows = told["rows"]
    cells = [(row["kind"], row["clients"]) for row in rows]
    assert cells == [(kind, n) for kind in ("image", "binary", "json") for n in (1, 2)]
    for row in rows:
        assert row["n"] == 3, "each cell ends after its number of requests"
        assert row["failures"] == {}
        assert row["requests_per_s"] == pytest.approx(row["n"] / row["seconds"])
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] < row["seconds"] * 1000
        assert row["health_n"] >= 1
        assert 0 < row["health_p50_ms"] <= row["health_slowest_ms"]
        assert f"{row['requests_per_s']:.1f}" in done.stdout
        assert f"{row['health_slowest_ms']:.1f}" in done.stdout
    assert list(work.iterdir()) == [], "the store it made is removed again"
    assert _services() == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kinds": ["image", "xml"]}, "there is no kind 'xml': known are image, binary, json"),
        ({"clients": ["4", "0"]}, "a number of clients is '0', expected one from 1"),
        ({"clients": [""]}, "a number of clients is '', expected one from 1"),
    ],
)
def test_a_choice_that_is_none_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BenchFailed, match=sentence):
        http.options(**{**CHOSEN, **changes})


def test_a_service_that_is_not_there_has_no_health(free_port: int) -> None:
    with (
        HealthProbe(f"http://127.0.0.1:{free_port}") as probe,
        pytest.raises(Unhealthy, match=r"cannot be told: ConnectionRefusedError"),
    ):
        probe.stop()
