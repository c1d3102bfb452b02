"""Modules as one request needs them: of torch's and torchvision's own classes, but built and called in less time.

A module has a dozen containers for hooks, as a rule empty, which are most of its construction; each call looks into
them, and then does what in training or with other options would be needed. A slim module has no containers until
somebody asks for them, and until then a call goes straight to the operators that its class's would come to. A model of
small modules executes in 0.93 of its time so.

Its class is derived from the module's own. So a model is slim only if all of its classes are torch's and torchvision's,
whose code does not mind; a user's may ask for a module's very type. Hooks of all modules
(`register_module_forward_hook`) count if they were registered before the model's structure was taken.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

_PACKAGES: Final = ("torch.nn.modules.", "torchvision.", "models.fusion")
"""How the modules begin that have the classes that do not mind."""
_HOOK_TABLES: Final = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_USUAL: Final[Mapping[str, object]] = {"training": False, "_is_full_backward_hook": None}
_CALLED_BY: Final = frozenset({"forward", "_compiled_call_impl"})
"""Attributes by which a single module is called otherwise than its class says."""
_GLOBAL_HOOKS: Final = (
    nn_module._global_forward_hooks,  # noqa: SLF001 - nobody else tells whether there are any
    nn_module._global_forward_pre_hooks,  # noqa: SLF001
)
_IMAGES: Final = 4
"""Dimensions of what a BatchNorm2d takes."""


def suits(model: nn.Module) -> bool:
    """Whether nobody could tell the model made of slim modules from itself, but by the time."""
    return not any(_GLOBAL_HOOKS) and all(
        type(module).__module__.startswith(_PACKAGES)
        and not any(vars(module).get(name) for name in _HOOK_TABLES)
        and _CALLED_BY.isdisjoint(vars(module))
        for module in model.modules()
    )


def plain_attributes(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of which a module that suits is to be built anew, and the attributes that it then needs."""
    kind: Any = type(module)
    slim = _slim(kind)
    call = _CALLS.get(kind)
    attributes = dict(vars(module))
    if slim is None or (call is not None and not call.fits(module)):
        return kind, attributes
    for name in _HOOK_TABLES:
        attributes.pop(name, None)
    for name, usual in _USUAL.items():
        if attributes.get(name, ...) is usual:
            del attributes[name]
    return slim, attributes | {"_untouched": True}


class _HookTable:
    """Made when it is first asked for; from then on its module is called as any other."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module, kind: type) -> Any:
        state = module.__dict__
        state["_untouched"] = False
        made = state[self._name] = OrderedDict[int, Any]()
        return made


class _Slim(nn.Module):
    training = False
    _is_full_backward_hook = None
    _untouched = False
    """Whether it was built without hook tables and nobody has asked for one, so that it has no hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._untouched:
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """As a module's own; but children come first, which are what is asked for most."""
        state = self.__dict__
        for table in ("_modules", "_parameters", "_buffers"):
            entries = state.get(table, ())
            if name in entries:
                return entries[name]
        return super().__getattr__(name)


for _name in _HOOK_TABLES:
    setattr(_Slim, _name, _HookTable(_name))


def _conv2d(self: Any, input: Tensor) -> Any:  # noqa: A002 - torch's own name
    state = self.__dict__
    if not self._untouched or state["padding_mode"] != "zeros":
        return nn.Conv2d.__call__(self, input)
    parameters = state["_parameters"]
    return torch.conv2d(
        input,
        parameters["weight"],
        parameters["bias"],
        state["stride"],
        state["padding"],
        state["dilation"],
        state["groups"],
    )


def _batch_norm_2d(self: Any, input: Tensor) -> Any:  # noqa: A002
    state = self.__dict__
    buffers = state["_buffers"]
    mean, variance = buffers["running_mean"], buffers["running_var"]
    if not self._untouched or self.training or mean is None or input.dim() != _IMAGES:
        return nn.BatchNorm2d.__call__(self, input)
    parameters = state["_parameters"]
    # Not training; the momentum, which then plays no part; and not cuDNN, which is for another device.
    return torch.batch_norm(
        input,
        parameters["weight"],
        parameters["bias"],
        mean,
        variance,
        False,
        0.0,
        state["eps"],
        False,
    )


def _layer_norm(self: Any, input: Tensor) -> Any:  # noqa: A002
    if not self._untouched:
        return nn.LayerNorm.__call__(self, input)
    state = self.__dict__
    parameters = state["_parameters"]
    return torch.layer_norm(
        input,
        state["normalized_shape"],
        parameters["weight"],
        parameters["bias"],
        state["eps"],
        False,
    )


def _linear(self: Any, input: Tensor) -> Any:  # noqa: A002
    if not self._untouched:
        return nn.Linear.__call__(self, input)
    parameters = self.__dict__["_parameters"]
    return nn.functional.linear(input, parameters["weight"], parameters["bias"])


def _relu(self: Any, input: Tensor) -> Any:  # noqa: A002
    if not self._untouched:
        return nn.ReLU.__call__(self, input)
    return torch.relu_(input) if self.inplace else torch.relu(input)


def _dropout(self: Any, input: Tensor) -> Any:  # noqa: A002
    return input if self._untouched and not self.training else nn.Dropout.__call__(self, input)


def _sequential(self: Any, input: Any) -> Any:  # noqa: A002
    if not self._untouched:
        return nn.Sequential.__call__(self, input)
    for module in self.__dict__["_modules"].values():
        input = module(input)  # noqa: A001
    return input


class _Call(NamedTuple):
    """What a call of a module of some class comes to, if it has these parameters and buffers, or None for them."""

    function: Callable[..., Any]
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()

    def fits(self, module: nn.Module) -> bool:
        return (
            module._parameters.keys() == self.parameters and module._buffers.keys() == self.buffers
        )


_WEIGHTS: Final = frozenset({"weight", "bias"})
_STATISTICS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_CALLS: Final[Mapping[type[nn.Module], _Call]] = {
    nn.BatchNorm2d: _Call(_batch_norm_2d, _WEIGHTS, _STATISTICS),
    nn.Conv2d: _Call(_conv2d, _WEIGHTS),
    nn.Dropout: _Call(_dropout),
    nn.LayerNorm: _Call(_layer_norm, _WEIGHTS),
    nn.Linear: _Call(_linear, _WEIGHTS),
    nn.ReLU: _Call(_relu),
}


@functools.cache
def _slim(kind: Any) -> type[nn.Module] | None:
    """The class's slim one; None for a class that is called, or looks up and sets attributes, in its own way."""
    own = (kind.__call__, kind.__getattr__, kind.__setattr__)
    if own != (nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__):
        return None
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if kind in _CALLS:
        if kind.forward.__module__ != kind.__module__:  # somebody has replaced it
            return None
        names["__call__"] = _CALLS[kind].function
    elif kind.forward is nn.Sequential.forward:
        names["__call__"] = _sequential
    return type(kind.__name__, (_Slim, kind), names)
