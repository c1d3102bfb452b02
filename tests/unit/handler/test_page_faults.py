"""Few faults that map much, and faults that waited for storage."""

import mmap
import os
import resource
from pathlib import Path
from typing import Final

import pytest

from bench import page_cache
from handler import page_faults
from handler.address_space import AddressSpace
from handler.page_faults import WINDOW_BYTES, map_cached, storage_reads

SIZE: Final = 21 * WINDOW_BYTES + 3 * mmap.PAGESIZE + 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(SIZE))
    return file


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "_known", set())


def mapped(path: Path) -> AddressSpace:
    space = AddressSpace(SIZE)
    with path.open("rb") as file:
        space.map(file.fileno())
    return space


def map_all(path: Path, start: int = 0) -> bool:
    return map_cached(mapped(path), start, SIZE, path.stat().st_dev)


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("start", [0, mmap.PAGESIZE, 5 * WINDOW_BYTES])
def test_all_pages_are_mapped_by_a_fault_in_each_window(path: Path, start: int) -> None:
    content = mapped(path).content()
    for page in range(0, SIZE, mmap.PAGESIZE):
        content[page]
    space = mapped(path)
    content = space.content()
    before = minor_faults()
    assert map_cached(space, start, SIZE, path.stat().st_dev)
    windows = -(-(SIZE - start) // WINDOW_BYTES) + 1
    assert minor_faults() - before <= windows + 40, "those of what the call itself needs"
    before = minor_faults()
    assert sum(content[page] for page in range(start, SIZE, mmap.PAGESIZE))
    assert minor_faults() - before < 10


def test_where_a_fault_brings_in_less_than_a_window_it_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_faults, "WINDOW_BYTES", 16 * WINDOW_BYTES)
    assert not map_all(path)
    assert not page_faults._known


def test_a_device_is_looked_at_until_a_window_was_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert map_all(path)
    monkeypatch.setattr(page_faults, "_are_mapped", lambda *_: False)
    assert map_all(path)
    page_faults._known.clear()
    assert not map_all(path)


def test_what_had_to_be_read_is_left_to_the_advice(path: Path) -> None:
    assert map_all(path)
    page_cache.evict([path.parent])
    if page_cache.cached_share(path.parent):
        pytest.skip("this file system keeps its files in memory")
    assert not map_all(path)
    path.read_bytes()
    assert any(map_all(path) for _ in range(3)), (
        "what was read ahead is marked until its first fault"
    )


def test_a_file_that_was_cut_is_no_signal(path: Path) -> None:
    space = mapped(path)
    os.truncate(path, 2 * WINDOW_BYTES)
    assert not map_cached(space, 0, SIZE, path.stat().st_dev)


def test_where_the_kernel_has_no_such_file_it_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(page_faults, "_sink", refused)
    assert not map_all(path)


def test_the_mapping_is_not_held(path: Path) -> None:
    space = mapped(path)
    assert map_cached(space, 0, SIZE, path.stat().st_dev)
    assert str(path) in Path("/proc/self/maps").read_text()
    del space
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_reads_from_a_device_are_counted(path: Path) -> None:
    page_cache.evict([path.parent])
    if page_cache.cached_share(path.parent):
        pytest.skip("this file system keeps its files in memory")
    before = storage_reads()
    path.read_bytes()
    assert storage_reads() > before
