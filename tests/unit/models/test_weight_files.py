import hashlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from models import weight_files
from models.layers import TensorPlace
from models.manifest import WeightFormat

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "layer.conv.weight": ((3, 5, 7, 1), torch.float32),
    "layer.bn.num_batches_tracked": ((), torch.int64),
    "layer.empty": ((0, 4), torch.float32),
    "layer.one": ((1,), torch.float32),
    "layer.aligned": ((16,), torch.float32),
    "layer.half": ((3,), torch.float16),
    "layer.brain": ((5, 3), torch.bfloat16),
    "layer.flag": ((7,), torch.bool),
    "layer.last": ((2, 3), torch.float64),
}
FORMATS: tuple[WeightFormat, ...] = ("safetensors", "pth")


def places(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = SHAPES) -> list[TensorPlace]:
    return [
        TensorPlace(key, shape, dtype, parameter="num_batches" not in key)
        for key, (shape, dtype) in shapes.items()
    ]


def random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randint(0, 100, shape, generator=generator).to(dtype)
        for key, (shape, dtype) in SHAPES.items()
    }


def load(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".pth":
        loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
        return loaded
    loaded = safetensors.torch.load_file(path)
    return {key: tensor for key, tensor in loaded.items() if not key.startswith("__pad.")}


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_libraries_read_back_equal_tensors(tmp_path: Path, weight_format: WeightFormat) -> None:
    tensors = random_tensors()
    path = tmp_path / f"file.{weight_format}"
    written = weight_files.write(path, weight_format, places(), tensors)
    loaded = load(path)
    assert set(loaded) == set(tensors)
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor)
    content = path.read_bytes()
    assert written.bytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert [entry.name for entry in written.tensors] == list(SHAPES)
    assert [entry.parameter for entry in written.tensors] == [True, False, *[True] * 7]


def test_every_tensor_of_a_safetensors_file_lies_aligned_at_its_offset(tmp_path: Path) -> None:
    tensors = random_tensors()
    path = tmp_path / "file.safetensors"
    written = weight_files.write(path, "safetensors", places(), tensors)
    content = bytearray(path.read_bytes())
    for entry in written.tensors:
        assert entry.offset % 64 == 0
        expected = tensors[entry.name]
        if expected.numel() == 0:
            continue
        found = torch.frombuffer(
            content, dtype=expected.dtype, count=expected.numel(), offset=entry.offset
        )
        assert torch.equal(found.reshape(expected.shape), expected)
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0


@pytest.mark.parametrize("key_length", range(1, 70, 3))
def test_data_begin_aligned_whatever_the_header_s_length(tmp_path: Path, key_length: int) -> None:
    key = "k" * key_length
    place = TensorPlace(key, (3,), torch.float32, parameter=True)
    path = tmp_path / "file.safetensors"
    written = weight_files.write(path, "safetensors", [place], {key: torch.ones(3)})
    assert written.tensors[0].offset % 64 == 0
    with safetensors.safe_open(path, "pt") as opened:
        assert torch.equal(opened.get_tensor(key), torch.ones(3))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_views_strides_and_shared_storages_are_written_compactly(
    tmp_path: Path, weight_format: WeightFormat
) -> None:
    large = torch.arange(1_000_000, dtype=torch.float32)
    square = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    image = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4)
    tensors = {
        "view": large[10:20],
        "transposed": square.T,
        "shared": square,
        "shared again": square,
        "expanded": torch.ones(1).expand(8),
        "channels last": image.to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(square),
    }
    here = [
        TensorPlace(key, tuple(tensor.shape), torch.float32, parameter=True)
        for key, tensor in tensors.items()
    ]
    path = tmp_path / f"file.{weight_format}"
    weight_files.write(path, weight_format, here, tensors)
    assert path.stat().st_size < 10_000
    loaded = load(path)
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor)
        assert loaded[key].is_contiguous()
        assert not loaded[key].requires_grad
    pointers = [tensor.untyped_storage().data_ptr() for tensor in loaded.values()]
    if weight_format == "pth":
        assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_equal_tensors_give_equal_files(tmp_path: Path, weight_format: WeightFormat) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_weight_files as t
path = Path({str(tmp_path / "other")!r})
print(t.weight_files.write(path, {weight_format!r}, t.places(), t.random_tensors()).sha256)
"""
    written = weight_files.write(tmp_path / "file", weight_format, places(), random_tensors())
    other = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert other.stdout.strip() == written.sha256


@pytest.mark.parametrize("weight_format", FORMATS)
def test_progress_adds_up_to_the_file(tmp_path: Path, weight_format: WeightFormat) -> None:
    pieces: list[int] = []
    place = TensorPlace("large", (3_000_000,), torch.float32, parameter=True)
    tensors = {"large": torch.zeros(3_000_000)}
    written = weight_files.write(tmp_path / "file", weight_format, [place], tensors, pieces.append)
    assert sum(pieces) == written.bytes
    assert max(pieces) <= 4 << 20


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_disk_that_takes_no_more_is_an_os_error(
    tmp_path: Path, weight_format: WeightFormat
) -> None:
    place = TensorPlace("large", (3_000_000,), torch.float32, parameter=True)
    tensors = {"large": torch.zeros(3_000_000)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            weight_files.write(tmp_path / "file", weight_format, [place], tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("tensor", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)])
def test_another_shape_or_type_than_the_place_s_is_refused(
    tmp_path: Path, weight_format: WeightFormat, tensor: Tensor
) -> None:
    place = TensorPlace("weight", (3,), torch.float32, parameter=True)
    with pytest.raises(ValueError, match="weight: found"):
        weight_files.write(tmp_path / "file", weight_format, [place], {"weight": tensor})
