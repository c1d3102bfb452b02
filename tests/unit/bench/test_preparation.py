"""The memory that preparation takes: a bound, not a time."""

from pathlib import Path

import pytest

from bench import preparation
from bench.preparation import Options, Row, UnknownFormat


def rows(tmp_path: Path, model: str, *dtypes: str) -> list[Row]:
    return list(preparation.measure(Options([model], list(preparation.FORMATS), dtypes, tmp_path)))


def test_preparation_takes_little_beyond_the_file(tmp_path: Path) -> None:
    found = rows(tmp_path, "resnet50", "float32")
    assert [row.format for row in found] == ["zip", "legacy", "safetensors"]
    for row in found:
        assert row.is_bounded, row
        assert row.file_mb == pytest.approx(102.5, rel=0.01)
        peak = row.preparing
        assert row.imports.resident_mb < peak.resident_mb <= peak.anonymous_mb + peak.mapped_mb + 50
    assert list(tmp_path.iterdir()) == []


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_the_largest_of_the_paper_s_models_takes_at_most_200_mb_beyond_its_file(
    tmp_path: Path,
) -> None:
    for row in rows(tmp_path, "vit_l_16", "float32", "float64", "bfloat16"):
        assert row.beyond_imports_mb <= row.file_mb + 200, row
        if row.format != "legacy":  # mapped: only the tensors at hand are in memory
            assert row.beyond_imports_mb <= 500, row


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(UnknownFormat, match="no format 'tar': known are zip, legacy, safetensors"):
        preparation.options(["resnet18"], ["tar"], ["float32"], None)
    with pytest.raises(UnknownFormat, match="no dtype 'int8'"):
        preparation.options(["resnet18"], ["zip"], ["int8"], None)
