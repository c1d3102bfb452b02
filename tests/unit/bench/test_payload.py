"""What clients of the benchmarks send."""

import io
import json

import numpy as np
from PIL import Image

from bench import payload
from bench.payload import Request


def test_both_forms_of_a_tensor_hold_the_same_values() -> None:
    plain = payload.request("json", "m", 4, None)
    binary = payload.request("binary", "m", 4, None)
    (tensor,) = json.loads(plain.body)["inputs"]
    length = int(binary.headers["Inference-Header-Content-Length"])
    (described,) = json.loads(binary.body[:length])["inputs"]
    assert tensor["shape"] == described["shape"] == [1, 3, 4, 4]
    assert described["parameters"]["binary_data_size"] == len(binary.body) - length
    values = np.frombuffer(binary.body[length:], "<f4")
    assert np.array_equal(np.array(tensor["data"], np.float32), values)


def test_an_image_is_the_one_given_or_one_that_is_made() -> None:
    assert payload.request("image", "m", 4, b"mine") == Request(
        "/predictions/m", {"Content-Type": "application/octet-stream"}, b"mine"
    )
    made = Image.open(io.BytesIO(payload.request("image", "m", 4, None).body))
    assert (made.format, made.size, made.mode) == ("JPEG", (640, 480), "RGB")
