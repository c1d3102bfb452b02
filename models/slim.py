"""Modules as one request needs them: of torch's and torchvision's own classes, but built and called in less time.

A module has a dozen containers for hooks, as a rule empty, which are most of its construction; and each call
looks into them. Of a slim module a container is made when somebody asks for it, and until then it is called
without. What it computes is what its class does: the same operators with the same arguments.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

_KNOWN: Final = ("torch.nn.modules.", "torchvision.", "models.fusion")
"""How the modules begin whose classes are made slim. Another's may look at its own type or dictionary."""
_CONTAINERS: Final[Mapping[str, Callable[[], Any]]] = {
    "_backward_hooks": OrderedDict,
    "_backward_pre_hooks": OrderedDict,
    "_forward_hooks": OrderedDict,
    "_forward_hooks_always_called": OrderedDict,
    "_forward_hooks_with_kwargs": OrderedDict,
    "_forward_pre_hooks": OrderedDict,
    "_forward_pre_hooks_with_kwargs": OrderedDict,
    "_load_state_dict_post_hooks": OrderedDict,
    "_load_state_dict_pre_hooks": OrderedDict,
    "_non_persistent_buffers_set": set,
    "_state_dict_hooks": OrderedDict,
    "_state_dict_pre_hooks": OrderedDict,
}
_USUAL: Final[Mapping[str, object]] = {"training": False, "_is_full_backward_hook": None}
_CALLED_BY: Final = frozenset({"forward", "_compiled_call_impl"})
"""Attributes by which a single module is called otherwise than its class says."""
_GLOBAL_HOOKS: Final = (
    nn_module._global_forward_hooks,  # noqa: SLF001 - nobody else tells whether there are any
    nn_module._global_forward_pre_hooks,  # noqa: SLF001
)


def plain_attributes(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of which the module is to be built anew, and the attributes that it then needs."""
    kind: Any = type(module)
    attributes = dict(vars(module))
    slim = _slim(kind)
    in_use = any(attributes.get(name) for name in _CONTAINERS) or any(_GLOBAL_HOOKS)
    if slim is None or in_use or not _CALLED_BY.isdisjoint(attributes):
        return kind, attributes
    for name in _CONTAINERS:
        attributes.pop(name, None)
    for name, usual in _USUAL.items():
        if attributes.get(name, ...) is usual:
            del attributes[name]
    return slim, attributes


class _Container:
    """Made when it is first asked for; from then on its module is called as any other."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name = name
        self._make = make

    def __get__(self, module: nn.Module, kind: type) -> Any:
        state = module.__dict__
        state["_untouched"] = False
        made = state[self._name] = self._make()
        return made


class _Slim(nn.Module):
    training = False
    _is_full_backward_hook = None
    _untouched = True
    """Nobody has asked for its containers, so it has no hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._untouched:
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """As a module's own; but children come first, which are what is asked for most."""
        state = self.__dict__
        for table in ("_modules", "_parameters", "_buffers"):
            if name in state[table]:
                return state[table][name]
        return super().__getattr__(name)


for _name, _make in _CONTAINERS.items():
    setattr(_Slim, _name, _Container(_name, _make))


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


def _batch_norm(self: Any, input: Tensor) -> Any:  # noqa: A002
    state = self.__dict__
    buffers = state["_buffers"]
    mean, variance = buffers["running_mean"], buffers["running_var"]
    if not self._untouched or self.training or mean is None or input.dim() != _IMAGES:
        return nn.BatchNorm2d.__call__(self, input)
    parameters = state["_parameters"]
    # Momentum, 0 here, is for training; the last, cuDNN, is for another device.
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


def _relu(self: Any, input: Tensor) -> Any:  # noqa: A002
    if not self._untouched:
        return nn.ReLU.__call__(self, input)
    return torch.relu_(input) if self.inplace else torch.relu(input)


def _linear(self: Any, input: Tensor) -> Any:  # noqa: A002
    if not self._untouched:
        return nn.Linear.__call__(self, input)
    parameters = self.__dict__["_parameters"]
    return nn.functional.linear(input, parameters["weight"], parameters["bias"])


def _sequential(self: Any, input: Any) -> Any:  # noqa: A002
    if not self._untouched:
        return nn.Sequential.__call__(self, input)
    for module in self.__dict__["_modules"].values():
        input = module(input)  # noqa: A001
    return input


_IMAGES: Final = 4
"""Dimensions of what a BatchNorm2d takes."""
_CALLS: Final[Mapping[type[nn.Module], Callable[..., Any]]] = {
    nn.Conv2d: _conv2d,
    nn.BatchNorm2d: _batch_norm,
    nn.ReLU: _relu,
    nn.Linear: _linear,
}
"""What a call of these comes to in the end."""


@functools.cache
def _slim(kind: Any) -> type[nn.Module] | None:
    """The class's slim one; None for a class of which it is not known that it can do with less."""
    own = (kind.__call__, kind.__getattr__, kind.__setattr__)
    if own != (nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__):
        return None
    if not kind.__module__.startswith(_KNOWN):
        return None
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if kind in _CALLS and kind.forward.__module__ == kind.__module__:  # nobody has replaced it
        names["__call__"] = _CALLS[kind]
    elif kind.forward is nn.Sequential.forward:
        names["__call__"] = _sequential
    return type(kind.__name__, (_Slim, kind), names)
