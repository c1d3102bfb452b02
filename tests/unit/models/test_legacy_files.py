"""Files of torch.save before torch 1.6: mapped, and the values that torch.load reads from them."""

import pickle
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from models import catalog, checkpoint, legacy_files, unpickling
from models.checkpoint import CheckpointError, Findings
from models.random_weights import RandomWeights

DTYPES: Final = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SHIFTS: Final = range(8)
"""How far a string in the object moves all that follows it."""


def save(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 5).to(dtype)


def assert_as_torch_loads(path: Path) -> dict[str, Tensor]:
    """Types, shapes, strides and bytes alike; returns what was found."""
    found, expected = legacy_files.load(path), torch.load(path, weights_only=True)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    for key, value in expected.items():
        if not isinstance(value, Tensor):
            assert found[key] == value
            continue
        tensor = found[key]
        assert type(tensor) is type(value)
        assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        assert (tensor.stride(), tensor.requires_grad) == (value.stride(), value.requires_grad)
        assert torch.equal(tensor, value), key
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


def mapped_ranges(path: Path) -> Iterator[range]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            yield range(start, end)


@pytest.mark.parametrize("shift", SHIFTS)
def test_every_type_has_torch_load_s_values_wherever_it_lies(tmp_path: Path, shift: int) -> None:
    content: dict[str, object] = {str(dtype): of(dtype, 5, 3) for dtype in DTYPES}
    save(content | {"name": "x" * shift}, tmp_path / "file")
    found = assert_as_torch_loads(tmp_path / "file")
    assert {tensor.dtype for tensor in found.values()} == set(DTYPES)


def test_tensors_lie_in_the_mapped_file(tmp_path: Path) -> None:
    save({"weight": torch.arange(50_000.0), "bias": torch.ones(3)}, tmp_path / "file")
    found = legacy_files.load(tmp_path / "file")
    (mapping,) = mapped_ranges(tmp_path / "file")
    for tensor in found.values():
        assert tensor.data_ptr() in mapping
    del found, tensor
    assert not list(mapped_ranges(tmp_path / "file"))


def test_types_that_torch_writes_and_cannot_read_are_read(tmp_path: Path) -> None:
    written = {"a": of(torch.float8_e4m3fn, 4, 3), "b": of(torch.int16, 7).view(torch.uint16)}
    save(written, tmp_path / "file")
    with pytest.raises(AttributeError):
        torch.load(tmp_path / "file")
    found = legacy_files.load(tmp_path / "file")
    for key, tensor in written.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shift", SHIFTS)
def test_views_strides_and_tensors_without_elements(tmp_path: Path, shift: int) -> None:
    large = of(torch.float32, 1000)
    content = {
        "name": "x" * shift,
        "first": large[7:19].view(3, 4),
        "second": large[10:40:3],
        "expanded": large[:4].expand(5, 4),
        "transposed": of(torch.float32, 6, 5).T,
        "channels last": of(torch.float64, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "empty half": torch.empty(4, 0, dtype=torch.float16),
        "number": torch.tensor(3.5),
        "negative": torch._neg_view(of(torch.float32, 3)),
        "conjugate": of(torch.complex64, 3).conj(),
        "parameter": nn.Parameter(of(torch.float32, 2, 2)),
        "buffer": nn.Parameter(of(torch.int64, 2), requires_grad=False),
    }
    save(OrderedDict(content), tmp_path / "file")
    found = assert_as_torch_loads(tmp_path / "file")
    first, second = found["first"], found["second"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    weight = of(torch.float32, 4, 4)
    save({"a": weight, "b": weight, "c": weight.clone()}, tmp_path / "file")
    found = assert_as_torch_loads(tmp_path / "file")
    assert found["a"].data_ptr() == found["b"].data_ptr() != found["c"].data_ptr()


def test_the_optimizer_beside_it_and_a_second_object_behind_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with (tmp_path / "file").open("wb") as file:
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)  # type: ignore[arg-type]
        save("another", file)  # type: ignore[arg-type]
    found = legacy_files.load(tmp_path / "file")
    expected = torch.load(tmp_path / "file")
    assert found["model"].keys() == expected["model"].keys()
    for key, tensor in expected["model"].items():
        assert torch.equal(found["model"][key], tensor)
    for number, state in expected["optimizer"]["state"].items():
        for key, tensor in state.items():
            assert torch.equal(found["optimizer"]["state"][number][key], tensor)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_a_layer_is_given_lies_where_its_type_allows(
    tmp_path: Path, shift: int, dtype: torch.dtype
) -> None:
    chain = catalog.architecture("squeezenet1_1", classes=3)
    weights = {key: tensor.to(dtype) for key, tensor in RandomWeights(chain, 0).items()}
    save({"state_dict": weights, "name": "x" * shift}, tmp_path / "file")
    read = checkpoint.read(tmp_path / "file", findings=Findings())
    fitted = checkpoint.fit(tmp_path / "file", chain, read)
    for key, tensor in weights.items():
        assert fitted[key].data_ptr() % fitted[key].itemsize == 0
        assert torch.equal(fitted[key], tensor.float())


Refer = Callable[[int, str], tuple[object, ...]]


class Written(pickle.Pickler):
    """Writes tensors' storages as torch did, or otherwise, as the test says."""

    def __init__(self, file: Any, refer: Refer) -> None:
        super().__init__(file, protocol=2)
        self._refer = refer
        self.storages: dict[str, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        key = str(value._cdata)
        self.storages[key] = value._untyped_storage
        return self._refer(value._untyped_storage.nbytes() // 4, key)


def usual(count: int, key: str) -> tuple[object, ...]:
    """What stands in the pickle for a storage of so many float32 elements."""
    return "storage", torch.FloatStorage, key, "cpu", count, None


def within_another(count: int, key: str) -> tuple[object, ...]:
    """As torch 0.1 wrote a storage that was a part of another: here all but its ends."""
    return "storage", torch.FloatStorage, key, "cpu", count, (f"{key} within", 1, count - 2)


def write(
    path: Path,
    content: object,
    refer: Refer = usual,
    system: Mapping[str, object] | None = None,
    keys: Callable[[list[str]], object] = lambda keys: keys,
    counted: Callable[[int], int] = lambda count: count,
) -> None:
    """A file in torch's old format, each part of it as usual or as given."""
    with path.open("wb") as file:
        usual_system = {"protocol_version": PROTOCOL_VERSION, "little_endian": True}
        for value in (MAGIC_NUMBER, PROTOCOL_VERSION, system or usual_system):
            pickle.dump(value, file, protocol=2)
        pickler = Written(file, refer)
        pickler.dump(content)
        pickle.dump(keys(list(pickler.storages)), file, protocol=2)
        for storage in pickler.storages.values():
            file.write(struct.pack("<q", counted(storage.nbytes() // 4)))
            file.write(bytes(storage))


@pytest.fixture
def small() -> dict[str, Tensor]:
    return {"a": of(torch.float32, 4, 3), "b": of(torch.float32, 7)}


def test_a_file_made_by_hand_is_read_as_torch_reads_it(
    tmp_path: Path, small: dict[str, Tensor]
) -> None:
    write(tmp_path / "file", small)
    found = assert_as_torch_loads(tmp_path / "file")
    assert torch.equal(found["a"], small["a"])


def test_a_storage_that_is_a_part_of_another(tmp_path: Path) -> None:
    tensor = torch.empty(0).set_(torch.arange(10.0).untyped_storage(), 0, (8,), (1,))
    write(tmp_path / "file", {"part": tensor}, within_another)
    found = assert_as_torch_loads(tmp_path / "file")
    assert found["part"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_numbers_are_little_endian_whatever_the_writer_was(
    tmp_path: Path, small: dict[str, Tensor]
) -> None:
    system = {"protocol_version": PROTOCOL_VERSION, "little_endian": False}
    write(tmp_path / "file", small, system=system)
    assert_as_torch_loads(tmp_path / "file")


def test_strings_that_python_2_pickled(tmp_path: Path, small: dict[str, Tensor]) -> None:
    write(tmp_path / "file", small)
    before = (tmp_path / "file").read_bytes()
    short = re.compile(rb"X([\x01-\x20])\0\0\0(?=[\w.]+)")  # BINUNICODE -> SHORT_BINSTRING
    after = short.sub(rb"U\1", before)
    assert len(after) < len(before) - 10
    (tmp_path / "file").write_bytes(after)
    found = assert_as_torch_loads(tmp_path / "file")
    assert list(found) == ["a", "b"]


def test_a_file_cut_short_anywhere_is_named_with_its_sizes(
    tmp_path: Path, small: dict[str, Tensor]
) -> None:
    write(tmp_path / "whole", small)
    whole = (tmp_path / "whole").read_bytes()
    data = sum(8 + tensor.nbytes for tensor in small.values())
    for size in range(len(whole)):
        (tmp_path / "file").write_bytes(whole[:size])
        with pytest.raises(
            CheckpointError, match=r"cut short|is empty|cannot be read|torch\.save did not write"
        ) as caught:
            checkpoint.read(tmp_path / "file")
        assert str(caught.value).startswith(str(tmp_path / "file"))
        if size >= len(whole) - data:
            assert str(caught.value).endswith(
                f"it is cut short, as of half a download: it has {size} bytes, expected {len(whole)}"
            )


def with_count(count: int) -> Refer:
    return lambda _, key: usual(count, key)


def with_view(start: int, count: int) -> Refer:
    return lambda whole, key: (*usual(whole, key)[:-1], ("view", start, count))


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"counted": lambda count: count + 1}, "has 13 elements, expected 12 as its tensors say"),
        ({"counted": lambda _: -1}, "has 18446744073709551615 elements, expected 12"),
        ({"refer": with_count(1 << 40)}, "says that 4398046511104 are those of its storage"),
        ({"refer": with_count(1 << 70)}, "are those of its storage"),
        ({"refer": with_count(-1)}, "says that -4 are those of its storage"),
        ({"refer": with_count(13)}, "it is cut short, as of half a download"),
        ({"refer": with_count(2)}, "it is cut short or damaged"),
        ({"refer": with_view(10, 40)}, "its storage view is no part of the one that it is in"),
        ({"refer": with_view(-1, 2)}, "its storage view is no part of the one that it is in"),
        ({"keys": lambda keys: keys[:-1]}, "lists are not those of its tensors"),
        ({"keys": lambda keys: [*keys, "9"]}, "lists are not those of its tensors"),
        ({"keys": lambda keys: [keys[0]] * len(keys)}, "lists are not those of its tensors"),
        ({"keys": lambda _: None}, "it is cut short or damaged"),
    ],
)
def test_a_file_that_lies_about_its_storages_is_refused_and_named(
    tmp_path: Path, small: dict[str, Tensor], lie: dict[str, Any], message: str
) -> None:
    write(tmp_path / "file", small, **lie)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.read(tmp_path / "file")
    assert str(caught.value).startswith(f"{tmp_path / 'file'} cannot be read as a checkpoint: it ")
    assert "\n" not in str(caught.value)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    """torch.load would have given it memory that nothing was read into."""
    write(tmp_path / "whole", {"a": torch.arange(6.0), "b": torch.arange(600.0)})
    whole = (tmp_path / "whole").read_bytes()
    shape = whole.index(b"K\x06\x85")  # BININT1 6, TUPLE1: the size of `a`
    (tmp_path / "file").write_bytes(whole[: shape + 1] + b"\x60" + whole[shape + 2 :])
    with pytest.raises(CheckpointError, match="it is cut short or damaged"):
        checkpoint.read(tmp_path / "file")


def test_a_version_that_is_not_known_is_named(tmp_path: Path, small: dict[str, Tensor]) -> None:
    write(tmp_path / "file", small)
    before = (tmp_path / "file").read_bytes()
    version = pickle.dumps(PROTOCOL_VERSION, protocol=2)
    assert version in before
    changed = pickle.dumps(PROTOCOL_VERSION + 1, protocol=2)
    (tmp_path / "file").write_bytes(before.replace(version, changed, 1))
    with pytest.raises(CheckpointError, match=r"begins with 1002, expected 1001"):
        checkpoint.read(tmp_path / "file")


def test_a_sparse_tensor_leaves_nothing_behind_for_the_next_load(tmp_path: Path) -> None:
    save({"weight": torch.eye(3).to_sparse()}, tmp_path / "file")
    loaded = unpickling.load(tmp_path / "file", "legacy")
    assert loaded["weight"].layout == torch.sparse_coo
    assert not torch._utils._sparse_tensors_to_validate


def test_the_file_is_read_while_it_is_replaced(tmp_path: Path, small: dict[str, Tensor]) -> None:
    """One descriptor is read and mapped: the name may stand for another file in between."""
    other = {key: tensor + 1 for key, tensor in small.items()}
    write(tmp_path / "file", small)
    ended = threading.Event()

    def replace() -> None:
        while not ended.is_set():
            write(tmp_path / "next", other | {"much": torch.ones(1000)})
            (tmp_path / "next").rename(tmp_path / "file")
            write(tmp_path / "next", small)
            (tmp_path / "next").rename(tmp_path / "file")

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(200):
            found = legacy_files.load(tmp_path / "file")
            assert torch.equal(found["a"], (other if "much" in found else small)["a"])
    finally:
        ended.set()
        thread.join()
