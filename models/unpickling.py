"""torch.load for files that hold more than tensors: no code is run, no class of theirs is imported.

Every class or function that `torch.load(weights_only=True)` does not know is replaced by a stand-in of
the same name that takes whatever it is given and does nothing. So weights can be read that lie beside
hyper-parameters, NumPy numbers or callbacks.
"""

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, Literal

import torch
from torch.serialization import safe_globals

from models import legacy_files

Form = Literal["zip", "legacy", "unknown"]
"""torch.save's since torch 1.6, before it, and whatever else torch.load is to make something of."""

_MOST_STAND_INS: Final = 1000
_UNKNOWN: Final = re.compile(r"Unsupported global: GLOBAL ([\w.]+) was not an allowed global")
_BLOCKED: Final = re.compile(r"unsupported GLOBAL (\S+) whose module")
_TABLE_NEEDED: Final = re.compile(r"Can only SETITEMS? for dict")
_NAMED: Final = "stands_for"


class Unreadable(Exception):
    """Why a file cannot be read, in words that follow the file's name and a colon."""


class _StandIn(list[object]):
    """An object of a class that is not imported; of its state, the names of its attributes are kept."""

    name = ""
    attributes: tuple[str, ...] = ()

    def __init__(self, *_arguments: object, **_named: object) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        """It may be a key."""
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __setstate__(self, state: object) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        self.attributes = tuple(
            str(name) for part in parts if isinstance(part, dict) for name in part
        )


def load(path: Path, form: Form) -> Any:
    """What torch.save wrote, tensors on the CPU; mapped from the file, not read, in the forms that are known.

    Raises Unreadable, and OSError if the file cannot be opened.
    """
    stand_ins: dict[str, Callable[..., object]] = {}
    while True:
        try:
            return _load(path, stand_ins, form)
        except UnpicklingError as error:
            if len(stand_ins) > _MOST_STAND_INS or not _provided(str(error), stand_ins):
                raise Unreadable(_why(str(error))) from error
        except legacy_files.Damaged as error:
            raise Unreadable(str(error)) from error
        except (
            Exception
        ) as error:  # damaged bytes fail in torch wherever they lead it: IndexError, ...
            reason = str(error).partition("\n")[0].removesuffix(".") or type(error).__name__
            raise Unreadable(f"it is cut short or damaged: {reason}") from error


def stands_for(value: object) -> str | None:
    """The class or function that the value would be, or come from, had it been imported."""
    if isinstance(value, _StandIn) or (isinstance(value, type) and issubclass(value, _StandIn)):
        return value.name
    named = vars(value).get(_NAMED) if type(value) is OrderedDict else None
    return named if isinstance(named, str) else None


def is_module(value: object) -> bool:
    """Whether the value would be a torch.nn.Module."""
    return isinstance(value, _StandIn) and {"_parameters", "_modules"} <= set(value.attributes)


def _load(path: Path, stand_ins: dict[str, Callable[..., object]], form: Form) -> Any:
    allowed: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
    with path.open("rb") as file, warnings.catch_warnings(), safe_globals(allowed):
        warnings.simplefilter(
            "ignore"
        )  # of sparse tensors, pickle protocols, dtypes without storage
        if form == "legacy":
            return legacy_files.load(path)
        # torch.load maps by name only, and takes files named so for safetensors whatever they hold.
        mapped = form == "zip" and path.suffix != ".safetensors"
        content = str(path) if mapped else file
        return torch.load(content, map_location="cpu", weights_only=True, mmap=mapped)


def _provided(message: str, stand_ins: dict[str, Callable[..., object]]) -> bool:
    """Adds the stand-in whose lack the message tells of; whether there was one to add."""
    unknown = _UNKNOWN.search(message)
    if unknown is not None and unknown[1] not in stand_ins:
        stand_ins[unknown[1]] = _stand_in(unknown[1])
        if "." not in unknown[1]:  # torch leaves the module's name out of this one's names
            stand_ins[f"builtins.{unknown[1]}"] = stand_ins[unknown[1]]
        return True
    if _TABLE_NEEDED.search(message) is None:
        return False
    for name, stand_in in stand_ins.items():
        if repr(stand_in) in message:
            stand_ins[name] = _table(name)
            return True
    return False


def _stand_in(name: str) -> type[_StandIn]:
    return type(f"<{name}>", (_StandIn,), {"name": name})


def _table(name: str) -> Callable[..., object]:
    """A stand-in for a class of dicts: torch.load fills nothing but its own kinds of dict."""

    def new(_class: type, *_arguments: object, **_named: object) -> "OrderedDict[str, object]":
        made: OrderedDict[str, object] = OrderedDict()
        vars(made)[_NAMED] = name
        return made

    return type(f"<{name}>", (), {"__new__": new})


def _why(message: str) -> str:
    blocked = _BLOCKED.search(message)
    if blocked is not None:
        return f"it holds {blocked[1]}, a call that no weights need"
    if "Only persistent_load of storage is allowed" in message:
        return "it holds a whole pickled module; expected torch.save(model.state_dict(), file)"
    if "Trying to call reduce for unrecognized function" in message:
        return "it holds a call of what another call gave, which no weights need"
    found = re.search(r"WeightsUnpickler error:\s*([^\n]+)", message)
    reason = (found[1] if found else message.partition("\n")[0]).strip().removesuffix(".")
    operand = re.search(r"Unsupported operand (\d+)", reason)
    if operand is not None:
        return (
            f"its pickle has the instruction {operand[1]}, which no weights need; "
            "expected the pickle_protocol that torch.save has by default"
        )
    return f"it is damaged, or holds more than tensors: {reason}"
