"""Direct calls against those of the same modules as torch has them."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from models.blueprint import Blueprint

PLACE = "_compiled_call_impl"
VALUES = (4, 5)


def built(source: nn.Module) -> Any:
    """The module built anew, with the source's own tensors."""
    blueprint = Blueprint(source)
    structure = blueprint.build()
    state = source.state_dict()
    for slot in blueprint.slots:
        structure.put(slot, state[slot.name])
    return structure.root


def values() -> Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(1))


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        module.eval()
        for module in (
            nn.Linear(5, 3),
            nn.Linear(5, 3, bias=False),
            nn.LayerNorm(5),
            nn.LayerNorm(VALUES, eps=0.1, bias=False),
            nn.LayerNorm(5, elementwise_affine=False),
            nn.Dropout(0.5),
        )
    ]


of_all = pytest.mark.parametrize("source", modules(), ids=repr)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@of_all
@pytest.mark.usefixtures("without_gradients")
def test_its_class_is_the_same_and_so_are_its_bits(source: nn.Module) -> None:
    module = built(source)
    assert type(module) is type(source)
    assert PLACE in vars(module)
    assert torch.equal(module(values()), source(values()))
    assert torch.equal(module(input=values()), source(values()))
    assert PLACE in vars(module)


@of_all
@pytest.mark.usefixtures("without_gradients")
def test_hooks_run_on_the_module_that_got_them_and_on_no_other(source: nn.Module) -> None:
    module, other, later = built(source), built(source), built(source)
    handle = module.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    assert torch.equal(module(values()), 2 * source(values()))
    assert torch.equal(other(values()), source(values()))
    handle.remove()
    assert torch.equal(module(values()), source(values()))
    later.register_forward_pre_hook(lambda _module, inputs: 2 * inputs[0])
    assert torch.equal(later(values()), source(2 * values()))


@of_all
@pytest.mark.usefixtures("without_gradients")
def test_a_forward_that_a_module_is_given_counts(source: nn.Module) -> None:
    module = built(source)
    module.forward = lambda _: "its own"
    assert module(values()) == "its own"


@of_all
def test_hooks_of_gradients_run_where_there_are_any(source: nn.Module) -> None:
    module, called = built(source), []
    module.register_full_backward_hook(lambda *_: called.append(module))
    module(values().requires_grad_()).sum().backward()
    assert called == [module]


@pytest.mark.usefixtures("without_gradients")
def test_a_dropout_that_is_training_drops() -> None:
    source = nn.Dropout(0.5)
    module = built(source.eval())
    module.train()
    source.train()
    torch.manual_seed(2)
    found = module(values())
    torch.manual_seed(2)
    assert torch.equal(found, source(values()))
    assert 0 in found


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
@pytest.mark.parametrize("attribute", ["weight", "bias"])
@pytest.mark.usefixtures("without_gradients")
def test_a_tensor_in_a_parameter_s_stead_counts(
    kind: Callable[..., nn.Module], attribute: str
) -> None:
    arguments = (5, 5) if kind is nn.Linear else (5,)
    source = kind(*arguments).eval()
    module, replaced = built(source), torch.full_like(getattr(source, attribute), 3.0)
    for each in (module, source):
        delattr(each, attribute)
        setattr(each, attribute, replaced)
    assert torch.equal(module(values()), source(values()))


@pytest.mark.parametrize(
    ("source", "shape"), [(nn.Linear(5, 3), (4,)), (nn.LayerNorm(5), (4,))], ids=repr
)
@pytest.mark.usefixtures("without_gradients")
def test_what_does_not_fit_is_refused_in_the_same_words(
    source: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises(RuntimeError) as expected:
        source.eval()(torch.zeros(shape))
    with pytest.raises(RuntimeError) as found:
        built(source)(torch.zeros(shape))
    assert str(found.value) == str(expected.value)


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        return 2 * super().forward(input)


@pytest.mark.usefixtures("without_gradients")
def test_a_class_derived_from_one_of_torch_s_has_its_own_forward() -> None:
    source = Doubling(5, 3).eval()
    module = built(source)
    assert PLACE not in vars(module)
    assert torch.equal(module(values()), source(values()))


@pytest.mark.usefixtures("without_gradients")
def test_a_class_whose_forward_was_replaced_is_called_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda _self, _input: "another")
    assert built(nn.Linear(5, 3).eval())(values()) == "another"


@pytest.mark.usefixtures("without_gradients")
def test_hooks_of_all_modules_count() -> None:
    handle = nn_module.register_module_forward_hook(lambda _module, _inputs, output: 2 * output)
    try:
        source = nn.Linear(5, 3).eval()
        assert torch.equal(built(source)(values()), source(values()))
    finally:
        handle.remove()


@of_all
def test_it_is_gone_with_its_structure_without_a_collection(source: nn.Module) -> None:
    blueprint = Blueprint(source)
    structure = blueprint.build()
    module = weakref.ref(structure.root)
    gc.disable()
    try:
        structure.empty()
        del structure
        assert module() is None
    finally:
        gc.enable()
