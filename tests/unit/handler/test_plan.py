"""A manifest against the architecture that it names."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from handler.errors import ModelFault
from handler.plan import Plans
from models import catalog
from models.manifest import LayerEntry
from models.store import PreparedModel, Store


@pytest.fixture
def model(store: Store) -> PreparedModel:
    return store.open("resnet18-safetensors")


def changed(model: PreparedModel, **fields: Any) -> PreparedModel:
    return replace(model, manifest=model.manifest.model_copy(update=fields))


def with_layer(model: PreparedModel, index: int, **fields: Any) -> PreparedModel:
    layers: list[LayerEntry] = list(model.manifest.layers)
    layers[index] = layers[index].model_copy(update=fields)
    return changed(model, layers=tuple(layers))


def test_a_plan_names_the_layers_and_their_bytes(model: PreparedModel) -> None:
    plan = Plans().of(model)
    chain = catalog.architecture("resnet18", classes=10)
    assert plan.names == [layer.name for layer in chain.layers]
    assert plan.layer_bytes == [entry.bytes for entry in model.manifest.layers]
    assert all(
        (size > 0) == bool(layer.tensors)
        for size, layer in zip(plan.layer_bytes, chain.layers, strict=True)
    )


def test_a_layout_cuts_tensors_out_where_the_manifest_says(model: PreparedModel) -> None:
    planned = Plans().of(model).layers[1]
    path = model.path / str(planned.entry.file)
    assert planned.layout is not None
    placed = planned.layout.place()
    with path.open("rb") as file:
        placed.space.map(file.fileno())
    found = placed.tensors
    with safe_open(path, framework="pt") as expected:
        for entry in planned.entry.parameters:
            tensor = found[entry.name]
            assert torch.equal(tensor, expected.get_tensor(entry.name))
            assert tensor.shape == entry.shape
            assert tensor.is_contiguous()
    assert found["bn1.num_batches_tracked"].dtype == torch.int64


def test_plans_are_kept_but_only_of_the_versions_served_lately(model: PreparedModel) -> None:
    plans = Plans(most=2)
    plan = plans.of(model)
    assert plans.of(model) is plan
    for number in range(2):
        plans.of(replace(model, path=model.path / str(number)))
    assert plans.of(model) is not plan


def test_only_the_last_plan_asked_for_holds_addresses(model: PreparedModel) -> None:
    plans = Plans()
    one = plans.of(model)
    layouts = [planned.layout for planned in one.layers if planned.layout is not None]
    assert layouts

    def placed() -> set[bool]:
        return {layout._ahead._made is not None for layout in layouts}

    assert placed() == {False}
    one.place_ahead()
    assert plans.of(model) is one
    assert placed() == {True}
    plans.of(replace(model, path=model.path / "other")).place_ahead()
    assert placed() == {False}


def test_an_unknown_architecture_is_a_fault_of_the_model(model: PreparedModel) -> None:
    with pytest.raises(ModelFault, match=r"'resnet18-safetensors'.*'resnet19'.*resnet18"):
        Plans().of(changed(model, architecture="resnet19"))


def test_other_layers_than_the_architectures_are_a_fault(model: PreparedModel) -> None:
    with pytest.raises(ModelFault, match="layers"):
        Plans().of(changed(model, layers=model.manifest.layers[:-1]))
    with pytest.raises(ModelFault, match="layers"):
        Plans().of(changed(model, granularity="stage"))


def test_a_tensor_of_another_shape_is_named(model: PreparedModel) -> None:
    entry = model.manifest.layers[0].parameters[0]
    wrong = entry.model_copy(update={"shape": (64, 3, 1, 1)})
    with pytest.raises(ModelFault, match=r"conv1.*\(64, 3, 1, 1\).*expected.*\(64, 3, 7, 7\)"):
        Plans().of(with_layer(model, 0, parameters=(wrong,)))


def test_other_classes_than_the_heads_are_a_fault(model: PreparedModel) -> None:
    with pytest.raises(ModelFault, match=r"fc.*\(10, 512\).*expected.*\(11, 512\)"):
        Plans().of(changed(model, classes=11))


def test_a_missing_and_a_surplus_tensor_are_named(model: PreparedModel) -> None:
    parameters = model.manifest.layers[1].parameters
    last = parameters[-1].name
    with pytest.raises(ModelFault, match=f"bn1 has the tensor None, expected .*{last}"):
        Plans().of(with_layer(model, 1, parameters=parameters[:-1]))
    surplus = parameters[-1].model_copy(update={"name": "bn1.more"})
    with pytest.raises(ModelFault, match=r"bn1\.more.*expected None"):
        Plans().of(with_layer(model, 1, parameters=(*parameters, surplus)))
