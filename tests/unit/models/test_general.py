"""Any module as layers behind gates, against the module's own forward: bit for bit, or refused with the reason."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from models import activations, catalog, general
from models.gates import LayerGone
from models.general import Unsuitable
from models.layers import Architecture, BuiltLayer, Cut
from models.manifest import Granularity
from models.random_weights import RandomWeights
from tests.unit.own_modules import MODULES, BranchesOnShape, CalledTwice, Tied, floats, ids

CLASSES = 10
FAMILIES = {
    "alexnet": 96,
    "convnext_tiny": 64,
    "densenet121": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "googlenet": 64,
    "inception_v3": 96,
    "maxvit_t": 224,
    "mnasnet0_5": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "shufflenet_v2_x0_5": 64,
    "squeezenet1_1": 64,
    "swin_t": 64,
    "swin_v2_t": 64,
}
"""A small model of each of torchvision's families that have no chain of their own; an image's side."""


def with_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """The plain module with the weights; its state dict's metadata say which version of a model it is."""
    state = module.state_dict()
    for key, tensor in weights.items():
        state[key] = tensor
    module.load_state_dict(state)
    return module.eval()


def loaded(chain: Architecture, state: Mapping[str, Tensor]) -> list[BuiltLayer]:
    layers = [layer.build() for layer in chain.layers]
    for built in layers:
        built.bind(state)
    return layers


def entered(chain: Architecture, state: Mapping[str, Tensor], inputs: Any) -> list[int]:
    """The layers as the forward comes to them, each time."""
    visits: list[int] = []

    def enter(layer: int) -> tuple[int, ...]:
        visits.append(layer)
        return ()

    assert chain.gated is not None
    with torch.inference_mode():
        chain.gated(loaded(chain, state).__getitem__, enter, inputs)
    return visits


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    gc.collect()


@pytest.fixture(scope="module")
def plain(name: str) -> nn.Module:
    weights = RandomWeights(catalog.architecture(name, classes=CLASSES), 5)
    return with_weights(catalog.torchvision_model(name, classes=CLASSES), weights)


class TestTorchvisionsFamilies:
    @pytest.mark.parametrize("granularity", ["stage", "block"])
    def test_the_output_is_the_plain_modules_bit_for_bit(
        self, name: str, plain: nn.Module, granularity: Granularity
    ) -> None:
        side = FAMILIES[name]
        images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
        chain = catalog.architecture(name, granularity=granularity, classes=CLASSES)
        layers = loaded(chain, plain.state_dict())
        with torch.inference_mode():
            expected = plain(images)
            found = chain.forward(layers, images)

        assert torch.equal(found, expected)
        assert expected.shape == (2, CLASSES)
        assert expected.isfinite().all()
        assert not torch.equal(expected[0], expected[1])

    def test_its_layers_hold_every_tensor_once(self, name: str, plain: nn.Module) -> None:
        chain = catalog.architecture(name, classes=CLASSES)
        parameters = {key for key, _ in plain.named_parameters()}
        places = [place for layer in chain.layers for place in layer.tensors]

        assert len(places) == len({place.key for place in places})
        assert {place.key: (place.shape, place.dtype, place.parameter) for place in places} == {
            key: (tuple(tensor.shape), tensor.dtype, key in parameters)
            for key, tensor in plain.state_dict().items()
        }

    def test_it_is_loaded_in_the_order_of_its_forward(self, name: str, plain: nn.Module) -> None:
        side = FAMILIES[name]
        chain = catalog.architecture(name, classes=CLASSES)
        visits = entered(chain, plain.state_dict(), torch.zeros(1, 3, side, side))

        assert list(dict.fromkeys(visits)) == list(range(len(chain.layers)))
        assert len(chain.layers) > 1

    def test_no_layer_is_most_of_the_model_that_could_be_cut(self, name: str) -> None:
        chain = catalog.architecture(name, classes=CLASSES)
        sizes = [
            sum(place.dtype.itemsize * torch.Size(place.shape).numel() for place in layer.tensors)
            for layer in chain.layers
        ]
        for layer, size in zip(chain.layers, sizes, strict=True):
            most = max(sum(sizes) / 16, min(sum(sizes) / 3, 24 << 20))
            assert size <= most or len(layer.tensors) <= 2

    def test_under_initialization_it_computes_with_its_modules_own_resets(self, name: str) -> None:
        chain = catalog.architecture(name, classes=CLASSES)
        layers = [layer.build() for layer in chain.layers]
        torch.manual_seed(2)
        with torch.inference_mode():
            for built in layers:
                built.allocate()
                built.initialize()
        for built in layers:
            for module in built.root.modules():
                if isinstance(module, nn.BatchNorm2d):
                    assert torch.equal(module.running_var, torch.ones(module.num_features))  # type: ignore[arg-type]
                elif isinstance(module, nn.Linear | nn.Conv2d):
                    bound = module.weight[0].numel() ** -0.5
                    assert 0 < module.weight.abs().max() <= bound * 1.001

    def test_its_activations_are_counted_without_running_it(self, name: str) -> None:
        chain = catalog.architecture(name, classes=CLASSES)
        assert activations.peak_bytes(chain) > 3 * chain.image_size**2 * 4


def test_recorded_cuts_give_the_same_layers_without_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = catalog.architecture("squeezenet1_0", classes=3)

    def refuse(*_: object) -> None:
        raise AssertionError("the module is cut anew")

    monkeypatch.setattr(general, "cuts", refuse)
    again = catalog.architecture("squeezenet1_0", classes=3, cuts=found.cuts)
    assert [(layer.name, layer.tensors) for layer in again.layers] == [
        (layer.name, layer.tensors) for layer in found.layers
    ]


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_heads_for_training_are_left_out(name: str) -> None:
    assert not [key for key in catalog.architecture(name).keys if "aux" in key.lower()]
    tensors = {"aux1.conv.weight": torch.ones(1), "AuxLogits.fc.bias": torch.ones(1)}
    kept = {"fc.weight": torch.ones(1)}
    assert catalog.without_training_heads(name, tensors | kept) == kept
    assert catalog.without_training_heads("resnet18", tensors | kept) == tensors | kept


def test_torchvisions_own_weights_get_the_images_they_were_trained_on() -> None:
    """torchvision's builders set it where `weights` are given, and there alone."""
    assert catalog.options_of("inception_v3", pretrained=True)["transform_input"] is True
    assert "transform_input" not in catalog.options_of("inception_v3")
    assert catalog.options_of("resnet18", pretrained=True) == {}
    chain = catalog.architecture(
        "googlenet", options=catalog.options_of("googlenet", pretrained=True)
    )
    assert chain.options["transform_input"] is True
    weights = RandomWeights(chain, 1)
    options = {"aux_logits": False, "init_weights": False}
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    outputs = []
    for transform in (True, False):
        plain = catalog.torchvision_model(
            "googlenet", options=options | {"transform_input": transform}
        )
        with torch.inference_mode():
            outputs.append(with_weights(plain, weights)(image))
    with torch.inference_mode():
        found = chain.forward(loaded(chain, dict(weights)), image)
    assert torch.equal(found, outputs[0])
    assert not torch.equal(found, outputs[1])


each_module = pytest.mark.parametrize(("make", "inputs"), MODULES.values(), ids=MODULES)


def chain_of(
    make: Callable[[], nn.Module], inputs: Any, granularity: Granularity = "block"
) -> Architecture:
    module = general.structure(make, "a test's")
    return general.architecture("a test's", module, general.cuts(module, granularity, inputs))


@pytest.fixture(autouse=True)
def _every_part_is_a_layer(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.cls is not TestTorchvisionsFamilies:
        monkeypatch.setattr(general, "_LEAST_BYTES", {"block": 0, "stage": 0})


@each_module
@pytest.mark.parametrize("granularity", ["stage", "block"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_whatever_a_forward_does_its_output_is_the_plain_modules(
    make: Callable[[], nn.Module], inputs: Any, granularity: Granularity
) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    chain = chain_of(make, inputs, granularity)
    layers = loaded(chain, plain.state_dict())
    with torch.inference_mode():
        expected = tree_leaves(called(plain, inputs))
        found = tree_leaves(chain.forward(layers, inputs))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@each_module
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_weights_copied_over_initialized_ones_give_the_plain_modules_output(
    make: Callable[[], nn.Module], inputs: Any
) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    chain = chain_of(make, inputs)
    layers = [layer.build() for layer in chain.layers]
    with torch.inference_mode():
        for built in layers:
            built.allocate()
            built.initialize()
            built.copy(plain.state_dict())
        expected = tree_leaves(called(plain, inputs))
        found = tree_leaves(chain.forward(layers, inputs))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def called(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


@each_module
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_no_weight_is_kept_in_what_requests_are_built_from(
    make: Callable[[], nn.Module], inputs: Any
) -> None:
    chain = chain_of(make, inputs)
    first = [layer.build() for layer in chain.layers]
    for built in first:
        assert built.parameter_bytes() == 0
        assert not [p for p in built.root.parameters() if p is not None]


@each_module
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_what_still_refers_to_the_module_keeps_no_weights(
    make: Callable[[], nn.Module], inputs: Any
) -> None:
    torch.manual_seed(0)
    module = make().eval()
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    chain = general.architecture("kept", module, general.cuts(module, "block", inputs))
    with torch.inference_mode():
        expected = tree_leaves(called(module, inputs))
    general.let_go(module)
    assert sum(tensor.untyped_storage().nbytes() for tensor in module.state_dict().values()) == 0
    with torch.inference_mode():
        found = tree_leaves(chain.forward(loaded(chain, state), inputs))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@each_module
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_every_key_of_the_state_dict_is_kept_or_another_name_of_one_that_is(
    make: Callable[[], nn.Module], inputs: Any
) -> None:
    state = make().state_dict(keep_vars=True)
    chain = chain_of(make, inputs)
    assert chain.keys | chain.aliases.keys() == state.keys()
    assert not chain.keys & chain.aliases.keys()
    for alias, key in chain.aliases.items():
        assert state[alias] is state[key]


def test_a_tied_weight_lies_in_the_file_of_the_layer_that_comes_first() -> None:
    chain = chain_of(Tied, ids(1, 3))
    assert [layer.name for layer in chain.layers] == [
        "embedding",
        *(f"body.{number}" for number in range(4)),
        "head",
    ]
    assert chain.aliases == {"head.weight": "embedding.weight"}
    assert [place.key for place in chain.layers[0].tensors] == ["embedding.weight"]
    assert chain.layers[-1].tensors == ()


def test_a_module_called_twice_is_kept_until_its_last_call() -> None:
    chain = chain_of(CalledTwice, floats(1, 5))
    assert [(cut.name, cut.until) for cut in chain.cuts] == [("early", 1), ("late", 1)]


def test_parts_to_which_the_example_does_not_come_are_the_last_layer() -> None:
    chain = chain_of(BranchesOnShape, floats(1, 4))
    assert [cut.parts for cut in chain.cuts] == [("small",), ("end",), ("large",)]
    torch.manual_seed(1)
    plain = BranchesOnShape().eval()
    other = floats(2, 8)
    visits = entered(chain, plain.state_dict(), other)
    assert list(dict.fromkeys(visits)) == [2, 1], "of another branch it finds its way"
    with torch.inference_mode():
        found = chain.forward(loaded(chain, plain.state_dict()), other)
        assert torch.equal(found, plain(other))


def test_a_layer_that_was_let_go_is_missed_not_misread() -> None:
    torch.manual_seed(1)
    chain = chain_of(CalledTwice, floats(1, 5))
    layers = loaded(chain, CalledTwice().state_dict())
    assert chain.gated is not None

    def let_go_too_early(layer: int) -> Sequence[int]:
        return (0,) if layer == 1 else ()

    with torch.inference_mode(), pytest.raises(LayerGone, match="comes back to early"):
        chain.gated(layers.__getitem__, let_go_too_early, floats(1, 5))


class RefersInside(nn.Module):
    """Keeps, outside of a layer, a module that is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.large = nn.Linear(4, 400)
        self.inner = {"second": [self.block[1]]}

    def forward(self, value: Tensor) -> Tensor:
        ended: Tensor = self.large(self.inner["second"][0](value))
        return ended


def test_a_model_that_refers_into_a_layer_from_outside_is_one_layer() -> None:
    chain = chain_of(RefersInside, floats(1, 4), "stage")
    assert [cut.parts for cut in chain.cuts] == [("",)]
    plain = RefersInside().eval()
    with torch.inference_mode():
        found = chain.forward(loaded(chain, plain.state_dict()), floats(2, 4))
        assert torch.equal(found, plain(floats(2, 4)))


class UnregisteredModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(2, 2)]

    def forward(self, value: Tensor) -> Tensor:
        hidden: Tensor = self.hidden[0](value)
        return hidden


class WithState(nn.Module):
    def get_extra_state(self) -> object:
        return {"counter": 1}

    def set_extra_state(self, state: object) -> None: ...


class WithType(nn.Module):
    """Saves what is no tensor among its weights, as quantized modules do."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, _: bool) -> None:
        destination[f"{prefix}dtype"] = torch.qint8


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: {"weights": 1}, "gives a dict, expected a torch.nn.Module"),
        (UnregisteredModule, "holds a Linear in hidden without registering it"),
        (WithState, "keeps a state besides its tensors"),
        (
            lambda: nn.Sequential(WithType()),
            r"keeps a state besides its tensors: its 0\.dtype is a dtype",
        ),
        (Complex, "weight of torch.complex64"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "its module 0 .*weight, which has no shape"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "compiled by TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:`torch.jit.script")
def test_what_cannot_be_served_is_refused_with_the_reason(
    make: Callable[[], object], reason: str
) -> None:
    with pytest.raises(Unsuitable, match=f"mine.py:net.*{reason}"):
        general.structure(make, "mine.py:net")


def test_layers_that_are_not_the_modules_are_refused() -> None:
    module = CalledTwice().eval()
    with pytest.raises(Unsuitable, match=r"no layer has the module's late\.weight"):
        general.architecture("x", module, [Cut("early", ("early",), 0)])
    with pytest.raises(Unsuitable, match="a part that the module has not"):
        general.architecture("x", module, [Cut("other", ("other",), 0)])


def test_a_constructor_that_computes_with_its_weights_is_run_as_usual() -> None:
    class Computing(nn.Module):
        norm: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            nn.init.constant_(self.linear.weight, 2.0)
            self.register_buffer("norm", self.linear.weight.detach().norm(), persistent=False)
            self.scale = float(self.linear.weight.sum())

        def forward(self, value: Tensor) -> Tensor:
            scaled: Tensor = self.linear(value) / self.norm * self.scale
            return scaled

    module = general.structure(Computing, "x")
    assert isinstance(module, Computing)
    assert module.norm == 6
    assert module.scale == 18
