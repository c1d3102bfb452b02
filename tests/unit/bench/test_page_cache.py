"""Cold files: what is in the page cache is told, and nothing stays there unnoticed."""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import page_cache

SIZE = 3 * mmap.PAGESIZE + 1


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "inner" / "file"
    path.parent.mkdir()
    path.write_bytes(b"x" * SIZE)
    (tmp_path / "empty").touch()
    with monkeypatch.context() as patch:
        patch.setattr(page_cache, "_LIMIT_S", 0.1)
        try:
            page_cache.evict([tmp_path])
        except OSError:
            pytest.skip("this file system's files are always in memory")
    return path


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert mapping[0] == mapping[-1] == ord("x")
        yield mapping


def is_cached(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return page_cache._is_cached(descriptor)
    finally:
        os.close(descriptor)


def test_a_file_is_cached_once_it_was_read_until_it_is_evicted(file: Path) -> None:
    assert not is_cached(file)
    file.read_bytes()
    assert is_cached(file)
    page_cache.evict([file.parent.parent])
    assert not is_cached(file)


def test_the_cached_part_of_a_folder_is_told_by_pages(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"y" * mmap.PAGESIZE)
    page_cache.evict([file.parent])
    assert page_cache.cached_share(file.parent) == 0
    other.read_bytes()
    assert page_cache.cached_share(file.parent) == pytest.approx(1 / 5)  # of its 4 pages and 1
    file.read_bytes()
    assert page_cache.cached_share(file.parent) == 1


def test_a_folder_is_read_into_the_page_cache(file: Path) -> None:
    assert page_cache.cached_share(file.parent) == 0
    assert page_cache.read_in(file.parent) == 1
    assert is_cached(file)


def test_eviction_waits_until_a_mapping_has_gone(file: Path) -> None:
    with mapped(file) as mapping:
        letting_go = threading.Timer(0.05, mapping.close)
        letting_go.start()
        page_cache.evict([file.parent])
        assert mapping.closed
        letting_go.join()
    assert not is_cached(file)


def test_a_file_that_stays_mapped_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_LIMIT_S", 0.05)
    with mapped(file), pytest.raises(OSError, match="stays in the page cache") as raised:
        page_cache.evict([file.parent])
    assert raised.value.filename == str(file)


def test_reading_directly_counts_the_bytes_and_caches_none(file: Path) -> None:
    assert page_cache.read_direct([file, file]) == 2 * SIZE
    assert not is_cached(file)


def test_made_cold_a_file_was_read_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[bool] = []
    monkeypatch.setattr(
        page_cache, "evict", lambda folders: cached.extend(is_cached(file) for _ in folders)
    )
    page_cache.make_cold(file.parent.parent)
    assert cached == [True]

    monkeypatch.undo()
    page_cache.make_cold(file.parent.parent)
    assert not is_cached(file)
