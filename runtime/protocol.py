"""The messages of the Open Inference Protocol, version 2, as they travel in JSON.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

INPUT: Final = "input"
LABELS: Final = "labels"
OUTPUTS: Final = ("logits", "probabilities", LABELS)
"""What a model answers, and what it is asked for where a request does not say."""

DATATYPES: Final = ("FP32", "FP64", "FP16", "BF16", "UINT8", "BYTES")
"""What an input may be of; checked where its message can say what was expected (`input_tensors.py`)."""

EXTENSIONS: Final = ("binary_tensor_data", "classification", "parameters")
"""Triton's names of what is served beyond the protocol."""


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 stands for any size.")


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class _Asked(BaseModel):
    """Part of a request: "1" is no number, and 1.0 no size."""

    model_config = ConfigDict(strict=True)


class RequestInput(_Asked):
    name: str = Field(
        description=f"`{INPUT}`: models have one input.", json_schema_extra={"const": INPUT}
    )
    shape: list[int] = Field(
        description="[n, 3, side, side] of FP32, FP64, FP16 or BF16 values as the model takes them; "
        "[n, height, width, 3] of UINT8 pixels in RGB; [n] BYTES, each an encoded image.",
        json_schema_extra={"minItems": 1, "maxItems": 4},
    )
    datatype: str = Field(json_schema_extra={"enum": [*DATATYPES]})
    parameters: dict[str, Any] = Field(
        default={},
        description="`binary_data_size`: the bytes of this tensor that follow the JSON object.",
    )
    data: Any = Field(
        default=None,
        description="Numbers in row-major order, or images in base64; nested as the shape says or flat. "
        "FP16 and BF16 travel as binary data only.",
    )


class RequestOutput(_Asked):
    name: str = Field(json_schema_extra={"enum": [*OUTPUTS]})
    parameters: dict[str, Any] = Field(
        default={},
        description="`binary_data`: whether this output comes as binary data; `top`: how many labels; "
        '`classification`: how many "value:index:label" instead of all the numbers.',
    )


class InferenceRequest(_Asked):
    id: str | None = None
    parameters: dict[str, Any] = Field(
        default={},
        description="`strategy`; `binary_data_output`: whether outputs come as binary data; `top`: how "
        "many labels.",
    )
    inputs: list[RequestInput] = Field(json_schema_extra={"minItems": 1, "maxItems": 1})
    outputs: list[RequestOutput] | None = Field(
        default=None, description="All, unless some are named."
    )


class ResponseOutput(BaseModel):
    name: str
    datatype: str = Field(
        description="FP32, or BYTES for labels; of a model of the user's, as its metadata say."
    )
    shape: list[int]
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="`binary_data_size`: the bytes of this tensor that follow the JSON object; `finite`: "
        "false where a number is not finite, which JSON cannot say.",
    )
    data: list[bool | int | float | str | None] | None = Field(
        default=None, description="null stands for a number that is not finite."
    )


class InferenceResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[ResponseOutput]
