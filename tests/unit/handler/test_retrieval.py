"""Weight files into memory: mapped and read, chunk by chunk."""

import contextlib
import ctypes
import errno
import itertools
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from handler import address_space, retrieval
from handler.retrieval import (
    CHUNK_BYTES,
    FileLayout,
    MappedFile,
    ReadFile,
    TensorView,
    WeightFile,
    contiguous_strides,
)
from models import weight_files
from models.layers import TensorPlace

LARGE: Final = "large.weight"


def tensors(elements: int = 1000) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        LARGE: torch.randn(elements, 3, generator=generator),
        "bn.num_batches_tracked": torch.tensor(7),
        "half": torch.randn(5, 7, generator=generator).half(),
        "small.bias": torch.randn(3, generator=generator),
    }


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def safetensors(path: Path, content: Mapping[str, Tensor]) -> FileLayout:
    """Writes a file as `prepare` does; where its tensors lie."""
    written = weight_files.write(path, "safetensors", places(content), content)
    views = [
        TensorView(
            entry.name,
            content[entry.name].dtype,
            entry.shape,
            entry.offset // content[entry.name].element_size(),
        )
        for entry in written.tensors
    ]
    return FileLayout(views, written.bytes)


def pth(path: Path, content: Mapping[str, Tensor]) -> None:
    weight_files.write(path, "pth", places(content), content)


def places(content: Mapping[str, Tensor]) -> list[TensorPlace]:
    return [
        TensorPlace(key, tuple(tensor.shape), tensor.dtype, parameter=True)
        for key, tensor in content.items()
    ]


def steps(file: WeightFile) -> int:
    """Retrieves to the end; how many chunks it took."""
    count = 1
    while file.step():
        count += 1
    return count


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].is_contiguous()
        assert torch.equal(found[key], tensor), key


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def open_files(path: Path) -> int:
    found = 0
    for number in Path("/proc/self/fd").iterdir():
        try:
            found += number.readlink() == path
        except FileNotFoundError:  # the listing's own
            continue
    return found


SIZES: Final = [1000, CHUNK_BYTES // 6, CHUNK_BYTES // 12 * 5]


@pytest.fixture(autouse=True)
def _slow_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk takes a second."""
    seconds = itertools.count()
    monkeypatch.setattr(retrieval, "now_ns", lambda: next(seconds) * 10**9)


@pytest.mark.parametrize("elements", SIZES)
def test_a_mapped_file_gives_the_tensors_that_were_written(tmp_path: Path, elements: int) -> None:
    content = tensors(elements)
    layout = safetensors(tmp_path / "a.safetensors", content)
    with opened(tmp_path / "a.safetensors") as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        assert file.bytes == size
        assert steps(file) == -(-size // CHUNK_BYTES)
        assert_equal(file.take(), content)


@pytest.mark.parametrize("elements", SIZES)
def test_a_read_file_gives_the_tensors_that_were_written(tmp_path: Path, elements: int) -> None:
    content = tensors(elements)
    pth(tmp_path / "a.pth", content)
    with opened(tmp_path / "a.pth") as (descriptor, size):
        file = ReadFile(descriptor, size)
        assert file.bytes == size
        assert steps(file) == -(-size // CHUNK_BYTES)
        assert_equal(file.take(), content)
        assert file.take() == {}, "nothing of it is kept"


def test_mapped_tensors_start_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    layout = safetensors(tmp_path / "a.safetensors", tensors())
    with opened(tmp_path / "a.safetensors") as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        steps(file)
        assert {tensor.data_ptr() % 64 for tensor in file.take().values()} == {0}


def test_a_mapping_lives_as_long_as_a_tensor_on_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    layout = safetensors(path, tensors())
    with opened(path) as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        assert not mapped(path), "nothing is mapped before the first step"
        steps(file)
    taken = dict(file.take())
    del file
    last = taken.pop(LARGE)
    del taken
    assert mapped(path)
    assert torch.equal(last, tensors()[LARGE]), "the descriptor was closed long ago"
    del last
    assert not mapped(path)
    assert open_files(path) == 0


def test_a_mapping_goes_with_a_retrieval_that_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    layout = safetensors(path, tensors(CHUNK_BYTES))
    with opened(path) as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        assert file.step()
        assert mapped(path)
        del file
    assert not mapped(path)
    assert open_files(path) == 0


def test_writing_to_mapped_tensors_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    layout = safetensors(path, tensors())
    before = path.read_bytes()
    with opened(path) as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        steps(file)
        with torch.inference_mode():
            for tensor in file.take().values():
                tensor.zero_()
    assert path.read_bytes() == before


def resident_pages(file: MappedFile) -> list[bool]:
    """Which of the mapping's pages this process has mapped in already (mincore tells the page cache's)."""
    pages = -(-file._size // 4096)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        assert file._placed is not None
        pagemap.seek(file._placed.space.address // 4096 * 8)
        entries = pagemap.read(pages * 8)
    return [entries[at * 8 + 7] >> 7 == 1 for at in range(pages)]


def test_each_step_populates_its_chunk_of_the_mapping(tmp_path: Path) -> None:
    layout = safetensors(tmp_path / "a.safetensors", tensors(CHUNK_BYTES // 6))
    with opened(tmp_path / "a.safetensors") as (descriptor, size):
        assert CHUNK_BYTES < size < 3 * CHUNK_BYTES
        file = MappedFile(descriptor, size, layout)
        file.step()
        assert all(resident_pages(file)[: CHUNK_BYTES // 4096])
        while file.step():
            pass
        assert all(resident_pages(file))


def test_chunks_grow_as_long_as_they_are_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = safetensors(tmp_path / "a.safetensors", tensors(CHUNK_BYTES * 25 // 12))
    took_ns = [0]
    calls = itertools.count()
    monkeypatch.setattr(retrieval, "now_ns", lambda: next(calls) * took_ns[0])
    with opened(tmp_path / "a.safetensors") as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        populated = []
        while file.step():
            populated.append(file._populated // CHUNK_BYTES)
            if len(populated) == 3:
                took_ns[0] = 10**9
        assert populated[:6] == [1, 3, 7, 15, 16, 17]
        assert all(resident_pages(file))


def test_what_is_expected_in_memory_comes_in_long_chunks_until_it_is_not(tmp_path: Path) -> None:
    layout = safetensors(tmp_path / "a.safetensors", tensors(CHUNK_BYTES * 25 // 12))
    with opened(tmp_path / "a.safetensors") as (descriptor, size):
        file = MappedFile(descriptor, size, layout, in_memory=True)
        populated = []
        while file.step():
            populated.append(file._populated // CHUNK_BYTES)
        assert populated[:3] == [4, 5, 6]
        assert all(resident_pages(file))
        assert_equal(file.take(), tensors(CHUNK_BYTES * 25 // 12))


def test_what_was_placed_ahead_is_given_once(tmp_path: Path) -> None:
    path, content = tmp_path / "a.safetensors", tensors()
    layout = safetensors(path, content)
    for _ in range(2):
        layout.place_ahead()
    assert not mapped(path)
    taken = []
    for _ in range(2):
        with opened(path) as (descriptor, size):
            file = MappedFile(descriptor, size, layout)
            steps(file)
            taken.append(file.take())
    addresses = [{tensor.data_ptr() for tensor in one.values()} for one in taken]
    assert not addresses[0] & addresses[1]
    for one in taken:
        assert_equal(one, content)


@pytest.mark.parametrize("ahead", [False, True])
def test_tensors_are_of_inference_wherever_they_are_made(tmp_path: Path, *, ahead: bool) -> None:
    layout = safetensors(tmp_path / "a.safetensors", tensors())
    assert not torch.is_inference_mode_enabled()
    if ahead:
        layout.place_ahead()
    assert all(tensor.is_inference() for tensor in layout.place().tensors.values())


@pytest.fixture
def no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves all mapping to the advice."""
    monkeypatch.setattr(retrieval, "map_cached", lambda *_: False)


@pytest.mark.usefixtures("no_windows")
def test_the_advice_alone_populates_as_much(tmp_path: Path) -> None:
    layout = safetensors(tmp_path / "a.safetensors", tensors(CHUNK_BYTES // 6))
    with opened(tmp_path / "a.safetensors") as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        while file.step():
            pass
        assert all(resident_pages(file))


@pytest.fixture
def madvise_error(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes madvise fail with the errno in the list, to which all mapping is left."""
    monkeypatch.setattr(retrieval, "map_cached", lambda *_: False)
    wanted = [errno.EINVAL]

    class Libc:
        mmap = address_space._libc.mmap

        def madvise(self, *_: Any) -> int:
            ctypes.set_errno(wanted[0])
            return -1

    monkeypatch.setattr(address_space, "_libc", Libc())
    return wanted


@pytest.mark.usefixtures("madvise_error")
@pytest.mark.parametrize("elements", SIZES)
def test_where_the_kernel_does_not_know_the_advice_pages_are_touched(
    tmp_path: Path, elements: int
) -> None:
    path, content = tmp_path / "a.safetensors", tensors(elements)
    layout = safetensors(path, content)
    with opened(path) as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        assert steps(file) == -(-size // CHUNK_BYTES)
        assert all(resident_pages(file))
        taken = file.take()
    assert_equal(taken, content)
    del taken, file
    assert not mapped(path)


def test_any_other_error_of_the_advice_is_raised(tmp_path: Path, madvise_error: list[int]) -> None:
    madvise_error[0] = errno.ENOMEM
    layout = safetensors(tmp_path / "a.safetensors", tensors())
    with (
        opened(tmp_path / "a.safetensors") as (descriptor, size),
        pytest.raises(OSError, match="Cannot allocate memory"),
    ):
        MappedFile(descriptor, size, layout).step()


def test_a_mapped_file_cut_short_before_its_retrieval_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    layout = safetensors(path, tensors())
    with opened(path) as (descriptor, size):
        os.truncate(path, size - 1)
        with pytest.raises(OSError, match=f"ends after {size - 1} of {size} bytes"):
            MappedFile(descriptor, size, layout).step()
    assert not mapped(path)


def test_a_mapped_file_cut_short_during_its_retrieval_is_an_error_and_no_signal(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    layout = safetensors(path, tensors(CHUNK_BYTES // 6))
    with opened(path) as (descriptor, size):
        file = MappedFile(descriptor, size, layout)
        assert file.step()
        os.truncate(path, CHUNK_BYTES)
        with pytest.raises(OSError, match=f"ends after {CHUNK_BYTES} of {size} bytes"):
            steps(file)


def test_a_read_file_cut_short_is_told_so(tmp_path: Path) -> None:
    pth(tmp_path / "a.pth", tensors(CHUNK_BYTES // 6))
    with opened(tmp_path / "a.pth") as (descriptor, size):
        file = ReadFile(descriptor, size)
        assert file.step()
        os.truncate(tmp_path / "a.pth", CHUNK_BYTES)
        with pytest.raises(OSError, match=f"ends after {CHUNK_BYTES} of {size} bytes"):
            steps(file)


def _zeros(content: bytes) -> bytes:
    return bytes(len(content))


def _end_lost(content: bytes) -> bytes:
    return content[: len(content) // 2].ljust(len(content), b"\0")


def _pickle_damaged(content: bytes) -> bytes:
    return content.replace(b"torch._utils", b"torch._evils").replace(b"_rebuild", b"_refuild")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on versions of pickle and the like
@pytest.mark.parametrize("seed", range(10))
def test_a_pth_file_damaged_anywhere_gives_tensors_or_an_os_error(
    tmp_path: Path, seed: int
) -> None:
    path, chance = tmp_path / "a.pth", random.Random(seed)
    pth(path, tensors(10))
    content = bytearray(path.read_bytes())
    for _ in range(50):
        damaged = content.copy()
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        with opened(path) as (descriptor, size):
            file = ReadFile(descriptor, size)
            with contextlib.suppress(OSError):
                steps(file)
                assert isinstance(file.take(), dict)


@pytest.mark.parametrize("damage", [_zeros, _end_lost, _pickle_damaged])
def test_a_damaged_pth_file_is_an_os_error_that_says_so(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "a.pth"
    pth(path, tensors())
    path.write_bytes(damage(path.read_bytes()))
    with (
        opened(path) as (descriptor, size),
        pytest.raises(OSError, match="no sound file of tensors"),
    ):
        steps(ReadFile(descriptor, size))


def test_a_pth_file_of_something_else_is_told_so(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "a.pth")
    with (
        opened(tmp_path / "a.pth") as (descriptor, size),
        pytest.raises(OSError, match="holds a list"),
    ):
        steps(ReadFile(descriptor, size))


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("must-not-exist",))


def test_no_code_in_a_pth_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": _Runs()}, "a.pth")
    with (
        opened(tmp_path / "a.pth") as (descriptor, size),
        pytest.raises(OSError, match="no sound file of tensors"),
    ):
        steps(ReadFile(descriptor, size))
    assert not (tmp_path / "must-not-exist").exists()


def test_taking_before_retrieval_is_a_mistake(tmp_path: Path) -> None:
    layout = safetensors(tmp_path / "a.safetensors", tensors())
    with (
        opened(tmp_path / "a.safetensors") as (descriptor, size),
        pytest.raises(RuntimeError, match="before it was retrieved"),
    ):
        MappedFile(descriptor, size, layout).take()


def test_contiguous_strides_are_torchs() -> None:
    for shape in [(), (3,), (2, 3), (4, 1, 5, 2)]:
        assert contiguous_strides(shape) == torch.empty(shape).stride()
