"""A state dict's keys as users' files have them -> the names that the architecture has for them.

What is taken away or renamed is what wrappers and fine-tuning are known to do. Nothing is dropped: a
key that belongs to nothing keeps its name, and the strict fit lists it.
"""

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

_WRAPPERS: Final = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)
"""Names that wrappers put into a key, wherever they wrap: data parallel, compilation, sharding, activation
checkpoints, trainers."""
_AVERAGED: Final = "n_averaged"
"""Beside a wrapped model's weights in torch.optim.swa_utils.AveragedModel: how often it was updated."""
_EARLIER_NAMES: Final = (
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)
"""A ViT's keys before torchvision 0.13 (pytorch/vision pull request 6053); its published files still
have them, and its modules rename them when they load."""
_RESNET_CHILDREN: Final = {
    "conv1": "0",
    "bn1": "1",
    "layer1": "4",
    "layer2": "5",
    "layer3": "6",
    "layer4": "7",
    "fc": "9",
}
"""Their numbers in Sequential(*resnet.children()), as feature extractors are made of them."""
_LEAST_SHARE: Final = 0.5
"""Of an architecture's keys, that a prefix must lead to before it is taken for one."""
_NEARLY: Final = 0.9
_LISTED: Final = 10
_COUNTER: Final = ".num_batches_tracked"


class SeveralModels(Exception):
    """Weights of the same architecture under several prefixes, `prefixes`."""

    def __init__(self, prefixes: list[str]) -> None:
        super().__init__(", ".join(prefixes))
        self.prefixes = prefixes


@dataclass(frozen=True, slots=True)
class Named:
    """Tensors under the architecture's names, and what was renamed otherwise than by wrappers."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""
    head: Mapping[str, str] = field(default_factory=dict)
    """The head's own keys by those in the file."""
    head_trouble: str | None = None
    """Why the file's head cannot be taken for the architecture's."""


def without_outer_wrappers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what wraps all keys, in any order, and the count that an averaged model adds."""
    names = dict(tensors)
    while True:
        averaged = names.get(_AVERAGED)
        keys = [key for key in names if key != _AVERAGED]
        wrapper = next((name for name in _WRAPPERS if _all_below(name, keys)), None)
        if wrapper is None or (averaged is not None and averaged.numel() != 1):
            return names
        names = {key.removeprefix(f"{wrapper}."): names[key] for key in keys}


def named(tensors: Mapping[str, Tensor], wanted: Collection[str], head: str) -> Named:
    """The tensors under the names of an architecture that has the keys `wanted`.

    head: the path of its last linear layer, `fc`. Raises SeveralModels.
    """
    inner = _renamed(tensors, _without_inner_wrappers(tensors, wanted))
    current = _renamed(inner, {key: _current_name(key, wanted) for key in inner})
    current = _renamed(current, _child_names(current, wanted))
    prefix = _prefix(current, wanted) or ""
    bare = _renamed(current, {key: key.removeprefix(prefix) for key in current})
    heads, trouble = _head_names(bare, wanted, head)
    renamed = _renamed(bare, {key: heads.get(key, key) for key in bare})
    return Named(renamed, prefix, heads, trouble)


def _all_below(name: str, keys: Collection[str]) -> bool:
    return bool(keys) and all(key.startswith(f"{name}.") for key in keys)


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Under new names, unless two would become one."""
    if len(set(names.values())) < len(tensors):
        return dict(tensors)
    return {names[key]: tensor for key, tensor in tensors.items()}


def _without_inner_wrappers(keys: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """`features.module.0.weight` -> `features.0.weight`, unless the architecture has such names itself."""
    own = {part for key in wanted for part in key.split(".")}
    wrappers = set(_WRAPPERS) - own
    return {
        key: ".".join(part for part in key.split(".") if part not in wrappers) or key
        for key in keys
    }


def _current_name(key: str, wanted: Collection[str]) -> str:
    name = key
    for earlier, current in _EARLIER_NAMES:
        name = earlier.sub(current, name)
    if name == key:
        return key
    return name if any(suffix in wanted for suffix in _suffixes(name)) else key


def _child_names(keys: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """`features.4.0.conv1.weight` -> `features.layer1.0.conv1.weight`, if such keys lead to a ResNet."""
    numbered = {}
    for key in wanted:
        child, _, rest = key.partition(".")
        numbered[f"{_RESNET_CHILDREN.get(child, child)}.{rest}"] = key
    prefix = None if _prefix(keys, wanted) is not None else _prefix(keys, numbered)
    if prefix is None:
        return {key: key for key in keys}
    names = {prefix + number: prefix + name for number, name in numbered.items()}
    return {key: names.get(key, key) for key in keys}


@functools.lru_cache(maxsize=8192)  # the same keys are held against every architecture
def _suffixes(key: str) -> tuple[str, ...]:
    """The key, and what is left of it without its first parts."""
    parts = key.split(".")
    return tuple(".".join(parts[start:]) for start in range(len(parts)))


def _prefix(keys: Collection[str], wanted: Collection[str]) -> str | None:
    """What a trainer put before every key of the model, `model.`: with it, most of `wanted` is there.

    None if nothing leads to most of them.
    """
    votes = Counter(
        key.removesuffix(suffix) for key in keys for suffix in _suffixes(key) if suffix in wanted
    )
    most = max(votes.values(), default=0)
    if most < _LEAST_SHARE * len(wanted):
        return None
    leading = sorted(prefix for prefix, count in votes.items() if count >= _NEARLY * most)
    if "" in leading:
        return ""
    if len(leading) > 1:
        raise SeveralModels([prefix.removesuffix(".") for prefix in leading])
    return leading[0]


def _head_names(
    tensors: Mapping[str, Tensor], wanted: Collection[str], head: str
) -> tuple[dict[str, str], str | None]:
    """For a head that was replaced by one linear layer among layers without weights: its keys' names.

    `fc.1.weight` of Sequential(Dropout, Linear) is `fc.weight`; so is `classifier.weight` of a trainer that
    has its own beside a model without one.
    """
    if f"{head}.weight" in tensors:
        return {}, None
    owner = _owner(wanted, head)
    strange = {key: tensor for key, tensor in tensors.items() if key not in wanted}
    inside = {key: tensor for key, tensor in strange.items() if key.startswith(f"{owner}.")}
    replaced = inside or strange
    matrices = [key for key, tensor in replaced.items() if tensor.dim() == 2]
    layer = matrices[0].rpartition(".")[0] if matrices else ""
    names = {f"{layer}.weight": f"{head}.weight", f"{layer}.bias": f"{head}.bias"}
    if len(matrices) == 1 and set(replaced) <= set(names):
        return {key: names[key] for key in replaced}, None
    beside = [key for key in wanted if not key.startswith((f"{head}.", f"{owner}."))]
    if not inside and not all(key in tensors or key.endswith(_COUNTER) for key in beside):
        return {}, None  # more than the head is missing: another architecture's
    return {}, (
        f"in the place of its linear layer {head} the file has {_first(list(replaced))}, "
        "which is not one linear layer; a head of one's own needs the code that makes it: --factory"
    )


def _first(keys: list[str]) -> str:
    return ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")


def _owner(wanted: Collection[str], head: str) -> str:
    """The outermost module that holds nothing but the head: a ViT's `heads` for `heads.head`."""
    own = {key for key in wanted if key.startswith(f"{head}.")}
    owner = head
    while "." in owner:
        above = owner.rpartition(".")[0]
        if any(key.startswith(f"{above}.") and key not in own for key in wanted):
            break
        owner = above
    return owner
