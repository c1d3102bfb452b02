"""Construction without initialization: real 1-bit placeholders, and no thread but the caller's touched."""

import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.resnet import BasicBlock

from handler import miniloader
from models import catalog
from models.layers import BuiltLayer, Layer
from models.manifest import Granularity

FAMILIES = ["resnet18", "vgg11", "vit_b_32"]
REPETITIONS = 1000
DEADLINE_S = 100


def chain(name: str, granularity: Granularity) -> tuple[Layer, ...]:
    return catalog.architecture(name, granularity=granularity, classes=1000).layers


@pytest.mark.parametrize("granularity", ["stage", "block"])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_parameter_is_a_bit_per_element_until_its_weights_come(
    name: str, granularity: Granularity
) -> None:
    for layer in chain(name, granularity):
        built, told = miniloader.load(layer)
        held = 0
        for slot in layer.parameter_slots:
            placeholder = built._structure.at(slot)
            assert placeholder is not None
            assert placeholder.device.type == "cpu", "real memory, not a description of some"
            assert placeholder.nbytes == (slot.elements + 7) // 8, slot.name
            held += placeholder.nbytes
        assert told == held
        assert built.parameter_bytes() == held, "and no more than that, in one piece"


def test_what_is_built_ahead_has_no_memory_for_placeholders_yet() -> None:
    layer = block()
    layer.build_ahead()
    ahead = layer._ahead._made
    assert ahead is not None
    assert {p.untyped_storage().nbytes() for p in ahead.placeholders} == {0}
    built, held = miniloader.load(layer)
    assert built._structure is ahead.structure
    assert {p.untyped_storage().nbytes() for p in placeholders(built)} == {held}


def test_weights_take_the_placeholders_memory_away() -> None:
    layer = block()
    built, _ = miniloader.load(layer)
    held = [weakref.ref(placeholder) for placeholder in placeholders(built)]
    assert all(reference() is not None for reference in held)
    built.bind({key: torch.ones(slot.shape, dtype=slot.dtype) for key, slot in layer.slots})
    assert {reference() for reference in held} == {None}


def placeholders(built: BuiltLayer) -> list[Tensor]:
    found = [built._structure.at(slot) for slot in built.layer.parameter_slots]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("name", FAMILIES)
def test_placeholders_of_a_model_are_a_thirty_second_of_its_parameters(name: str) -> None:
    layers = chain(name, "block")
    held = sum(miniloader.load(layer)[1] for layer in layers)
    full = 4 * sum(slot.elements for layer in layers for slot in layer.parameter_slots)
    assert held == pytest.approx(full / 32, rel=1e-4)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator that runs on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Every function of torch that is called, the initializers of torch.nn.init included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def constructed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the modules whose constructor runs."""
    classes: list[str] = []
    constructor = nn.Module.__init__

    def counting(self: nn.Module, *arguments: Any, **options: Any) -> None:
        classes.append(type(self).__name__)
        constructor(self, *arguments, **options)

    monkeypatch.setattr(nn.Module, "__init__", counting)
    return classes


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The initializers of torch.nn.init that run."""
    called: list[str] = []

    def counted(name: str) -> Any:
        initializer = getattr(nn.init, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return initializer(*arguments, **options)

        return counting

    for name in vars(nn.init):
        if name.endswith("_") and not name.startswith("_"):
            monkeypatch.setattr(nn.init, name, counted(name))
    return called


@pytest.mark.parametrize("name", FAMILIES)
def test_no_constructor_no_initializer_and_no_operator_but_empty_and_split_runs(
    name: str, constructed: list[str], initialized: list[str]
) -> None:
    layers = chain(name, "block")
    constructed.clear()
    initialized.clear()

    with Operators() as operators, Functions() as functions:
        for layer in layers:
            miniloader.load(layer)

    assert set(operators.names) == {"aten.empty.memory_format", "aten.split_with_sizes.default"}
    assert set(functions.names) == {"empty", "split_with_sizes", "untyped_storage"}
    assert constructed == []
    assert initialized == []


def test_a_usual_construction_would_have_been_noticed(
    constructed: list[str], initialized: list[str]
) -> None:
    with Operators() as operators:
        BasicBlock(4, 4)
    assert "aten.uniform_.default" in operators.names
    assert "kaiming_uniform_" in initialized
    assert "BasicBlock" in constructed


def leave(root: nn.Module) -> None:
    """No initialization of torchvision's."""
    del root


def block() -> Layer:
    return Layer("layer1.0", BasicBlock(8, 8).eval(), "layer1.0.", initialize=leave)


def test_shape_and_precision_are_restored_before_the_weights_come() -> None:
    source = BasicBlock(8, 8).eval().half()
    layer = Layer("block", source, "", initialize=leave)
    built, _ = miniloader.load(layer)

    miniloader.restore(built)

    for key, slot in layer.slots:
        tensor = built._structure.at(slot)
        assert tensor is not None
        assert tensor.shape == source.state_dict()[key].shape
        assert tensor.dtype == source.state_dict()[key].dtype
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    full = sum(parameter.numel() * 2 for parameter in source.parameters())
    assert built.parameter_bytes() == full


class Positions(nn.Module):
    """Adds a buffer that no state dict carries, and one that is absent."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.table.view(1, 1, 1, 6)


def test_buffers_that_no_weight_file_carries_are_right() -> None:
    torch.manual_seed(0)
    source = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4, track_running_stats=False),  # its statistics and counter are absent
        Positions(),
    ).eval()
    layer = Layer("layer", source, "", initialize=leave)
    assert [key for key, _ in layer.slots] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    image = torch.randn(2, 3, 6, 6)
    with torch.inference_mode():
        expected = source(image)

        for _ in range(2):
            built, _ = miniloader.load(layer)
            miniloader.restore(built)
            built.copy(source.state_dict())
            assert torch.equal(built.execute(image), expected)
            positions = built._structure.root.get_submodule("2")
            assert isinstance(positions, Positions)
            positions.table.zero_()  # one request's buffer is not the next one's


@pytest.fixture
def _hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_hasty_threads")
def test_another_thread_constructs_normally_meanwhile() -> None:
    torch.manual_seed(7)
    expected = BasicBlock(8, 8).eval()
    layer = block()
    sizes = [(slot.elements + 7) // 8 for slot in layer.parameter_slots]
    together = threading.Barrier(2)
    loaded, failures = 0, []
    done = threading.Event()

    def load_small() -> None:
        nonlocal loaded
        try:
            together.wait(DEADLINE_S)
            while loaded < REPETITIONS or not done.is_set():
                built, _ = miniloader.load(layer)
                placeholders = [built._structure.at(slot) for slot in layer.parameter_slots]
                assert [p.nbytes for p in placeholders if p is not None] == sizes
                loaded += 1
        except BaseException as error:  # noqa: BLE001 - raised on the test's own thread
            failures.append(error)

    loader = threading.Thread(target=load_small)
    loader.start()
    try:
        together.wait(DEADLINE_S)
        for _ in range(REPETITIONS):
            torch.manual_seed(7)  # MiniLoader draws no random numbers either
            normal = BasicBlock(8, 8).eval()
            for key, tensor in expected.state_dict().items():
                found = normal.state_dict()[key]
                assert not found.is_meta
                assert torch.equal(found, tensor), key
    finally:
        done.set()
        loader.join(DEADLINE_S)
    assert failures == []
    assert loaded >= REPETITIONS
