"""Any `torch.nn.Module` as layers: where it is cut, and in which order its forward comes to the parts.

The module's own forward runs, over modules that are built and loaded layer by layer (`models/gates.py`).
So whatever it does, several inputs, skips across layers, modules called twice, branches on shapes, the
output is its own. What a structure and a state dict do not tell of a module is refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from models import references, slim, weightless
from models.blueprint import structure_only
from models.errors import ModelError
from models.gates import GatedForward, Part, SharedTensor, call_with, contents
from models.layers import Architecture, Cut, Layer
from models.manifest import Granularity
from models.weight_files import DATA_TYPES

_TABLES: Final = ("_parameters", "_buffers", "_modules")
_SHARES: Final[dict[Granularity, int]] = {"block": 16, "stage": 2}
"""A part with more than this fraction of all bytes is cut into its own parts, if it has any."""
_LEAST_BYTES: Final[dict[Granularity, int]] = {"block": 24 << 20, "stage": 0}
"""Parts in a row that have less together are one layer: a file costs a request a tenth of a millisecond (ConvNeXt-Tiny:
1.015 of resident with 24 MiB, 1.035 with 8); but the first must be there before anything is executed (from disk 66 ms
at best, 61 with 8; in the median 68 with both)."""
_LEAST_SHARE: Final = 3
"""Of all bytes: a model that has few of them is several layers still."""
_WHOLE: Final = "model"
_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
_LONGEST_NAME: Final = 120


class Unsuitable(ModelError):
    """A module that cannot be served; the message says what of it, and why."""


def structure(make: Callable[[], object], what: str) -> nn.Module:
    """The module that `make` gives, in `eval()`, without memory for its parameters if that can be.

    A constructor that computes with the values of its parameters gets memory and values, as usual.
    Raises Unsuitable, and what `make` raises.
    """
    try:
        with structure_only():
            module = make()
    except Exception:  # noqa: BLE001 - of any kind, as its parameters had no values
        module = make()
    checked = _checked(module, what)
    if not _has_its_constants(checked):
        checked = _checked(make(), what)
    return checked.eval()


def let_go(module: nn.Module) -> None:
    """Frees the memory of the module's tensors, if its constructor needed any.

    Objects that its structure shares with it may refer to it, as a traced module's graph does.
    """
    for tensor in module.state_dict(keep_vars=True).values():
        if not tensor.is_meta:
            tensor.data = tensor.data.new_empty(0)


def _checked(module: object, what: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise Unsuitable(f"{what} gives a {type(module).__name__}, expected a torch.nn.Module")
    registered = {id(part) for part in module.modules()}
    for name, part in module.named_modules():
        where = f"{what}: {_called(name, part)}"
        if isinstance(part, torch.jit.ScriptModule):
            raise Unsuitable(f"{where} is compiled by TorchScript, which hides its structure")
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise Unsuitable(f"{where} keeps a state besides its tensors (get_extra_state)")
        for attribute, tensor in (*part._parameters.items(), *part._buffers.items()):
            _check_tensor(tensor, f"{where} has the tensor {attribute}")
        for attribute, found in _referred(part):
            if isinstance(found, nn.Module) and id(found) not in registered and found.state_dict():
                raise Unsuitable(
                    f"{where} holds a {type(found).__name__} in {attribute} without registering it, "
                    "so no state dict carries its weights (nn.ModuleList and nn.ModuleDict register)"
                )
    for key, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise Unsuitable(f"{what} keeps a state besides its tensors: its {key} is a {kind}")
    return module


def _called(name: str, part: nn.Module) -> str:
    return f"its module {name} ({type(part).__name__})" if name else type(part).__name__


def _check_tensor(tensor: Tensor | None, where: str) -> None:
    if tensor is None:
        return
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise Unsuitable(f"{where}, which has no shape before the first call (a lazy module)")
    if tensor.is_quantized or tensor.layout != torch.strided or tensor.dtype not in DATA_TYPES:
        raise Unsuitable(f"{where} of {tensor.dtype} ({tensor.layout}), which cannot be stored")


def _referred(module: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """What its plain attributes refer to, by their names."""
    for attribute, value in vars(module).items():
        if attribute not in _TABLES:
            yield from ((attribute, found) for found in references.referred(value))


def _has_its_constants(module: nn.Module) -> bool:
    """Whether everything that no state dict carries has its value."""
    carried = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    constants = (
        tensor
        for part in module.modules()
        for tensor in (*part._buffers.values(), *(found for _, found in _referred(part)))
        if isinstance(tensor, Tensor) and id(tensor) not in carried
    )
    return not any(tensor.is_meta for tensor in constants)


def cuts(module: nn.Module, granularity: Granularity, inputs: Any) -> tuple[Cut, ...]:
    """How the module becomes layers, in the order in which its forward on `inputs` comes to them.

    Parts that the forward does not come to are the last layer. Raises Unsuitable for a forward that
    fails.
    """
    sizes = _Sizes(module)
    limit = sizes.total // _SHARES[granularity]
    names = list(_candidates(module, sizes, limit))
    if not names or _is_entangled(module, names):
        return (Cut(_WHOLE, ("",), 0),)
    order, last = _visits(module, names, inputs)
    if not order:
        return (Cut(_WHOLE, ("",), 0),)
    least = min(_LEAST_BYTES[granularity], sizes.total // _LEAST_SHARE)
    groups = _grouped(order, sizes, max(least, limit // 4))
    group_of = {name: index for index, group in enumerate(groups) for name in group}
    untils = [max(group_of[last[name]] for name in group) for group in groups]
    if unvisited := [name for name in names if name not in last]:
        groups.append(unvisited)
        untils.append(len(groups) - 1)
    return tuple(
        Cut(_layer_name(group[0]), tuple(group), until)
        for group, until in zip(groups, untils, strict=True)
    )


class _Sizes:
    """Bytes of parameters and persistent buffers below a dotted name, each tensor counted once."""

    def __init__(self, module: nn.Module) -> None:
        self._bytes: dict[str, int] = {}
        seen: set[int] = set()
        for key, tensor in module.state_dict(keep_vars=True).items():
            size = 0 if id(tensor) in seen else tensor.numel() * tensor.element_size()
            seen.add(id(tensor))
            place = key
            while place:
                self._bytes[place] = self._bytes.get(place, 0) + size
                place = place.rpartition(".")[0]
            self._bytes[""] = self._bytes.get("", 0) + size

    @property
    def total(self) -> int:
        return self._bytes.get("", 0)

    def has_weights(self, name: str) -> bool:
        return name in self._bytes

    def __getitem__(self, name: str) -> int:
        return self._bytes[name]


def _candidates(
    module: nn.Module, sizes: _Sizes, limit: int, name: str = "", cut: set[int] | None = None
) -> Iterator[str]:
    """Names of the tensors that lie on modules above parts, and of the parts: subtrees within the limit."""
    cut = set() if cut is None else cut
    if id(module) in cut:
        return  # under another name; the modules above stand in several places as they did
    cut.add(id(module))
    prefix = f"{name}." if name else ""
    for attribute in (*module._parameters, *module._buffers):
        if sizes.has_weights(prefix + attribute):
            yield prefix + attribute
    for attribute, child in module._modules.items():
        path = prefix + attribute
        if child is None or not sizes.has_weights(path):
            continue
        divisible = any(sizes.has_weights(f"{path}.{grandchild}") for grandchild in child._modules)
        if sizes[path] > limit and divisible:
            yield from _candidates(child, sizes, limit, path, cut)
        else:
            yield path


def _is_entangled(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a plain attribute refers from one layer's modules to another's, or to those above, or back.

    A module may refer to tensors of its own: it finds them anew at each call.
    """
    home = {
        id(found): name
        for name in names
        for path in contents(module, name)
        for found in _everything(module, path)
    }
    modules = {id(part) for part in module.modules()}
    carried = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    for part in module.modules():
        own = {id(tensor) for tensor in (*part._parameters.values(), *part._buffers.values())}
        for _, found in _referred(part):
            known = id(found) in modules or id(found) in carried - own
            if known and home.get(id(found), "") != home.get(id(part), ""):
                return True
    return False


def _everything(module: nn.Module, name: str) -> Iterator[nn.Module | Tensor]:
    part = _at(module, name)
    if isinstance(part, nn.Module):
        yield from part.modules()
        yield from part.state_dict(keep_vars=True).values()
    else:
        yield part


def _at(module: nn.Module, name: str) -> nn.Module | Tensor:
    owner, _, attribute = name.rpartition(".")
    above = module.get_submodule(owner)
    found: nn.Module | Tensor = getattr(above, attribute) if name else module
    return found


def _visits(
    module: nn.Module, names: Sequence[str], inputs: Any
) -> tuple[list[str], dict[str, str]]:
    """The parts in the order of the forward's first visits; and per part, which was newest at its last."""
    chain = architecture("", module, tuple(Cut(name, (name,), 0) for name in names))
    order: list[str] = []
    last: dict[str, str] = {}

    def enter(layer: int) -> tuple[int, ...]:
        if names[layer] not in last:
            order.append(names[layer])
        last[names[layer]] = order[-1]
        return ()

    with torch.no_grad():
        try:
            weightless.run(chain, weightless.built(chain), inputs, enter)
        except Exception:  # noqa: BLE001 - of any kind, as it may look at values
            order.clear()
            last.clear()
            weightless.run(chain, weightless.built(chain, "cpu"), inputs, enter, "cpu")
    return order, last


def _grouped(order: Sequence[str], sizes: _Sizes, least: int) -> list[list[str]]:
    """Neighbours joined as long as they have no more than `least` bytes together."""
    groups: list[list[str]] = []
    size = least + 1
    for name in order:
        size += sizes[name]
        if size > least:
            groups.append([])
            size = sizes[name]
        groups[-1].append(name)
    return groups


def _layer_name(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", part)[:_LONGEST_NAME]


def architecture(
    name: str,
    module: nn.Module,
    layers: Sequence[Cut],
    *,
    granularity: Granularity = "block",
    classes: int = 0,
    image_size: int = 0,
    options: Mapping[str, JsonValue] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Architecture:
    """The module as the layers of `cuts`; of the module only structure is kept.

    Raises Unsuitable where the layers are not those of the module.
    """
    _check_cover(module, layers)
    state = module.state_dict(keep_vars=True)
    slimmed = slim.suits(module)
    owners: dict[int, tuple[int, str]] = {}
    chain: list[Layer] = []
    parts: list[Part] = []
    for index, cut in enumerate(layers):
        elsewhere = {key for key, tensor in state.items() if id(tensor) in owners}
        layer = Layer(
            cut.name,
            _tree(module, cut.parts),
            "",
            run=call_with,
            elsewhere=elsewhere,
            slimmed=slimmed,
        )
        shared = tuple(
            SharedTensor(slot, *owners[id(state[slot.name])]) for slot in layer.elsewhere
        )
        owners |= {id(state[key]): (index, key) for key, _ in layer.slots}
        chain.append(layer)
        parts.append(Part(cut.parts, shared, cut.until))
    own = {key: owners[id(tensor)][1] for key, tensor in state.items()}
    return Architecture(
        name,
        granularity,
        classes,
        image_size,
        tuple(chain),
        dtype=dtype,
        options=options or {},
        gated=None if [cut.parts for cut in layers] == [("",)] else GatedForward(module, parts),
        aliases={key: kept for key, kept in own.items() if key != kept},
        cuts=tuple(layers),
        constants=dict(_constants(module, state)),
    )


def _constants(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The buffers in its state dict, but for what training counts and averages."""
    for key, _ in module.named_buffers():
        tensor = state.get(key)
        if tensor is not None and not tensor.is_meta and not key.endswith(_STATISTICS):
            yield key, tensor.detach().clone()


def _check_cover(module: nn.Module, layers: Sequence[Cut]) -> None:
    try:
        had = {
            id(found) for cut in layers for part in cut.parts for found in _everything(module, part)
        }
    except AttributeError as error:
        raise Unsuitable(f"a layer has a part that the module has not: {error}") from error
    for key, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in had:
            raise Unsuitable(f"no layer has the module's {key}")


def _tree(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """What of the module has these names, in an otherwise empty tree, so that keys are the whole's."""
    if tuple(names) == ("",):
        return module
    root = nn.Module().eval()
    for name in names:
        *above, attribute = name.split(".")
        place, source = root, module
        for step in above:
            source = source.get_submodule(step)
            if step not in place._modules:
                place._modules[step] = nn.Module().eval()
            place = place.get_submodule(step)
        for table in _TABLES:
            if attribute in source.__dict__[table]:
                place.__dict__[table][attribute] = source.__dict__[table][attribute]
    return root
