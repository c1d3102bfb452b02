"""Slim modules against the same ones as torch has them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torchvision.ops import Conv2dNormActivation, SqueezeExcitation

from models import slim
from models.blueprint import Blueprint

IMAGES = (2, 4, 6, 5)


def built(source: nn.Module) -> Any:
    """The module built anew, as slim as it can be, with the source's own tensors."""
    blueprint = Blueprint(source, slimmed=True)
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


def modules() -> list[nn.Module]:
    """For images; all kinds that have a call of their own, and some that have none."""
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
            SqueezeExcitation(4, 2),
            nn.Hardswish(),
        )
    ]


def named(module: nn.Module) -> str:
    return repr(module).partition("\n")[0]


@pytest.mark.parametrize("source", modules(), ids=named)
def test_it_is_of_its_class_and_computes_the_same_bits(source: nn.Module) -> None:
    assert slim.suits(source)
    module = built(source)
    assert isinstance(module, type(source))
    assert isinstance(module, slim._Slim)
    assert repr(module) == repr(source)
    with torch.inference_mode():
        assert torch.equal(module(images()), source(images()))
        assert torch.equal(module(input=images()), source(images()))


def test_it_has_no_hook_tables_until_one_is_asked_for() -> None:
    module = built(nn.ReLU().eval())
    assert not set(vars(module)) & set(slim._HOOK_TABLES)
    assert module._forward_hooks is module._forward_hooks == {}
    assert set(vars(module)) & set(slim._HOOK_TABLES) == {"_forward_hooks"}
    assert module.state_dict() == {}


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


@pytest.mark.parametrize("source", modules(), ids=named)
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


def test_a_table_that_is_assigned_counts() -> None:
    module = built(nn.ReLU().eval())
    _ = module._forward_hooks
    module._forward_hooks = OrderedDict({0: doubled})
    assert module(torch.ones(1)) == 2


def test_a_part_of_a_sequence_has_hooks_of_its_own() -> None:
    source: Any = randomized(nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)))
    part = built(source)[:2]
    part.register_forward_hook(doubled)
    assert torch.equal(part(images()), 2 * source[:2](images()))


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
    assert not module(images()).any()
    source[3].eval()
    module[3].eval()
    assert torch.equal(module(images()), source(images()))


def test_names_of_all_kinds_are_found_and_others_refused_in_torchs_words() -> None:
    module = built(randomized(nn.Sequential(nn.BatchNorm2d(4))))
    assert module[0].weight.shape == module[0].running_mean.shape == (4,)
    with pytest.raises(AttributeError, match="'BatchNorm2d' object has no attribute 'wieght'"):
        _ = module[0].wieght
    vars(module).clear()
    assert not hasattr(module, "wieght")


def frozen(module: nn.Module, name: str) -> nn.Module:
    """With a buffer in the parameter's place."""
    values = module.get_parameter(name).detach()
    delattr(module, name)
    module.register_buffer(name, values)
    return module


@pytest.mark.parametrize(
    "source",
    [
        frozen(randomized(nn.Linear(5, 3)), "weight"),
        frozen(randomized(nn.Conv2d(4, 8, 3)), "bias"),
        frozen(randomized(nn.BatchNorm2d(4)), "weight"),
        frozen(randomized(nn.LayerNorm(5)), "bias"),
        nn.LSTM(5, 3),
        nn.ParameterList([torch.ones(2)]),
    ],
    ids=named,
)
def test_modules_that_are_in_some_way_of_their_own_stay_as_they_are(source: nn.Module) -> None:
    module = built(source.eval())
    assert type(module) is type(source)
    if not isinstance(source, nn.ParameterList | nn.LSTM):
        assert torch.equal(module(images()), source(images()))


class Own(nn.ReLU):
    """Looks at the type of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.inner(input) if type(self.inner) is nn.Linear else input


def hooked() -> nn.Module:
    module = nn.ReLU()
    module.register_forward_hook(doubled)
    return module


def patched() -> nn.Module:
    module = nn.ReLU()
    module.forward = torch.neg  # type: ignore[method-assign]
    return module


def compiled() -> nn.Module:
    module = nn.ReLU()
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("part", [Own, hooked, patched, compiled])
def test_models_that_could_tell_do_not_suit(part: Callable[[], nn.Module]) -> None:
    assert not slim.suits(nn.Sequential(nn.Linear(5, 5), nn.Sequential(part())))


@pytest.fixture
def _global_hook() -> Iterator[None]:
    handle = nn_module.register_module_forward_hook(doubled)
    yield
    handle.remove()


@pytest.mark.usefixtures("_global_hook")
def test_where_all_modules_have_a_hook_none_suits() -> None:
    assert not slim.suits(nn.ReLU())


@pytest.fixture
def _no_classes_yet() -> Iterator[None]:
    slim._slim.cache_clear()
    yield
    slim._slim.cache_clear()


@pytest.mark.usefixtures("_no_classes_yet")
def test_a_class_whose_forward_was_replaced_is_called_by_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda _, value: -value)
    assert built(nn.ReLU().eval())(torch.ones(1)) == -1
