"""What clients send, over and over: an image, or a tensor as binary data or as JSON. Needs no torch."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from PIL import Image

KINDS: Final = ("image", "binary", "json")
_SEED: Final = 0
_IMAGE_SIZE: Final = (640, 480)


@dataclass(frozen=True, slots=True)
class Request:
    """What every client sends, over and over."""

    path: str
    headers: Mapping[str, str]
    body: bytes


def request(kind: str, model: str, side: int, image: bytes | None) -> Request:
    """side: the model's input's, in pixels."""
    if kind == "image":
        headers = {"Content-Type": "application/octet-stream"}
        return Request(f"/predictions/{model}", headers, image or made_image())
    values = np.random.default_rng(_SEED).standard_normal((1, 3, side, side), dtype=np.float32)
    tensor: dict[str, Any] = {"name": "input", "datatype": "FP32", "shape": list(values.shape)}
    path = f"/v2/models/{model}/infer"
    if kind == "json":
        tensor["data"] = values.ravel().tolist()
        body = json.dumps({"inputs": [tensor]}).encode()
        return Request(path, {"Content-Type": "application/json"}, body)
    tensor["parameters"] = {"binary_data_size": values.nbytes}
    parameters = {"binary_data_output": True}
    header = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }
    return Request(path, headers, header + values.astype("<f4").tobytes())


def made_image() -> bytes:
    """A JPEG of a photo's size, smooth as photos are."""
    colours = np.random.default_rng(_SEED).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    content = io.BytesIO()
    picture = Image.fromarray(colours).resize(_IMAGE_SIZE, Image.Resampling.BICUBIC)
    picture.save(content, "JPEG", quality=90)
    return content.getvalue()
