"""Files that were just written are read into the page cache anew."""

import os
from pathlib import Path

import pytest

from models import mapped_memory, preparation
from models.manifest import WeightFormat
from models.store import Store


@pytest.mark.parametrize("size", [0, 1, 4096, (32 << 20) + 5])
def test_a_file_that_is_cached_anew_is_what_it_was(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    mapped_memory.recache(path)
    assert path.read_bytes() == content


def test_what_cannot_be_cached_anew_is_left_alone(tmp_path: Path) -> None:
    mapped_memory.recache(tmp_path / "absent")
    mapped_memory.recache(tmp_path)


def test_it_keeps_no_page_and_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 << 20))
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    mapped_memory.recache(path)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("weight_format", ["safetensors", "pth"])
def test_every_file_of_a_prepared_model_that_will_be_mapped_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_format: WeightFormat
) -> None:
    cached: list[str] = []
    monkeypatch.setattr(mapped_memory, "recache", lambda path: cached.append(path.name))
    source = preparation.from_seed(0, "resnet18", "block")
    model = preparation.prepare(Store(tmp_path), "resnet18", source, weight_format)
    files = [layer.file for layer in model.manifest.layers if layer.file]
    assert cached == (files if weight_format == "safetensors" else [])
