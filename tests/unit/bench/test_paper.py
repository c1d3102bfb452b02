"""`cicada bench paper` in its smallest form: interrupted, gone on with, and whole."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil
import pytest

from bench.paper import command as command_module
from bench.paper.command import TooLittle
from bench.replay.trace import Window

LIMIT_S: Final = 900
CHOICES: Final = (
    *("--models", "resnet18", "--rounds", "2", "--threads", "1"),
    *("--replay-strategies", "cicada", "--replay-minutes", "1", "--replay-speedup", "30"),
    *("--density-models", "none", "--cold-models", "none"),
)


def command(out: Path, *choices: str) -> list[str]:
    return [sys.executable, "-m", "runtime.cli", "bench", "paper", "--out", str(out), *choices]


def steps(out: Path, section: str) -> list[dict[str, Any]]:
    """Those that were written whole."""
    path = out / "journals" / f"{section}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def interrupted(out: Path) -> None:
    """A run that is told to end once it has measured something."""
    running = subprocess.Popen(command(out, *CHOICES), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not steps(out, "motivation"):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        assert running.wait(LIMIT_S) != 0
    finally:
        running.kill()
        running.wait()


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_run_that_was_interrupted_goes_on_and_makes_the_report(tmp_path: Path) -> None:
    """Real services of every strategy and setup; minutes where other tests run beside."""
    out = tmp_path / "out"
    interrupted(out)
    assert not (out / "report.html").exists()
    before = steps(out, "motivation")

    done = subprocess.run(
        command(out, *CHOICES), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert steps(out, "motivation") == before, "what was measured is not measured again"
    requests = steps(out, "requests")
    assert [step["step"] for step in requests] == ["resnet18, round 1", "resnet18, round 2"]
    for step in requests:
        kinds = {(one["setup"], one["strategy"]) for one in step["data"]["requests"]}
        assert len(kinds) == 10
        assert step["data"]["resident_ms"] > 0
    assert "measured again" in (out / "report.html").read_text()
    told = json.loads((out / "data" / "placeholders.json").read_text())["rows"]
    for row in told:
        assert row["mini_mib"] == pytest.approx(row["pisel_mib"] / 32, rel=0.001)
    assert not (out / "stores").exists(), "the stores it made are removed"
    assert len(json.loads((out / "run.json").read_text())["sessions"]) == 2

    other = subprocess.run(
        command(out, *CHOICES, "--rounds", "3"), capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert "holds a run with another rounds" in other.stderr


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        (["--models", "resnet51"], "there is no model 'resnet51'"),
        (["--replay-strategies", "best"], "there is no strategy 'best'"),
        (["--cold-models", "none,resnet18"], "there is no model 'none'"),
    ],
)
def test_a_choice_that_is_none_is_one_sentence(
    tmp_path: Path, choices: list[str], sentence: str
) -> None:
    done = subprocess.run(
        command(tmp_path, *choices), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_without_the_memory_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = command_module.choices(
        quick=False,
        models=["paper"],
        rounds=1,
        threads=1,
        trace_file=None,
        window=Window(14, 0, 60),
        replay_strategies=None,
        replay_minutes=None,
        replay_speedup=None,
        density_models=None,
        memory_limit_gb=2.0,
        cold_models=None,
        cold_rounds=None,
        disk_mb_per_s=200.0,
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30))
    with pytest.raises(TooLittle, match=r"10 models need about 12 GB .*; 9 GB are available"):
        command_module.run(chosen, tmp_path, None, None)
    assert not (tmp_path / "run.json").exists()
