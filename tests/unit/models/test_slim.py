"""Slim modules against those of torch's own classes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torchvision.ops import Conv2dNormActivation, SqueezeExcitation

from models.blueprint import Blueprint

IMAGES = (2, 4, 6, 5)


def built(source: nn.Module) -> Any:
    """The module built anew, with the source's own tensors; and torch's own class beside it."""
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


def modules() -> list[tuple[nn.Module, tuple[int, ...]]]:
    made: list[tuple[nn.Module, tuple[int, ...]]] = [
        (nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), IMAGES),
        (nn.Conv2d(4, 8, 3, padding="same", dilation=2, bias=False), IMAGES),
        (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), IMAGES),
        (nn.Conv2d(4, 8, 3), IMAGES[1:]),
        (nn.BatchNorm2d(4, eps=0.01), IMAGES),
        (nn.BatchNorm2d(4, momentum=None), IMAGES),
        (nn.BatchNorm2d(4, affine=False), IMAGES),
        (nn.BatchNorm2d(4, track_running_stats=False), IMAGES),
        (nn.ReLU(), IMAGES),
        (nn.ReLU(inplace=True), IMAGES),
        (nn.Linear(5, 3), IMAGES),
        (nn.Linear(5, 3, bias=False), (5,)),
        (nn.Sequential(), IMAGES),
        (nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5), nn.GELU()), IMAGES),
        (Conv2dNormActivation(4, 6, activation_layer=nn.SiLU), IMAGES),
        (SqueezeExcitation(4, 2), IMAGES),
        (nn.LSTM(5, 3, batch_first=True), IMAGES[1:]),
        (nn.MultiheadAttention(4, 2), IMAGES),
    ]
    return [(randomized(module), shape) for module, shape in made]


def called(module: nn.Module, value: Tensor) -> Any:
    if isinstance(module, nn.MultiheadAttention):
        value = value[0, :, :, :4]
        return module(value, value, value)
    return module(value)


@pytest.mark.parametrize(
    ("source", "shape"), modules(), ids=lambda value: getattr(value, "_get_name", lambda: "")()
)
def test_it_is_of_its_class_and_computes_the_same_bits(
    source: nn.Module, shape: tuple[int, ...]
) -> None:
    module = built(source)
    assert isinstance(module, type(source))
    assert repr(module) == repr(source)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found, expected = (called(either, value.clone()) for either in (module, source))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (nn.Conv2d(4, 8, 3), (5, 5, 5)),
        (nn.BatchNorm2d(4), (4, 4)),
        (nn.BatchNorm2d(4), (1, 4, 4)),
        (nn.BatchNorm2d(4), (1, 3, 2, 2)),
        (nn.Linear(5, 3), (4,)),
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


@pytest.mark.parametrize(
    ("source", "shape"), modules()[:-2], ids=lambda value: getattr(value, "_get_name", str)()
)
def test_hooks_run_on_the_module_that_got_them_and_on_no_other(
    source: nn.Module, shape: tuple[int, ...]
) -> None:
    module, other = built(source), built(source)
    value = torch.ones(shape)
    plain = other(value.clone())
    handle = module.register_forward_hook(doubled)
    assert torch.equal(module(value.clone()), 2 * plain)
    assert torch.equal(other(value.clone()), plain)
    handle.remove()
    assert torch.equal(module(value.clone()), plain)


def test_attributes_that_are_changed_count() -> None:
    source: Any = randomized(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()))
    module = built(source)
    module[0].stride = (2, 2)
    module[2].inplace = True
    module[1].train()
    value = torch.randn(IMAGES)
    source[0].stride = (2, 2)
    source[1].train()
    assert torch.equal(module(value.clone()), source(value.clone()))


def test_names_of_other_kinds_are_found_and_those_of_none_are_refused_by_torchs_words() -> None:
    module = built(nn.Sequential(nn.BatchNorm2d(4)).eval())
    assert module[0].weight.shape == module[0].running_mean.shape == (4,)
    with pytest.raises(AttributeError, match="'BatchNorm2d' object has no attribute 'wieght'"):
        _ = module[0].wieght


def test_modules_whose_call_is_their_own_stay_as_they_are() -> None:
    source = nn.ReLU().eval()
    source.forward = torch.neg  # type: ignore[method-assign]
    module = built(source)
    assert type(module) is nn.ReLU
    assert module(torch.ones(1)) == -1


def test_it_has_no_containers_until_they_are_asked_for() -> None:
    module = built(nn.ReLU().eval())
    assert vars(module).keys() == {"inplace", "_parameters", "_buffers", "_modules"}
    assert module.state_dict() == {}
    assert module._forward_hooks is module._forward_hooks == {}


class Own(nn.ReLU):
    """A user's class, which may look at its own type."""


def test_classes_that_are_not_torchs_stay_as_they_are() -> None:
    assert type(built(Own().eval())) is Own


@pytest.fixture
def global_hook() -> Iterator[None]:
    handle = nn_module.register_module_forward_hook(doubled)
    yield
    handle.remove()


@pytest.mark.usefixtures("global_hook")
def test_where_every_module_is_hooked_they_stay_as_they_are() -> None:
    assert built(nn.ReLU().eval())(torch.ones(1)) == 2


def test_a_class_whose_forward_was_replaced_is_called_by_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fresh(nn.Linear):
        pass

    Fresh.__module__ = nn.Linear.__module__
    replaced: Callable[..., Tensor] = lambda self, value: -value  # noqa: ARG005, E731
    monkeypatch.setattr(Fresh, "forward", replaced)
    assert built(Fresh(1, 1).eval())(torch.ones(1)) == -1
