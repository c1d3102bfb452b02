"""Calls of torch's most frequent modules, straight to the operators that they come to in the end.

What `nn.Module.__call__` and a `forward` do besides costs a model of many small modules a tenth of its time: looking
for hooks, looking up names, branches for training. A direct call asks for the module's hooks alone; where there are
any, or anything is not as it is in a plain model that does not train, the module's own call follows.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

ATTRIBUTE: Final = "_compiled_call_impl"
"""The attribute of a module that is called instead of it, if it is not None: `nn.Module.compile` sets it, too, and
copies of the module do without."""
_IMAGES: Final = 4
"""Dimensions of what BatchNorm2d takes."""
_call_impl: Final[Callable[..., Any]] = nn.Module._call_impl  # noqa: SLF001 - a call without the attribute
_global_forward_hooks: Final = nn_module._global_forward_hooks  # noqa: SLF001
_global_forward_pre_hooks: Final = nn_module._global_forward_pre_hooks  # noqa: SLF001
_global_backward_hooks: Final = nn_module._global_backward_hooks  # noqa: SLF001
_global_backward_pre_hooks: Final = nn_module._global_backward_pre_hooks  # noqa: SLF001


def of(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of such a module comes to, given the module first; None where that is not known."""
    kind = type(module)
    if "forward" in vars(module) or vars(module).get(ATTRIBUTE) is not None:
        return None
    if kind.forward is nn.Sequential.forward:
        return _sequential
    replaced = kind.forward.__module__ != kind.__module__
    return None if replaced else _CALLS.get(kind)


def _hooked(state: Mapping[str, Any]) -> bool:
    """Whether a call has more to do for any hook, of the module with these attributes or of all."""
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    )


def _weights(state: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Weight and bias, which may be None; None for both where they are no parameters, or there are hooks."""
    parameters = state["_parameters"]
    if "weight" not in parameters or "bias" not in parameters or _hooked(state):
        return None
    return parameters["weight"], parameters["bias"]


def _conv2d(module: Any, input: Tensor) -> Any:  # noqa: A002 - torch's own name
    state = module.__dict__
    weights = _weights(state)
    if weights is None or state["padding_mode"] != "zeros":
        return _call_impl(module, input)
    geometry = state["stride"], state["padding"], state["dilation"], state["groups"]
    return torch.conv2d(input, *weights, *geometry)


def _batch_norm_2d(module: Any, input: Tensor) -> Any:  # noqa: A002
    state = module.__dict__
    weights = _weights(state)
    mean = state["_buffers"].get("running_mean")
    variance = state["_buffers"].get("running_var")
    known = mean is not None and variance is not None
    if weights is None or not known or state["training"] or input.dim() != _IMAGES:
        return _call_impl(module, input)
    # Not training; the momentum, which then plays no part; and not cuDNN, which is for another device.
    return torch.batch_norm(input, *weights, mean, variance, False, 0.0, state["eps"], False)


def _layer_norm(module: Any, input: Tensor) -> Any:  # noqa: A002
    state = module.__dict__
    weights = _weights(state)
    if weights is None:
        return _call_impl(module, input)
    return torch.layer_norm(input, state["normalized_shape"], *weights, state["eps"], False)


def _linear(module: Any, input: Tensor) -> Any:  # noqa: A002
    weights = _weights(module.__dict__)
    if weights is None:
        return _call_impl(module, input)
    return nn.functional.linear(input, *weights)


def _relu(module: Any, input: Tensor) -> Any:  # noqa: A002
    state = module.__dict__
    if _hooked(state):
        return _call_impl(module, input)
    return torch.relu_(input) if state["inplace"] else torch.relu(input)


def _dropout(module: Any, input: Tensor) -> Any:  # noqa: A002
    state = module.__dict__
    return _call_impl(module, input) if state["training"] or _hooked(state) else input


def _sequential(module: Any, input: Any) -> Any:  # noqa: A002
    state = module.__dict__
    if _hooked(state):
        return _call_impl(module, input)
    for child in state["_modules"].values():
        input = child(input)  # noqa: A001
    return input


_CALLS: Final[Mapping[type[nn.Module], Callable[..., Any]]] = {
    nn.BatchNorm2d: _batch_norm_2d,
    nn.Conv2d: _conv2d,
    nn.Dropout: _dropout,
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
    nn.ReLU: _relu,
}
