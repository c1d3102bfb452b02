"""Addresses before there is a file at them."""

import mmap
import os
import resource
from pathlib import Path
from typing import Final

import pytest
import torch

from handler import address_space
from handler.address_space import LARGE_PAGE, AddressSpace

PAGE: Final = mmap.PAGESIZE
SIZES: Final = [5, PAGE, 3 * PAGE + 5, LARGE_PAGE, 2 * LARGE_PAGE + PAGE + 5]


@pytest.fixture(params=SIZES)
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(request.param))
    return file


def mapped_at(path: Path, space: AddressSpace) -> None:
    with path.open("rb") as file:
        space.map(file.fileno())


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def reserved_bytes() -> int:
    """Of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def test_tensors_that_were_made_before_have_the_files_content(path: Path) -> None:
    content = path.read_bytes()
    space = AddressSpace(len(content))
    tensor, whole = space.tensor(torch.uint8), space.tensor(torch.int32)
    mapped_at(path, space)
    assert tensor.data_ptr() == whole.data_ptr() == space.address
    assert bytes(tensor.numpy()) == content
    assert bytes(space.content()) == content
    assert whole.shape == (len(content) // 4,)


def test_what_is_written_stays_with_this_process(path: Path) -> None:
    content = path.read_bytes()
    space = AddressSpace(len(content))
    mapped_at(path, space)
    space.tensor(torch.uint8).fill_(7)
    assert path.read_bytes() == content
    assert bytes(space.content()) == b"\7" * len(content)


def test_large_pages_are_asked_for(path: Path) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    space = AddressSpace(path.stat().st_size)
    mapped_at(path, space)
    described = Path("/proc/self/smaps").read_text().partition(str(path))[2]
    flags = described.partition("VmFlags:")[2].splitlines()[0].split()
    assert "hg" in flags


def test_the_addresses_begin_at_a_large_page_where_the_file_has_one(path: Path) -> None:
    size = path.stat().st_size
    at_large_pages = {AddressSpace(size).address % LARGE_PAGE == 0 for _ in range(20)}
    if size >= LARGE_PAGE:
        assert at_large_pages == {True}
    assert AddressSpace(size).address % PAGE == 0


def test_the_file_stays_as_long_as_a_tensor_and_then_goes_with_its_addresses(path: Path) -> None:
    size = path.stat().st_size
    before = reserved_bytes()
    space = AddressSpace(size)
    mapped_at(path, space)
    one, other = space.tensor(torch.uint8)[:1], space.tensor(torch.uint8)
    del space
    assert is_mapped(path)
    del one
    assert is_mapped(path)
    del other
    assert not is_mapped(path)
    assert reserved_bytes() - before < size or size < LARGE_PAGE


def test_reserved_addresses_take_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    before = resident_bytes()
    space = AddressSpace(1 << 30)
    tensor = space.tensor(torch.float32)
    assert resident_bytes() - before < 1 << 20
    assert tensor.numel() == 1 << 28


def test_where_there_are_no_addresses_it_says_so() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (reserved_bytes() + (64 << 20), limits[1]))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            AddressSpace(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_where_mapping_failed_nothing_is_unmapped_any_more() -> None:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        pytest.skip("no such file here")
    space = AddressSpace(PAGE)
    with path.open("rb") as file, pytest.raises(OSError, match="No such device"):
        space.map(file.fileno())  # once the kernel has unmapped what was there
    assert space._reserved in address_space._abandoned, "by now it may be something else's"


def test_an_advice_that_the_kernel_does_not_know_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        AddressSpace(PAGE).advise(0, PAGE, 12345)
