"""Modules that are called directly against the same ones as torch calls them."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torchvision.ops import Conv2dNormActivation, SqueezeExcitation

from models import direct_calls
from models.blueprint import Blueprint

IMAGES = (2, 4, 6, 5)


def built(source: nn.Module) -> Any:
    """The module built anew, with the source's own tensors."""
    blueprint = Blueprint(source)
    structure = blueprint.build()
    state = source.state_dict()
    for slot in blueprint.slots:
        structure.put(slot, state[slot.name])
    return structure.root


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return module.eval()


def images() -> Tensor:
    return torch.randn(IMAGES, generator=torch.Generator().manual_seed(1))


def direct() -> list[nn.Module]:
    """Modules with a direct call, of all kinds, for images."""
    return [
        randomized(module)
        for module in (
            nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
            nn.Conv2d(4, 8, 3, padding="same", dilation=2, bias=False),
            nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
            nn.BatchNorm2d(4, eps=0.01),
            nn.BatchNorm2d(4, momentum=None),
            nn.BatchNorm2d(4, affine=False),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.ReLU(),
            nn.ReLU(inplace=True),
            nn.Linear(5, 3),
            nn.Linear(5, 3, bias=False),
            nn.LayerNorm(5),
            nn.LayerNorm((6, 5), eps=0.1, bias=False),
            nn.LayerNorm(5, elementwise_affine=False),
            nn.Dropout(0.5),
            nn.Sequential(),
            nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5), nn.GELU()),
            Conv2dNormActivation(4, 6, activation_layer=nn.SiLU),
        )
    ]


def called_as(module: nn.Module) -> str:
    return repr(module).partition("\n")[0]


@pytest.mark.parametrize("source", direct(), ids=called_as)
def test_it_is_of_its_class_and_computes_the_same_bits(source: nn.Module) -> None:
    module = built(source)
    assert type(module) is type(source)
    assert vars(module)[direct_calls.ATTRIBUTE] is not None
    with torch.inference_mode():
        assert torch.equal(module(images()), source(images()))
        assert torch.equal(module(input=images()), source(images()))


@pytest.mark.parametrize("source", [nn.GELU(), nn.LSTM(5, 3), SqueezeExcitation(4, 2)])
def test_others_are_called_as_torch_does(source: nn.Module) -> None:
    assert direct_calls.ATTRIBUTE not in vars(built(source.eval()))


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (nn.Conv2d(4, 8, 3), (5, 5, 5)),
        (nn.BatchNorm2d(4), (4, 4)),
        (nn.BatchNorm2d(4), (1, 4, 4)),
        (nn.BatchNorm2d(4), (1, 3, 2, 2)),
        (nn.Linear(5, 3), (4,)),
        (nn.LayerNorm(5), (4,)),
    ],
)
def test_what_does_not_fit_is_refused_in_the_same_words(
    source: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises((RuntimeError, ValueError)) as expected:
        source.eval()(torch.zeros(shape))
    with pytest.raises(type(expected.value)) as found:
        built(source)(torch.zeros(shape))
    assert str(found.value) == str(expected.value)


def doubled(_module: nn.Module, _inputs: Any, output: Tensor) -> Any:
    return 2 * output


def doubled_input(_module: nn.Module, inputs: tuple[Tensor]) -> Any:
    return 2 * inputs[0]


@pytest.mark.parametrize("source", direct(), ids=called_as)
def test_hooks_run_on_the_module_that_got_them_and_on_no_other(source: nn.Module) -> None:
    module, other = built(source), built(source)
    plain, of_doubled = other(images()), other(2 * images())
    handle = module.register_forward_hook(doubled)
    assert torch.equal(module(images()), 2 * plain)
    assert torch.equal(other(images()), plain)
    handle.remove()
    assert torch.equal(module(images()), plain)
    module.register_forward_pre_hook(doubled_input)
    assert torch.equal(module(images()), of_doubled)


@pytest.fixture
def global_hook() -> Iterator[Callable[[], None]]:
    handles = []
    yield lambda: handles.append(nn_module.register_module_forward_hook(doubled))
    for handle in handles:
        handle.remove()


def test_hooks_of_all_modules_run_whenever_they_were_registered(
    global_hook: Callable[[], None],
) -> None:
    module = built(nn.ReLU().eval())
    assert module(torch.ones(1)) == 1
    global_hook()
    assert module(torch.ones(1)) == 2


def test_attributes_that_are_changed_count() -> None:
    source: Any = randomized(
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(1.0))
    )
    module = built(source)
    for each in (source, module):
        each[0].stride = (2, 2)
        each[1].train()
        each[2].inplace = True
        each[3].train()
        each[3].p = 0.0
    assert torch.equal(module(images()), source(images()))
    source[3].p = module[3].p = 1.0
    assert not module(images()).any()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (nn.Linear(5, 3), "weight"),
        (nn.Linear(5, 3), "bias"),
        (nn.Conv2d(4, 8, 3), "bias"),
        (nn.BatchNorm2d(4), "weight"),
        (nn.LayerNorm(5), "weight"),
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_were_made_buffers_are_found(source: nn.Module, name: str, when: str) -> None:
    randomized(source)

    def freeze(module: nn.Module) -> None:
        frozen = module.get_parameter(name).detach()
        delattr(module, name)
        module.register_buffer(name, frozen)

    plain = copy.deepcopy(source)
    freeze(plain)
    if when == "before":
        module = built(plain)
    else:
        module = built(source)
        freeze_built(module, name)
    with torch.inference_mode():
        assert torch.equal(module(images()), plain(images()))


def freeze_built(module: nn.Module, name: str) -> None:
    """As above; what is built holds plain tensors in the parameters' places."""
    tensor = module._parameters.pop(name)
    module.register_buffer(name, tensor)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],  # noqa: S301 - its own
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_modules_of_their_own(copied: Callable[[Any], Any]) -> None:
    module = built(randomized(nn.Linear(5, 3)))
    other = copied(module)
    expected = module(images())
    assert torch.equal(other(images()), expected)
    other._parameters = {"weight": torch.zeros(3, 5), "bias": None}
    assert not other(images()).any()
    assert torch.equal(module(images()), expected)


def test_a_part_of_a_sequence_has_hooks_of_its_own() -> None:
    source: Any = randomized(nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)))
    part = built(source)[:2]
    part.register_forward_hook(doubled)
    assert torch.equal(part(images()), 2 * source[:2](images()))


def test_torch_traces_what_is_built_as_it_does_the_source() -> None:
    source = randomized(nn.Sequential(nn.Linear(5, 3), nn.ReLU()))
    found, expected = (torch.fx.symbolic_trace(module) for module in (built(source), source))
    assert str(found.graph) == str(expected.graph)


def test_a_module_whose_forward_is_its_own_is_called_by_it() -> None:
    source = nn.ReLU().eval()
    source.forward = torch.neg  # type: ignore[method-assign]
    assert built(source)(torch.ones(1)) == -1


def test_a_class_whose_forward_was_replaced_is_called_by_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda _, value: -value)
    assert built(nn.ReLU().eval())(torch.ones(1)) == -1


class Own(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) + 1


def test_a_class_of_the_users_is_called_by_its_own_forward() -> None:
    assert built(Own().eval())(torch.ones(1)) == 2
