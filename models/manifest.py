"""What a prepared model's `manifest.json` says: the schema, without torch, so that the proxy may read it."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

FORMAT_VERSION = 1

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
VERSION_PATTERN = r"[0-9a-f]{12}"
FILE_PATTERN = r"[0-9]{3}-[A-Za-z0-9._-]{1,128}\.(safetensors|pth)"

Granularity = Literal["stage", "block"]
WeightFormat = Literal["safetensors", "pth"]
DataType = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
"""Element types under their safetensors names."""


def is_model_name(name: str) -> bool:
    return re.fullmatch(NAME_PATTERN, name) is not None


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorEntry(_Entry):
    """One parameter or buffer of a layer.

    `name` is relative to the layer (`conv1.weight` in the layer `layer3.4`); `offset` counts bytes from
    the start of the file and is 0 in a `pth` file, which has no fixed places.
    """

    name: str = Field(min_length=1, max_length=256)
    dtype: DataType
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    offset: int = Field(ge=0)


class LayerEntry(_Entry):
    """One layer; `file`, `sha256` are None and `bytes` is 0 for a layer without weights (`relu`)."""

    index: int = Field(ge=0)
    name: str = Field(min_length=1, max_length=256)
    file: Annotated[str, StringConstraints(pattern=rf"^{FILE_PATTERN}$")] | None
    bytes: int = Field(ge=0)
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None
    parameters: tuple[TensorEntry, ...]


class InputSpec(_Entry):
    """How an image becomes the model's input, as torchvision's `ImageClassification` preset does it.

    `resize` and `crop` are in pixels; `mean` and `std` per RGB channel in units of 0..1.
    """

    resize: int = Field(gt=0)
    crop: int = Field(gt=0)
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Literal["nearest", "bilinear", "bicubic"]
    antialias: bool = True


class Manifest(_Entry):
    format_version: Literal[1]
    architecture: str
    image_size: int = Field(gt=0)
    """Side in pixels for which the architecture was built (a ViT's positions depend on it)."""
    granularity: Granularity
    weight_format: WeightFormat
    classes: int = Field(gt=0)
    input: InputSpec
    labels: Literal["labels.json"] | None
    source: str
    """Where the weights came from: `random:0`, `checkpoint:model.pth`, `pretrained:IMAGENET1K_V2`."""
    layers: tuple[LayerEntry, ...]
