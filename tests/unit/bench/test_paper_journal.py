"""An interrupted run goes on where it was, and only with the same choices."""

from pathlib import Path

import pytest

from bench.paper.journal import Journal, OtherRun, claim


def test_what_was_measured_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    journal = Journal(path)
    journal.add("resnet50, round 1", {"ms": [1.5, 2.5]})
    journal.add("vgg16, round 1", {"ms": (3, 4)})
    again = Journal(path)
    assert again.steps == journal.steps
    assert again.steps == {
        "resnet50, round 1": {"ms": [1.5, 2.5]},
        "vgg16, round 1": {"ms": [3, 4]},
    }
    assert "resnet50, round 1" in again
    assert "resnet50, round 2" not in again


@pytest.mark.parametrize("kept", [1, 20, -2, -1])
def test_a_step_that_was_cut_off_is_measured_again(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "requests.jsonl"
    Journal(path).add("first", {"ms": 1})
    first = path.read_bytes()
    Journal(path).add("second", {"ms": 2})
    second = path.read_bytes()[len(first) :]
    path.write_bytes(first + second[:kept])
    journal = Journal(path)
    assert journal.steps == {"first": {"ms": 1}}
    journal.add("second", {"ms": 3})
    assert Journal(path).steps == {"first": {"ms": 1}, "second": {"ms": 3}}


def test_a_run_goes_on_with_the_same_choices_and_keeps_its_sessions(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    choices = {"models": ("resnet50", "vgg16"), "rounds": 3}
    claim(path, choices, {"date": "monday"})
    assert claim(path, choices, {"date": "tuesday"}) == [{"date": "monday"}, {"date": "tuesday"}]
    assert claim(path, choices, None) == [{"date": "monday"}, {"date": "tuesday"}]


def test_other_choices_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    claim(path, {"models": ["resnet50"], "rounds": 3, "threads": 2}, {})
    with pytest.raises(OtherRun, match="a run with another models, rounds: choose"):
        claim(path, {"models": ["vgg16"], "rounds": 4, "threads": 2}, {})
