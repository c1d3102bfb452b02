"""Calls of torch's own modules within a user's model that come straight to their operator.

A user's code may ask for a module's very type, so that these modules are not slim (models/slim.py). They have a
function where `nn.Module.compile` puts the compiled forward, and `nn.Module.__call__` looks for it: it does as their
class's forward, with parameters from the table in which they lie. A BERT executes in 0.97 of its time so. What else has
a say in a call, hooks above all, is looked for at each; then the module is called as ever.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as nn_module

Call = Callable[..., Any]

_PLACE: Final = "_compiled_call_impl"
_WEIGHT_AND_BIAS: Final = 2
_HOOKS_OF_ALL: Final = (
    nn_module._global_forward_hooks,  # noqa: SLF001 - nobody else tells whether there are any
    nn_module._global_forward_pre_hooks,  # noqa: SLF001
    nn_module._global_backward_hooks,  # noqa: SLF001
    nn_module._global_backward_pre_hooks,  # noqa: SLF001
)


def of(module: nn.Module) -> Callable[[nn.Module], Call] | None:
    """Makes the function for a module that is built like this one; None if it is to be called as ever."""
    kind: Any = type(module)
    known = _KNOWN.get(kind)
    if known is None or kind.forward is not known.forward or _PLACE in vars(module):
        return None
    if any(_HOOKS_OF_ALL):
        return None
    return functools.partial(functools.partial, known.function)


def _has_a_say(state: Mapping[str, Any]) -> bool:
    """Whether a module has more to its calls than its class's forward; hooks of gradients count if there are any."""
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or "forward" in state
        or torch.is_grad_enabled()
    )


def _called_as_ever(module: nn.Module, input: Tensor) -> Any:  # noqa: A002 - torch's own name
    """This once, and from now on."""
    del module.__dict__[_PLACE]
    return module(input)


def _linear(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    state = module.__dict__
    parameters = state["_parameters"]
    if _has_a_say(state) or len(parameters) != _WEIGHT_AND_BIAS:
        return _called_as_ever(module, input)
    return functional.linear(input, parameters["weight"], parameters["bias"])


def _layer_norm(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    state = module.__dict__
    parameters = state["_parameters"]
    if _has_a_say(state) or len(parameters) != _WEIGHT_AND_BIAS:
        return _called_as_ever(module, input)
    return functional.layer_norm(
        input, state["normalized_shape"], parameters["weight"], parameters["bias"], state["eps"]
    )


def _dropout(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    state = module.__dict__
    if state["training"] or _has_a_say(state):
        return _called_as_ever(module, input)
    return input


class _Known(NamedTuple):
    forward: Callable[..., Any]
    """The class's own: somebody may have replaced it."""
    function: Callable[..., Any]


_KNOWN: Final[Mapping[type[nn.Module], _Known]] = {
    nn.Dropout: _Known(nn.Dropout.forward, _dropout),
    nn.LayerNorm: _Known(nn.LayerNorm.forward, _layer_norm),
    nn.Linear: _Known(nn.Linear.forward, _linear),
}
