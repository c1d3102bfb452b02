"""What a prepared model's `manifest.json` says: the schema, without torch, so that the proxy may read it."""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
VERSION_PATTERN = r"[0-9a-f]{12}"
FILE_PATTERN = r"[0-9]{3}-[A-Za-z0-9._-]{1,128}\.(safetensors|pth)"

Granularity = Literal["stage", "block"]
WeightFormat = Literal["safetensors", "pth"]
MemoryFormat = Literal["contiguous", "channels_last", "blocked"]
DataType = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
"""Element types under their safetensors names."""
Precision = Literal["F32", "F16", "BF16", "F64"]
"""In which a model's weights lie and its layers compute."""
Interpolation = Literal[
    "nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"
]
"""torchvision's names of them."""
Pixels = Annotated[int, Field(gt=0)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

ELEMENT_BYTES: Final[dict[DataType, int]] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
DATATYPES: Final[dict[DataType, str]] = {
    "F64": "FP64",
    "F32": "FP32",
    "F16": "FP16",
    "BF16": "BF16",
    "I64": "INT64",
    "I32": "INT32",
    "I16": "INT16",
    "I8": "INT8",
    "U8": "UINT8",
    "BOOL": "BOOL",
}
"""Element types under the names of the Open Inference Protocol."""
ALIGNMENT: Final = 64
"""Every tensor of a safetensors file starts at a multiple of it, counted from the file's start."""


def is_model_name(name: str) -> bool:
    return re.fullmatch(NAME_PATTERN, name) is not None


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BlockedLayout(_Entry):
    """How a convolution's weight lies in a `safetensors` file in oneDNN's own layout."""

    descriptor: str = Field(max_length=4096)
    """oneDNN's description of it: base64 of the zlib-compressed structure."""
    bytes: int = Field(ge=0)
    """With what the layout is padded."""


class TensorEntry(_Entry):
    """One parameter or buffer of a layer.

    `name` is its key in torchvision's state dict (`layer3.4.conv1.weight`), in the file too; `offset`
    counts bytes from the start of the file and is 0 in a `pth` file, which has no fixed places.
    """

    name: str = Field(min_length=1, max_length=256)
    dtype: DataType
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    offset: int = Field(ge=0)
    parameter: bool
    """False for a buffer."""
    channels_last: bool = False
    """Whether a `safetensors` file has it in the order outputs, rows, columns, inputs, and so shaped."""
    blocked: BlockedLayout | None = None
    """Then a `safetensors` file has it as a vector of F32."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        if self.blocked is not None:
            return self.blocked.bytes
        return self.elements * ELEMENT_BYTES[self.dtype]


class LayerEntry(_Entry):
    """One layer; `file`, `sha256` are None and `bytes` is 0 for a layer without weights (`relu`)."""

    index: int = Field(ge=0)
    name: str = Field(min_length=1, max_length=256)
    file: Annotated[str, StringConstraints(pattern=rf"^{FILE_PATTERN}$")] | None
    bytes: int = Field(ge=0)
    sha256: Sha256 | None
    parameters: tuple[TensorEntry, ...]
    """Its parameters and persistent buffers, in the order of the architecture's `Layer.tensors`."""
    parts: tuple[str, ...] = ()
    """Of a model that is cut by the general way: what of the module is the layer's, by dotted names."""
    until: int = Field(default=0, ge=0)
    """The layer in whose execution the forward comes to this one for the last time."""

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        with_weights = {self.file is not None, self.sha256 is not None, bool(self.parameters)}
        if len(with_weights) != 1 or (self.file is None and self.bytes):
            raise ValueError(f"layer {self.name} has only some of file, hash and parameters")
        for tensor in self.parameters:
            if tensor.offset % ALIGNMENT or tensor.offset + tensor.bytes > self.bytes:
                raise ValueError(f"tensor {tensor.name} lies outside its place in {self.file}")
        return self


class InputSpec(_Entry):
    """How an image becomes the model's input, as torchvision's `ImageClassification` preset does it.

    `resize` is the shorter side's pixels, or (height, width); `crop` the square's that is cut from the
    centre; `mean` and `std` are per RGB channel in units of 0..1.
    """

    resize: Pixels | tuple[Pixels, Pixels]
    crop: int = Field(gt=0)
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation
    antialias: bool = True


class Optimization(_Entry):
    """That convolutions are fused with what follows them, and what that gained where it was prepared.

    The answer is then equal to torchvision's within 1e-4 of the largest logit, not bit for bit.
    """

    memory_format: MemoryFormat
    """Of the convolutions' weights."""
    plain_ms: float = Field(gt=0)
    """Median forward pass of the model as torchvision has it, its weights in memory."""
    optimized_ms: float = Field(gt=0)
    threads: int = Field(gt=0)
    onednn: str | None = None
    """Whose blocked layout it is: a version of oneDNN reads its own alone."""

    @model_validator(mode="after")
    def _check_onednn(self) -> Self:
        if (self.memory_format == "blocked") != (self.onednn is not None):
            raise ValueError("a blocked layout without oneDNN's version, or a version without one")
        return self


class TensorSpec(_Entry):
    """An input of a model as its example had it; `named`: the forward takes it by its name."""

    name: str = Field(min_length=1, max_length=256)
    dtype: DataType
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    named: bool = False


class UserCode(_Entry):
    """A function or module of the user's: `/app/model.py:make`, `package.module:make`, `package.module`.

    sha256: of the file, None for a package.
    distribution: `timm 1.0.20`, which brought the package; None for a file, and where none or several did.
    """

    target: str = Field(min_length=1, max_length=4096)
    sha256: Sha256 | None = None
    distribution: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes: of all parameters and buffers, of 1-bit placeholders for the parameters, of the largest file."""

    weights: int
    one_bit: int
    largest_layer: int


class Manifest(_Entry):
    format_version: Literal[1]
    architecture: str
    image_size: int = Field(ge=0)
    """Side in pixels for which the architecture was built (a ViT's positions depend on it); 0: no images."""
    granularity: Granularity
    weight_format: WeightFormat
    classes: int = Field(ge=0)
    """0: not a classifier."""
    input: InputSpec | None
    """None for a model that takes no images."""
    preset: str = ""
    """The torchvision weights whose preprocessing `input` is, and what of it was changed: `IMAGENET1K_V2`."""
    labels: Literal["labels.json"] | None
    labels_sha256: Sha256 | None = None
    dtype: Precision = "F32"
    """Of a model of the user's, that of most weights' values."""
    found_dtypes: tuple[str, ...] = ()
    """Of the source's floating-point weights that are kept in another type."""
    activation_bytes: int = Field(default=0, ge=0)
    """Peak of the activations of one image, the image included (`models/activations.py`); 0: not known."""
    optimization: Optimization | None = None
    """None: executed as torchvision does, bit for bit."""
    source: str
    """Where the weights came from: `random:0`, `checkpoint:model.pth`, `pretrained:IMAGENET1K_V2`."""
    options: dict[str, JsonValue] = {}
    """What the architecture's builder was given besides classes and image size."""
    factory: UserCode | None = None
    """The user's function that makes the model, instead of torchvision's."""
    inputs: tuple[TensorSpec, ...] = ()
    """Of a model of the user's, the example that it was prepared with."""
    outputs: tuple[TensorSpec, ...] = ()
    """And what came out."""
    processing: UserCode | None = None
    """The user's module that makes inputs of a request's body, and a value of the outputs."""
    layers: tuple[LayerEntry, ...]

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if (self.labels is None) != (self.labels_sha256 is None):
            raise ValueError("labels without their hash, or a hash without labels")
        for index, layer in enumerate(self.layers):
            if layer.index != index:
                raise ValueError(f"layer {layer.name} has index {layer.index}, expected {index}")
            expected = layer_file_name(index, layer.name, self.weight_format)
            if layer.file not in {None, expected}:
                raise ValueError(f"layer {layer.name} has file {layer.file}, expected {expected}")
        return self

    @cached_property
    def sizes(self) -> Sizes:
        tensors = [tensor for layer in self.layers for tensor in layer.parameters]
        return Sizes(
            weights=sum(tensor.bytes for tensor in tensors),
            one_bit=sum((tensor.elements + 7) // 8 for tensor in tensors if tensor.parameter),
            largest_layer=max((layer.bytes for layer in self.layers), default=0),
        )


def layer_file_name(index: int, layer: str, weight_format: WeightFormat) -> str:
    return f"{index:03d}-{layer}.{weight_format}"
