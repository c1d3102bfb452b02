"""Modules as users write them, each with inputs: whatever a forward may do, it is done by one of these."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """An embedding whose weight is the classifier's too, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.embedding(ids)))
        return scores


class SharedModule(nn.Module):
    """One module in three places, two of them beside parts of others."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.first = nn.Sequential(nn.Linear(6, 6), shared)
        self.second = shared
        self.last = nn.ModuleDict({"again": shared, "end": nn.Linear(6, 2)})

    def forward(self, value: Tensor) -> Tensor:
        value = self.second(self.first(value).relu())
        ended: Tensor = self.last["end"](self.last["again"](value))
        return ended


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(5, 5)
        self.late = nn.Linear(5, 5)

    def forward(self, value: Tensor) -> Tensor:
        again: Tensor = self.early(self.late(self.early(value)))
        return again


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.register_buffer("offset", torch.zeros(5), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        changed: Tensor = self.inner(value) * self.scale + self.offset
        return changed


class ChangesItsParts(nn.Module):
    """Before it uses them: a buffer that no state dict carries, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.early = WithBuffers()
        self.late = nn.Linear(5, 50)

    def forward(self, value: Tensor) -> Tensor:
        self.early.offset = value.mean(0)
        handle = self.late.register_forward_hook(lambda _module, _inputs, output: 3 * output)
        changed: Tensor = self.late(self.early(value))
        handle.remove()
        return changed


class SwapsItsParts(nn.Module):
    """Before it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU())
        self.head = nn.Linear(5, 50)

    def forward(self, value: Tensor) -> Tensor:
        self.body[2] = nn.Tanh()
        if len(self.body) > 3:
            del self.body[3]
        self.head.bias = nn.Parameter(value.new_ones(50), requires_grad=False)
        swapped: Tensor = self.head(self.body(value))
        return swapped


class LooksAtTypes(nn.Module):
    """Of its own parts, at their very types, which a class derived from theirs would change."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)])

    def forward(self, value: Tensor) -> Tensor:
        for part in self.parts:
            if type(part) is nn.Linear:
                value = part(value)
        return value


class OnTheModel(nn.Module):
    """Parameters and buffers directly on the model, absent ones too, and a module that has no bias."""

    table: Tensor
    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(4, 3, bias=False)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_parameter("nothing", None)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("offsets", torch.rand(4))
        self.skip = None
        self.start = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        value = self.start(value * self.scale + self.offsets) + self.table
        if self.nothing is None and self.skip is None:
            value = self.end(value)
        return value


class BranchesOnShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(4, 4)
        self.large = nn.Linear(8, 4)
        self.end = nn.Linear(4, 2)

    def forward(self, value: Tensor) -> Tensor:
        inner = self.small(value) if value.shape[1] == 4 else self.large(value)
        ended: Tensor = self.end(inner)
        return ended


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(4, 4)
        self.negative = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        chosen: Tensor = self.positive(value) if value.sum().item() > 0 else self.negative(value)
        return chosen


class SeveralInputs(nn.Module):
    """Inputs by name, outputs in a dictionary, one input optional."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(5, 4)

    def forward(self, a: Tensor, *, b: Tensor, c: Tensor | None = None) -> dict[str, Any]:
        joined = self.left(a) + self.right(b)
        return {"sum": joined if c is None else joined + c, "parts": (joined, [joined * 2])}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.rnn = nn.LSTM(6, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(14, 3)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(ids))
        scores: Tensor = self.head(states[:, -1])
        return scores


class Listed(nn.Module):
    """Refers to its parts from a plain list and through a method kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.turns = [self.one, self.two, self.one]
        self.ending = self.end

    def end(self, value: Tensor) -> Tensor:
        ended: Tensor = self.two(value).tanh()
        return ended

    def forward(self, value: Tensor) -> Tensor:
        for turn in self.turns:
            value = turn(value)
        return self.ending(value)


class Normed(nn.Module):
    """Weights that a hook and a parametrization compute at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.plain = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        ended: Tensor = self.plain(self.spectral(value))
        return ended


class Looped(nn.Module):
    """Goes over its parts in every way that a container allows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.named = nn.ModuleDict({str(n): nn.Linear(4, 4) for n in range(3)})
        self.weights = nn.ParameterList(torch.rand(4) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value).tanh()
        for block in self.blocks[1:3]:
            value = block(value)
        value = self.blocks[-1](value)
        for name, block in self.named.items():
            value = block(value) if name in self.named else value
        for weight in self.weights:
            value = value * weight
        return value.to(next(self.parameters()).dtype)


class Unused(nn.Module):
    """Has weights, and does not look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, value: Tensor) -> Tensor:
        return value * 2


class ComesBack(nn.Module):
    """Comes to its layers as often as its input is long."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(5, 5)
        self.late = nn.Linear(5, 5)

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(value.shape[1]):
            value = self.late(self.early(value))
        return value


class Ends(nn.Module):
    """Ends the process, were it let, on inputs longer than the example."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(2, 2)

    def forward(self, value: Tensor) -> Tensor:
        if len(value) > 1:
            sys.exit("too long")
        ended: Tensor = self.only(value)
        return ended


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(3))


MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tied": (Tied, ids(2, 5)),
    "shared": (SharedModule, floats(2, 6)),
    "called twice": (CalledTwice, floats(2, 5)),
    "changes its parts": (ChangesItsParts, floats(2, 5)),
    "swaps its parts": (SwapsItsParts, floats(2, 5)),
    "looks at types": (LooksAtTypes, floats(2, 4)),
    "on the model": (OnTheModel, floats(2, 4)),
    "branches": (BranchesOnShape, floats(2, 4)),
    "looks at values": (LooksAtValues, floats(2, 4).abs()),
    "several inputs": (SeveralInputs, {"a": floats(2, 3), "b": floats(2, 5)}),
    "recurrent": (Recurrent, ids(2, 5)),
    "listed": (Listed, floats(2, 4)),
    "normed": (Normed, floats(2, 4)),
    "looped": (Looped, floats(2, 4)),
    "a layer alone": (lambda: nn.Linear(4, 2), floats(2, 4)),
    "a recurrent layer alone": (lambda: nn.GRU(4, 3), floats(2, 4)),
    "torch's transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
        floats(2, 5, 8),
    ),
    "no weights": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), floats(2, 3, 2)),
    "unused": (Unused, floats(2, 3)),
    "traced by fx": (lambda: torch.fx.symbolic_trace(CalledTwice()), floats(2, 5)),
}


def make(name: str) -> nn.Module:
    """The factory of them all."""
    return MODULES[name][0]()
