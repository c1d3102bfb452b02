"""A version's files, opened at once, and the steps of its layers."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from handler.errors import ModelFault
from handler.plan import Plan, Plans
from handler.steps import LayerStep, OpenFiles, steps
from handler.strategies import STRATEGIES
from models.store import PreparedModel, Store


@pytest.fixture(params=["safetensors", "pth"])
def model(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> PreparedModel:
    """A copy of the prepared model, which the test may damage."""
    model = store.open(f"resnet18-{request.param}")
    folder = tmp_path / model.version
    shutil.copytree(model.path, folder)
    return replace(model, path=folder)


def plan_of(model: PreparedModel) -> Plan:
    return Plans().of(model)


def first_file(model: PreparedModel) -> Path:
    return model.path / str(model.manifest.layers[0].file)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted without opening more


def test_files_are_opened_once_each_and_closed(model: PreparedModel) -> None:
    before = descriptors()
    files = OpenFiles(model, plan_of(model))
    weighted = [entry for entry in model.manifest.layers if entry.file is not None]
    assert descriptors() == before + len(weighted)
    files.close()
    files.close()
    assert descriptors() == before


def _missing(path: Path) -> None:
    path.unlink()


def _short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _long(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_missing, "No such file"),
        (_short, r"has \d+ bytes, expected \d+"),
        (_long, r"has \d+ bytes, expected \d+"),
        (_link, "symbolic links"),
    ],
)
@pytest.mark.parametrize("index", [0, -1], ids=["first", "last"])
def test_a_file_that_is_not_as_prepared_is_named_and_none_is_left_open(
    model: PreparedModel, damage: Callable[[Path], None], told: str, index: int
) -> None:
    path = model.path / str(model.manifest.layers[index].file)
    damage(path)
    before = descriptors()
    with pytest.raises(ModelFault, match=f"model '{model.name}': .*{path.name}: .*{told}"):
        OpenFiles(model, plan_of(model))
    assert descriptors() == before


def test_a_version_that_has_gone_is_told_apart(model: PreparedModel) -> None:
    shutil.rmtree(model.path)
    with pytest.raises(FileNotFoundError):
        OpenFiles(model, plan_of(model))


def test_a_version_that_goes_while_its_files_are_opened_is_told_apart(
    model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removal renames the folder first, then deletes its files one by one."""
    plan, before, real = plan_of(model), descriptors(), os.open
    opened = 0

    def removing(path: Any, *arguments: Any, **options: Any) -> int:
        nonlocal opened
        opened += 1
        if opened == 4:
            away = model.path.rename(model.path.with_name(".old"))
            shutil.rmtree(away)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", removing)
    with pytest.raises(FileNotFoundError):
        OpenFiles(model, plan)
    monkeypatch.undo()
    assert descriptors() == before


def test_a_version_removed_after_its_files_were_opened_does_no_harm(
    model: PreparedModel, image: Tensor, expected: Tensor
) -> None:
    plan = plan_of(model)
    files = OpenFiles(model, plan)
    shutil.rmtree(model.path)
    value = image
    with torch.inference_mode():
        for step in steps(plan, files, STRATEGIES["cicada"]):
            step.construct()
            load(step)
            value = step.execute(value)
    files.close()
    assert torch.equal(value, expected)


def load(step: LayerStep) -> None:
    if not step.weighted:
        return
    retrieval = step.retrieval()
    while retrieval.step():
        pass
    step.apply(retrieval)


def test_a_step_before_its_construction_is_a_mistake(model: PreparedModel, image: Tensor) -> None:
    plan = plan_of(model)
    files = OpenFiles(model, plan)
    step = steps(plan, files, STRATEGIES["cicada"])[0]
    with pytest.raises(RuntimeError, match="conv1 is used before its construction"):
        step.execute(image)
    files.close()


def _key_lost(tensors: dict[str, Any]) -> None:
    del tensors["conv1.weight"]


def _no_tensor(tensors: dict[str, Any]) -> None:
    tensors["conv1.weight"] = "weights"


def _other_shape(tensors: dict[str, Any]) -> None:
    tensors["conv1.weight"] = tensors["conv1.weight"][:1]  # a copy would broadcast it


def _other_type(tensors: dict[str, Any]) -> None:
    tensors["conv1.weight"] = tensors["conv1.weight"].double()


@pytest.mark.parametrize("model", ["pth"], indirect=True)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_key_lost, "has no tensor conv1.weight"),
        (_no_tensor, "has no tensor conv1.weight"),
        (_other_shape, r"\(1, 3, 7, 7\), expected .*\(64, 3, 7, 7\)"),
        (_other_type, "float64.*expected torch.float32"),
    ],
)
@pytest.mark.parametrize("strategy", ["pisel", "cicada"])
def test_a_pth_file_of_other_tensors_is_refused_and_named(
    model: PreparedModel, change: Callable[[dict[str, Any]], None], told: str, strategy: str
) -> None:
    path = first_file(model)
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)
    first = model.manifest.layers[0].model_copy(update={"bytes": path.stat().st_size})
    layers = (first, *model.manifest.layers[1:])
    model = replace(model, manifest=model.manifest.model_copy(update={"layers": layers}))
    plan = plan_of(model)
    files = OpenFiles(model, plan)
    step = steps(plan, files, STRATEGIES[strategy])[0]
    step.construct()
    if STRATEGIES[strategy].initialize:
        step.initialize()

    with pytest.raises(ModelFault, match=f"{path.name}: .*{told}"):
        load(step)
    files.close()


@pytest.mark.parametrize("model", ["pth"], indirect=True)
def test_a_pth_file_of_rubbish_is_refused_and_named(model: PreparedModel) -> None:
    path = first_file(model)
    path.write_bytes(b"\xff" * path.stat().st_size)
    plan = plan_of(model)
    files = OpenFiles(model, plan)
    step = steps(plan, files, STRATEGIES["cicada"])[0]
    step.construct()
    with pytest.raises(ModelFault, match=f"model 'resnet18-pth': .*{path.name}: no sound file"):
        load(step)
    files.close()
