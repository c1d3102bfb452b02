"""What makes inputs of a request and a value of a model's outputs: built in for images and tensors, or the user's.

A user's processing is a module with two functions, here with their types:

    def decode(body: bytes, content_type: str | None, parameters: Mapping[str, str]) -> Inputs
    def encode(outputs: Any, parameters: Mapping[str, str]) -> Value

`body` and `content_type` are the request's, `parameters` those of its query. `decode` returns what the
model is called with: a tensor, a sequence of inputs in order, or a mapping of them by name; it raises
InvalidInput for what the caller has to do otherwise (status 400). `encode` gets what the model returned.

They run on the compute thread, the one that may enter OpenMP, so that no second team of threads comes to
be. What they change of torch's thread count, when they are called or imported, is put back, and told in the log.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import Tensor

from handler import openmp
from handler.errors import InvalidInput, ModelFault, RequestFailed
from handler.wire import Header
from models import factories, own
from models.errors import ModelError
from models.manifest import UserCode
from models.store import PreparedModel

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Value = Any
"""What JSON can say; or bytes or a string, which are answered as they are."""
Parameters = Mapping[str, str]

_MEDIA_TYPES: Final = {bytes: "application/octet-stream", str: "text/plain; charset=utf-8"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Fields of the `result` frame, and its body."""

    fields: Header = field(default_factory=dict)
    body: bytes = b""


class Processing(Protocol):
    """One request's way in and out."""

    def decode(self, described: Header, body: bytearray) -> Any:
        """The model's inputs. `described`: the frame's `input`. Raises RequestFailed."""

    def encode(self, outputs: Any) -> Encoded:
        """Raises RequestFailed."""


class OwnProcessing:
    """The user's module. What it raises is answered, InvalidInput as it is, everything else as its fault."""

    def __init__(self, name: str, decode: Callable[..., Any], encode: Callable[..., Any]) -> None:
        self.name = f"{own.PROCESSING} {name}"
        self._decode = decode
        self._encode = encode
        self._parameters: Parameters = {}

    def decode(self, described: Header, body: bytearray) -> Any:
        self._parameters = described.get("parameters", {})
        with self._running("decode"):
            return self._decode(bytes(body), described.get("content_type"), self._parameters)

    def encode(self, outputs: Any) -> Encoded:
        with self._running("encode"):
            value = self._encode(outputs, self._parameters)
            content, media_type = _content(value)
        return Encoded({"value": {"media_type": media_type, "bytes": len(content)}}, content)

    @contextmanager
    def _running(self, function: str) -> Iterator[None]:
        try:
            with openmp.watched(f"{function} of {self.name}"):
                yield
        except (RequestFailed, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            log.exception("%s of %s failed", function, self.name)
            raise ModelFault(
                f"{self.name} failed in {function}: {type(error).__name__}: {error}"
            ) from error


def _content(value: Value) -> tuple[bytes, str]:
    if isinstance(value, bytes):
        return value, _MEDIA_TYPES[bytes]
    if isinstance(value, str):
        return value.encode(), _MEDIA_TYPES[str]
    return json.dumps(value, allow_nan=False, ensure_ascii=False).encode(), "application/json"


class OwnProcessings:
    """The users' modules, each imported when it is first asked for.

    default: of models that were prepared without one, as the setting CICADA_PROCESSING names it.
    """

    def __init__(self, default: str | None = None) -> None:
        self._default = default
        self._default_code: UserCode | None = None
        self._functions: dict[UserCode, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def has(self, model: PreparedModel) -> bool:
        return model.manifest.processing is not None or self._default is not None

    def of(self, model: PreparedModel) -> OwnProcessing:
        """Raises InvalidInput for a model that has none, ModelFault for one that cannot be had."""
        try:
            code = self._code(model)
            if code not in self._functions:
                with openmp.watched(f"{own.PROCESSING} {code.target}"):
                    self._functions[code] = own.processing_functions(code)
        except ModelError as error:
            raise ModelFault(f"model {model.name!r}: {error}") from error
        return OwnProcessing(code.target, *self._functions[code])

    def _code(self, model: PreparedModel) -> UserCode:
        if model.manifest.processing is not None:
            return model.manifest.processing
        if self._default is None:
            raise InvalidInput(f"model {model.name!r} has no processing of its own")
        if self._default_code is None:
            self._default_code = factories.module_code(self._default, own.PROCESSING)
        return self._default_code
