"""Module trees built from blueprints against the trees that they were taken from."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock

from models.blueprint import Blueprint, Structure, structure_only

DEADLINE_S = 100


def filled(source: nn.Module) -> tuple[Blueprint, Structure]:
    """A structure built from the source's blueprint, with the source's own tensors put in."""
    blueprint = Blueprint(source)
    structure = blueprint.build()
    state = source.state_dict()
    for slot in blueprint.slots:
        if slot.persistent:
            structure.put(slot, state[slot.name])
    return blueprint, structure


def trees() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        BasicBlock(8, 8),
        Bottleneck(16, 4, groups=2),
        EncoderBlock(2, 8, 16, 0.0, 0.0, nn.LayerNorm),
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.ReLU(),
    ]


@pytest.mark.parametrize("source", trees(), ids=lambda tree: type(tree).__name__)
def test_what_is_built_is_the_same_tree(source: nn.Module) -> None:
    source.eval()
    _, structure = filled(source)

    assert repr(structure.root) == repr(source)
    built_modules = list(structure.root.named_modules())
    modules = list(source.named_modules())
    assert [name for name, _ in built_modules] == [name for name, _ in modules]
    for (_, built), (_, module) in zip(built_modules, modules, strict=True):
        assert type(built) is type(module)
        assert built is not module
        assert not built.training
        assert vars(built).keys() == vars(module).keys()
    found, expected = structure.root.state_dict(), source.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("source", "shape"),
    list(zip(trees(), [(1, 8, 5, 5), (1, 16, 5, 5), (1, 3, 8), (2, 3, 6, 6), (3,)], strict=True)),
    ids=lambda value: type(value).__name__,
)
def test_what_is_built_computes_the_same(source: nn.Module, shape: tuple[int, ...]) -> None:
    source.eval()
    _, structure = filled(source)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(structure.root(value.clone()), source(value.clone()))


def test_slots_are_the_state_dicts_entries_in_its_order() -> None:
    source = BasicBlock(4, 4)
    slots = Blueprint(source).slots
    expected = [
        (key, tuple(tensor.shape), tensor.dtype) for key, tensor in source.state_dict().items()
    ]
    assert [(slot.name, slot.shape, slot.dtype) for slot in slots] == expected
    parameters = {name for name, _ in source.named_parameters()}
    assert {slot.name for slot in slots if slot.parameter} == parameters
    assert all(slot.persistent for slot in slots)


def test_elements_of_a_slot() -> None:
    by_name = {slot.name: slot.elements for slot in Blueprint(nn.BatchNorm2d(6)).slots}
    assert by_name["weight"] == 6
    assert by_name["num_batches_tracked"] == 1, "of shape ()"


def test_parameters_and_persistent_buffers_are_absent_until_they_are_put() -> None:
    blueprint = Blueprint(BasicBlock(4, 4))
    structure = blueprint.build()
    assert {structure.at(slot) for slot in blueprint.slots} == {None}
    first = blueprint.slots[0]
    tensor = torch.ones(first.shape)
    structure.put(first, tensor)
    assert structure.at(first) is tensor
    assert structure.root.get_submodule("conv1").weight is tensor


def test_each_tree_is_one_that_nobody_else_has() -> None:
    blueprint = Blueprint(BasicBlock(4, 4))
    first, second = blueprint.build(), blueprint.build()
    assert {first.at(slot) for slot in blueprint.slots} == {None}
    assert not set(first.modules) & set(second.modules)
    assert not {id(table) for table in first.tables} & {id(table) for table in second.tables}


def test_a_tree_that_was_emptied_holds_nothing_whatever_refers_to_itself() -> None:
    structure = Blueprint(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))).build()
    tensor = torch.ones(2, 2)
    structure.tables[2]["weight"] = tensor
    held = sys.getrefcount(tensor)
    structure.empty()
    del structure
    assert sys.getrefcount(tensor) == held - 1


def test_builds_share_no_table_and_no_child() -> None:
    source = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.Linear(2, 2)))
    blueprint = Blueprint(source)
    first, second = blueprint.build(), blueprint.build()
    for one, other, module in zip(
        first.root.modules(), second.root.modules(), source.modules(), strict=True
    ):
        for name, value in vars(one).items():
            if isinstance(value, (dict, list, set)):
                assert value is not vars(other)[name]
                assert value is not vars(module)[name]
        assert one is not other


def test_hooks_of_one_request_do_not_reach_the_next() -> None:
    blueprint = Blueprint(nn.ReLU())
    first, second = blueprint.build().root, blueprint.build().root
    calls: list[str] = []
    first.register_forward_hook(lambda *_: calls.append("first"))
    second(torch.ones(1))
    blueprint.build().root(torch.ones(1))
    assert calls == []
    first(torch.ones(1))
    assert calls == ["first"]


def test_hooks_of_the_source_are_kept() -> None:
    source, calls = nn.ReLU(), []
    source.register_forward_hook(lambda *_: calls.append("source"))
    Blueprint(source).build().root(torch.ones(1))
    assert calls == ["source"]


class Buffers(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("absent", None)
        self.register_parameter("none", None)


def test_a_buffer_that_no_state_dict_carries_is_a_copy_of_its_value() -> None:
    source = Buffers()
    blueprint = Blueprint(source)
    assert [(slot.name, slot.persistent) for slot in blueprint.slots] == [
        ("table", False),
        ("kept", True),
    ]
    first = blueprint.build().root
    assert isinstance(first, Buffers)
    assert torch.equal(first.table, torch.arange(3))
    first.table.zero_()
    source.table.fill_(9)
    second = blueprint.build().root
    assert isinstance(second, Buffers)
    assert torch.equal(second.table, torch.arange(3))
    assert list(second.state_dict()) == []
    assert dict(second.named_buffers()).keys() == {"table"}


def test_a_module_that_stands_in_two_places_is_built_once_and_stands_in_both() -> None:
    shared = nn.Linear(3, 3)
    source = nn.Sequential(shared, nn.ReLU(), shared).eval()
    blueprint, structure = filled(source)
    assert [slot.name for slot in blueprint.slots] == ["0.weight", "0.bias"]
    assert structure.root.get_submodule("0") is structure.root.get_submodule("2")
    value = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(structure.root(value), source(value))


def test_building_runs_no_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    blueprint = Blueprint(BasicBlock(4, 4))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a constructor runs")

    for kind in (nn.Module, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, BasicBlock):
        monkeypatch.setattr(kind, "__init__", refuse)
    assert isinstance(blueprint.build().root, BasicBlock)


class TestStructureOnly:
    def test_parameters_take_no_memory_and_buffers_have_their_values(self) -> None:
        with structure_only():
            block = BasicBlock(4, 4)
        assert all(parameter.is_meta for parameter in block.parameters())
        for name, buffer in block.named_buffers():
            assert not buffer.is_meta
            assert torch.equal(buffer, BasicBlock(4, 4).get_buffer(name))

    def test_values_that_a_constructor_computes_are_right(self) -> None:
        class Computing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                rates = torch.linspace(0, 0.1, 5)
                self.rates = [rate.item() for rate in rates]
                self.weight = nn.Parameter(torch.zeros(3) + 1)

        with structure_only():
            module = Computing()
        assert module.rates == Computing().rates
        assert torch.equal(module.weight, torch.ones(3))

    def test_after_it_construction_is_normal_again(self) -> None:
        with structure_only():
            pass
        assert not any(parameter.is_meta for parameter in BasicBlock(4, 4).parameters())
        with pytest.raises(ValueError, match="within"), structure_only():
            raise ValueError("within")
        assert not any(parameter.is_meta for parameter in BasicBlock(4, 4).parameters())

    @pytest.mark.usefixtures("_hasty_threads")
    def test_it_holds_for_its_own_thread_alone(self) -> None:
        torch.manual_seed(7)
        expected = BasicBlock(8, 8).state_dict()
        together, done = threading.Barrier(2), threading.Event()
        structures, failures = 0, []

        def construct_structures() -> None:
            nonlocal structures
            try:
                together.wait(DEADLINE_S)
                while structures < 1000 or not done.is_set():
                    with structure_only():
                        block = BasicBlock(8, 8)
                    assert all(parameter.is_meta for parameter in block.parameters())
                    structures += 1
            except BaseException as error:  # noqa: BLE001 - raised on the test's own thread
                failures.append(error)

        other = threading.Thread(target=construct_structures)
        other.start()
        try:
            together.wait(DEADLINE_S)
            for _ in range(1000):
                torch.manual_seed(7)
                found = BasicBlock(8, 8).state_dict()
                assert all(torch.equal(found[key], expected[key]) for key in expected)
        finally:
            done.set()
            other.join(DEADLINE_S)
        assert failures == []
        assert structures >= 1000


@pytest.fixture
def _hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
