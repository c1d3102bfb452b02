"""`cicada prepare --all-pretrained` beside a stand-in for the host that torchvision's weights come from."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor
from typer.testing import CliRunner, Result

from models import catalog, pretrained
from models.random_weights import RandomWeights
from models.store import PreparedModel, Store
from runtime.cli import app

SMALL: Final = ("resnet18", "resnet34")
"""Instead of the paper's ten, which take 4 GB: for these the same is tested as `matrix`."""


Host = Any


@pytest.fixture
def host(download_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Nothing is published there yet; what is downloaded goes to `tmp_path / "hub"`."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    return download_host


def published_weights(architecture: str) -> Mapping[str, Tensor]:
    return RandomWeights(catalog.architecture(architecture), 1)


@pytest.fixture
def publish(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Puts random weights in the place of torchvision's default ones, under its form of name."""

    def put(architecture: str) -> str:
        file = tmp_path / architecture
        torch.save(dict(published_weights(architecture)), file)
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        name = f"{architecture}-{digest[:8]}.pth"
        host.files[name] = file
        member: Any = torchvision.models.get_model_weights(architecture).DEFAULT
        changed = replace(member.value, url=f"{host.url}/{name}")
        monkeypatch.setattr(member, "_value_", changed)
        return name

    return put


@pytest.fixture
def small(publish: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(catalog, "PAPER", SMALL)
    return [publish(name) for name in SMALL]


def prepare_all(store: Store, *options: str) -> Result:
    words = ("prepare", "--all-pretrained", "--weights", str(store.root))
    return CliRunner().invoke(app, [*words, *options], prog_name="cicada")


def assert_as_published(model: PreparedModel, host: Host) -> None:
    (file,) = (
        file
        for name, file in host.files.items()
        if name.startswith(f"{model.manifest.architecture}-")
    )
    assert_holds(model, torch.load(file, mmap=True))


def assert_holds(model: PreparedModel, published: Mapping[str, Tensor]) -> None:
    """Every one of these tensors, and no other."""
    found = set()
    for layer in model.manifest.layers:
        if layer.file is None:
            continue
        tensors = safetensors.torch.load_file(model.path / layer.file)
        for entry in layer.parameters:
            assert torch.equal(tensors[entry.name], published[entry.name]), entry.name
            found.add(entry.name)
    assert found == set(published)


def test_all_are_downloaded_once_and_prepared(host: Host, small: list[str], tmp_path: Path) -> None:
    store = Store(tmp_path / "weights")
    result = prepare_all(store)
    assert result.exit_code == 0, result.output
    assert store.names() == list(SMALL)
    for name in SMALL:
        model = store.open(name)
        assert_as_published(model, host)
        assert store.verify(name) == []
        expected = pretrained.weights(name)
        assert model.manifest.source == f"pretrained:{expected.name}"
        assert model.manifest.preset == expected.name
        assert model.labels == tuple(expected.meta["categories"])
    assert "downloading resnet18: 46.8 MB" in result.stderr
    assert len(host.asked) == len(small)

    again = prepare_all(store)
    assert again.stdout == "resnet18: prepared already\nresnet34: prepared already\n"
    assert len(host.asked) == len(small)
    coarse = prepare_all(store, "--granularity", "stage", "--dtype", "bfloat16")
    assert coarse.exit_code == 0, coarse.output
    assert store.open("resnet34").manifest.granularity == "stage"
    assert len(host.asked) == len(small)  # the files are in the cache


def test_one_that_fails_does_not_keep_the_others_and_is_made_up_for(
    host: Host, small: list[str], tmp_path: Path
) -> None:
    store = Store(tmp_path / "weights")
    published = host.files.pop(small[0])
    result = prepare_all(store)
    assert result.exit_code == 1
    assert store.names() == ["resnet34"]
    assert f"{small[0]} could not be downloaded: HTTP 404" in result.stderr
    assert "1 of 2 models are not prepared: resnet18" in result.stderr
    host.files[small[0]] = published
    assert prepare_all(store).exit_code == 0
    assert store.names() == list(SMALL)


def test_a_download_that_breaks_off_is_resumed(
    host: Host, small: list[str], tmp_path: Path
) -> None:
    store = Store(tmp_path / "weights")
    host.breaks_after = [10_000_000]
    result = prepare_all(store)
    assert result.exit_code == 0, result.output
    assert host.asked[:2] == [(small[0], None), (small[0], "bytes=10000000-")]
    assert_as_published(store.open("resnet18"), host)


def test_a_damaged_model_is_prepared_anew(small: list[str], tmp_path: Path) -> None:
    assert small
    store = Store(tmp_path / "weights")
    prepare_all(store)
    damaged = store.open("resnet18")
    file = next(layer.file for layer in damaged.manifest.layers if layer.file)
    (damaged.path / file).write_bytes(b"")
    result = prepare_all(store)
    assert result.exit_code == 0, result.output
    assert "resnet34: prepared already" in result.stdout
    assert store.verify("resnet18") == []


@pytest.mark.usefixtures("host")
def test_a_published_file_of_another_hash_is_refused(
    host: Host, small: list[str], tmp_path: Path
) -> None:
    with host.files[small[0]].open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"damage")
    store = Store(tmp_path / "weights")
    result = prepare_all(store)
    assert result.exit_code == 1
    assert "what came has sha256" in result.stderr
    assert store.names() == ["resnet34"]
    cached = {path.name for path in (tmp_path / "hub" / "checkpoints").iterdir()}
    assert cached == {small[1]}


@pytest.fixture
def frugal(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file goes, there and from the cache, once another is asked for: three times the ten would be 13 GB."""
    published = type(host).open

    def open_one(host: Host, name: str) -> Any:
        for other in host.files.keys() - {name}:
            cached = tmp_path / "hub" / "checkpoints" / other
            if cached.exists():
                cached.unlink()
                host.files[other].unlink()
        return published(host, name)

    monkeypatch.setattr(type(host), "open", open_one)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("frugal")
def test_the_paper_s_ten(host: Host, publish: Callable[[str], str], tmp_path: Path) -> None:
    for name in catalog.PAPER:
        publish(name)
    store = Store(tmp_path / "weights")
    result = prepare_all(store)
    assert result.exit_code == 0, result.output
    assert store.names() == sorted(catalog.PAPER)
    assert len(catalog.PAPER) == 10
    for name in catalog.PAPER:
        assert_holds(store.open(name), published_weights(name))
    assert len(host.asked) == len(catalog.PAPER)
