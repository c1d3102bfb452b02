"""The memory that preparation takes: a bound, not a time."""

from pathlib import Path

import pytest

from bench import preparation
from bench.preparation import Options, Row, UnknownFormat


def measured(
    tmp_path: Path, model: str, dtype: str, *formats: str, bound_mb: float
) -> dict[str, Row]:
    """Rows by format, of which none takes more than so much beyond what importing torch takes."""
    rows = list(preparation.measure(Options([model], formats, [dtype], tmp_path)))
    assert list(tmp_path.iterdir()) == []
    for row in rows:
        assert row.beyond_imports_mb <= bound_mb, row
        assert row.is_bounded, row
        peak = row.preparing
        assert row.imports.resident_mb < peak.resident_mb <= peak.anonymous_mb + peak.mapped_mb + 50
    return {row.format: row for row in rows}


def test_preparation_takes_little_whatever_the_checkpoint_is_saved_in(tmp_path: Path) -> None:
    """Had it read the file, or the weights in it, it would take 242 MB."""
    rows = measured(tmp_path, "resnet152", "float32", *preparation.FORMATS, bound_mb=120)
    whole, beside_momentum = pytest.approx(241.5, rel=0.01), pytest.approx(483, rel=0.01)
    assert {name: row.file_mb for name, row in rows.items()} == {
        "zip": whole,
        "legacy": whole,
        "safetensors": whole,
        "training": beside_momentum,
        "training-legacy": beside_momentum,
    }


@pytest.mark.parametrize(("dtype", "format_"), [("float64", "legacy"), ("float16", "zip")])
def test_preparation_takes_little_where_weights_are_converted(
    tmp_path: Path, dtype: str, format_: str
) -> None:
    measured(tmp_path, "resnet152", dtype, format_, bound_mb=120)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_the_largest_of_the_paper_s_models_takes_at_most_its_file_s_size_and_200_mb(
    tmp_path: Path,
) -> None:
    rows = measured(tmp_path, "vit_l_16", "float32", "zip", "legacy", "safetensors", bound_mb=200)
    for row in rows.values():
        assert row.preparing.resident_mb <= row.file_mb + 200, row
        assert row.file_mb == pytest.approx(1217, rel=0.01)


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(
        UnknownFormat, match="no format 'tar': known are zip, legacy, safetensors, "
    ):
        preparation.options(["resnet18"], ["tar"], ["float32"], None)
    with pytest.raises(UnknownFormat, match="no dtype 'int8'"):
        preparation.options(["resnet18"], ["zip"], ["int8"], None)
