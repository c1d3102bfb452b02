"""What a handler sends, checked before it is believed (`handler/wire.py` says how frames travel)."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from handler.strategies import STRATEGIES
from handler.timeline import Figures, Span, Suspension
from handler.wire import Header, ProtocolError
from models.manifest import NAME_PATTERN, VERSION_PATTERN

Count = Annotated[int, Field(ge=0)]
# Both stand in headers of the answer: of these forms they cannot break one.
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]
Version = Annotated[str, StringConstraints(pattern=f"^{VERSION_PATTERN}$")]


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Timeline(_Frame):
    """What ran when in one request's pipeline; nanoseconds of the monotonic clock."""

    strategy: str
    model: Name
    version: Version
    layers: tuple[str, ...]
    arrival_ns: int
    decoded_ns: tuple[int, int]
    spans: tuple[Span, ...]
    suspensions: tuple[Suspension, ...]
    placeholder_bytes: Count
    figures: Figures

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is none")
        rows: tuple[Span | Suspension, ...] = (*self.spans, *self.suspensions)
        if any(not 0 <= row.layer < len(self.layers) for row in rows):
            raise ValueError(f"a row of a layer that is not one of the {len(self.layers)}")
        return self


class Tensor(_Frame):
    name: str
    datatype: Literal[
        "FP64", "FP32", "FP16", "BF16", "INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL"
    ]
    shape: tuple[Count, ...]
    bytes: Count


class Label(_Frame):
    """One class of an answer; the probability is what the model gave, finite or not."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=True)

    label: str
    index: Count
    probability: float


class Ready(_Frame):
    type: Literal["ready"]
    pid: int
    threads: int
    torch: str


class Value(_Frame):
    """What a model's own processing made, as the frame's body."""

    media_type: Literal["application/json", "application/octet-stream", "text/plain; charset=utf-8"]
    bytes: Count


class Result(_Frame):
    type: Literal["result"]
    id: str
    model: Name
    version: Version
    outputs: tuple[Tensor, ...]
    labels: tuple[tuple[Label, ...], ...] | None
    value: Value | None = None
    timeline: Timeline

    @property
    def body_bytes(self) -> int:
        return sum(output.bytes for output in self.outputs) + (
            0 if self.value is None else self.value.bytes
        )


class Refusal(_Frame):
    """The handler's `error` frame."""

    type: Literal["error"]
    id: str
    status: int
    message: str


Frame = Ready | Result | Refusal
_FRAMES: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[Frame, Field(discriminator="type")])


def parse(header: Header) -> Frame:
    """Raises ProtocolError for what no handler of ours sends."""
    try:
        frame: Frame = _FRAMES.validate_python(header)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"a frame's {place or 'header'}: {first['msg']}") from error
    return frame
