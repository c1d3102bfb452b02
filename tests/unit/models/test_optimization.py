"""What is chosen, given what was measured; the measuring itself is timed by `cicada bench latency`."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from models import blocked, catalog, optimization, preparation
from models.blocked import BlockedView
from models.fusion import FoldedWeights
from models.preparation import Source
from models.random_weights import RandomWeights
from models.store import Store


@pytest.fixture(scope="module")
def source() -> Source:
    return preparation.from_seed(0, "resnet18", "block")


def measured(monkeypatch: pytest.MonkeyPatch, *times: list[float]) -> None:
    def give(contenders: Sequence[object], _value: Tensor) -> list[list[float]]:
        assert len(contenders) == len(times)
        return list(times)

    monkeypatch.setattr(optimization, "_times", give)


def test_the_fastest_of_each_round_s_ratios_is_chosen(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(
        monkeypatch, [10.0, 30.0, 20.0], [9.0, 27.0, 18.0], [8.0, 24.0, 99.0], [10.0, 20.0, 20.0]
    )
    chosen = preparation.optimized(source, "safetensors", threads=1)
    assert chosen.optimization is not None
    assert chosen.optimization.memory_format == "channels_last"
    assert (chosen.optimization.plain_ms, chosen.optimization.optimized_ms) == (20.0, 16.0)
    assert chosen.optimization.threads == 1
    assert chosen.architecture.fused


def test_what_gains_too_little_stays_plain(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, [10.0, 10.0], [9.9, 9.9], [11.0, 11.0], [9.9, 10.0])
    assert preparation.optimized(source, "safetensors", threads=1) is source


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_answers_that_are_not_finite_stay_plain(source: Source, number: float) -> None:
    weights = dict(source.weights)
    weights["fc.bias"] = torch.full_like(weights["fc.bias"], number)
    broken = Source("broken", source.architecture, weights, source.preset)
    assert preparation.optimized(broken, "safetensors", threads=1) is broken


def test_a_candidate_that_answers_otherwise_is_not_measured(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimization, "_times", None)
    monkeypatch.setattr(optimization, "TOLERANCE", 0.0)
    assert preparation.optimized(source, "safetensors", threads=1) is source


def test_a_model_with_nothing_to_fuse_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimization, "_times", None)
    plain = preparation.from_seed(0, "vit_b_32", "block")
    assert preparation.optimized(plain, "safetensors", threads=1) is plain


def test_the_number_of_threads_is_as_before(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, [10.0], [5.0], [4.0], [3.0])
    before = torch.get_num_threads()
    preparation.optimized(source, "safetensors", threads=before + 1)
    assert torch.get_num_threads() == before


def test_channels_last_weights_lie_so_in_the_files(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured(monkeypatch, [10.0], [9.0], [5.0], [6.0])
    chosen = preparation.optimized(source, "safetensors", threads=1)
    model = preparation.prepare(Store(tmp_path), "fast", chosen, "safetensors")
    assert model.manifest.optimization == chosen.optimization
    entry = model.manifest.layers[0]
    found = safetensors.torch.load_file(model.path / str(entry.file))
    assert found["conv1.weight"].shape == (64, 7, 7, 3)
    plain = dict(RandomWeights(catalog.architecture("resnet18"), 0))
    scale = plain["bn1.weight"] / (plain["bn1.running_var"] + 1e-5).sqrt()
    expected = plain["conv1.weight"] * scale[:, None, None, None]
    assert torch.allclose(found["conv1.weight"].permute(0, 3, 1, 2), expected, rtol=1e-5)
    assert Store(tmp_path).verify("fast") == []


def test_a_pth_file_has_no_blocked_weights(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, [10.0], [9.0], [8.0])
    chosen = preparation.optimized(source, "pth", threads=1)
    assert chosen.optimization is not None
    assert chosen.optimization.memory_format == "channels_last"


def test_blocked_weights_lie_in_the_files_as_onednn_has_them(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured(monkeypatch, [10.0], [9.0], [8.0], [5.0])
    chosen = preparation.optimized(source, "safetensors", threads=1)
    model = preparation.prepare(Store(tmp_path), "fast", chosen, "safetensors")
    assert model.manifest.optimization is not None
    assert model.manifest.optimization.onednn == blocked.onednn_version()
    entry = model.manifest.layers[0]
    content = (model.path / str(entry.file)).read_bytes()
    views = [
        BlockedView(tensor.name, tensor.shape, tensor.blocked, tensor.offset)
        for tensor in entry.parameters
        if tensor.blocked is not None
    ]
    found = blocked.tensors(views, torch.frombuffer(bytearray(content), dtype=torch.uint8))
    contiguous = catalog.architecture("resnet18", fused="contiguous")
    folded = FoldedWeights(sorted(contiguous.keys), contiguous.folded, source.weights)
    assert found.keys() == {"conv1.weight"}
    assert torch.equal(found["conv1.weight"].to_dense(), folded["conv1.weight"])
    assert Store(tmp_path).verify("fast") == []


def test_blocked_weights_are_laid_out_for_the_threads_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """oneDNN lays ResNet-50's out otherwise for one thread, which this process has."""
    measured(monkeypatch, [10.0], [9.0], [8.0], [5.0])
    with optimization._threads(1):
        source = preparation.from_seed(0, "resnet50", "block")
        chosen = preparation.optimized(source, "safetensors", threads=2)
        preparation.prepare(Store(tmp_path), "fast", chosen, "safetensors")
    assert Store(tmp_path).verify("fast") == []
