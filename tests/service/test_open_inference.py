"""The Open Inference Protocol on a real server, through Triton's own client, against torchvision's model."""

import base64
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.usefixtures("one_thread")

Server = Any
CLASSES: Final = 1000
PATH: Final = "/v2/models/resnet18/infer"
LENGTH: Final = "Inference-Header-Content-Length"
VALUES: Final = 3 * 224 * 224
CATEGORIES: Final = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    opened = InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def value() -> Tensor:
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def photo_logits(reference: nn.Module, photo_tensor: Tensor) -> Tensor:
    return forward(reference, photo_tensor)


def forward(model: nn.Module, value: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(value)
    return logits


def given(array: np.ndarray[Any, Any], datatype: str, *, binary: bool = True) -> Any:
    tensor = InferInput("input", list(array.shape), datatype)
    return tensor.set_data_from_numpy(array, binary_data=binary)


def images(*encoded: bytes, shape: list[int] | None = None, binary: bool = True) -> Any:
    array = np.array(encoded, dtype=np.object_).reshape(shape or [len(encoded)])
    return given(array, "BYTES", binary=binary)


def logits(result: InferResult) -> Tensor:
    return torch.from_numpy(result.as_numpy("logits").copy())


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_the_server_and_its_model_describe_themselves(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("resnet18")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("resnet18")
    (version,) = metadata.pop("versions")
    assert client.is_model_ready("resnet18", version)
    assert not client.is_model_ready("resnet50")
    assert metadata == {
        "name": "resnet18",
        "platform": "pytorch_safetensors",
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 3, 224, 224]}],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, CLASSES]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, CLASSES]},
            {"name": "labels", "datatype": "BYTES", "shape": [-1, -1]},
        ],
    }


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_logits_are_torchvisions_as_json_and_as_binary_data(
    client: Any, reference: nn.Module, value: Tensor, binary_in: bool, binary_out: bool
) -> None:
    result = client.infer(
        "resnet18",
        [given(value.numpy(), "FP32", binary=binary_in)],
        outputs=[InferRequestedOutput("logits", binary_data=binary_out)],
        request_id="a request's id",
    )
    assert torch.equal(logits(result), forward(reference, value))
    response = result.get_response()
    assert response["id"] == "a request's id"
    assert response["model_name"] == "resnet18"
    assert ("data" in response["outputs"][0]) != binary_out


def test_all_outputs_come_where_none_is_named(
    client: Any, reference: nn.Module, value: Tensor
) -> None:
    result = client.infer("resnet18", [given(value.numpy(), "FP32")])
    expected = forward(reference, value)
    probabilities = torch.softmax(expected, dim=1)
    assert torch.equal(logits(result), expected)
    assert torch.equal(torch.from_numpy(result.as_numpy("probabilities").copy()), probabilities)
    labels = [[name.decode() for name in row] for row in result.as_numpy("labels")]
    assert labels == [
        [CATEGORIES[index] for index in row] for row in probabilities.topk(5).indices.tolist()
    ]


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("FP64", lambda value: value.double().numpy() + 1e-12),
        ("FP16", lambda value: value.half().numpy()),
        ("BF16", lambda value: value.numpy().astype(ml_dtypes.bfloat16)),
    ],
)
def test_other_floats_are_taken_as_the_nearest_fp32(
    client: Any, reference: nn.Module, value: Tensor, datatype: str, array: Any
) -> None:
    sent = array(value)
    expected = forward(reference, torch.from_numpy(sent.astype(np.float32)))
    assert torch.equal(logits(client.infer("resnet18", [given(sent, datatype)])), expected)
    if datatype == "FP64":
        result = client.infer("resnet18", [given(sent, datatype, binary=False)])
        assert torch.equal(logits(result), expected)


def test_half_precision_has_no_form_in_json(client: Any, value: Tensor) -> None:
    tensor = given(value.half().numpy(), "FP16", binary=False)
    with pytest.raises(InferenceServerException, match="FP16 has no form in JSON") as raised:
        client.infer("resnet18", [tensor])
    assert raised.value.status() == "400"


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_an_encoded_image_is_preprocessed_as_torchvisions_preset_does(
    client: Any, photo: Path, photo_logits: Tensor, binary: bool, shape: list[int]
) -> None:
    encoded = photo.read_bytes()
    tensor = images(encoded if binary else base64.b64encode(encoded), shape=shape, binary=binary)
    assert torch.equal(logits(client.infer("resnet18", [tensor])), photo_logits)


@pytest.mark.parametrize("binary", [True, False])
def test_several_images_of_any_sizes_and_forms_are_a_batch(
    client: Any, reference: nn.Module, photo: Path, binary: bool
) -> None:
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    with Image.open(photo) as opened:
        small = opened.resize((90, 70))
        expected = forward(reference, torch.stack([preset(small), preset(opened)]))
    encoded = [png(small), photo.read_bytes()]
    if not binary:
        encoded = [base64.b64encode(image) for image in encoded]
    assert torch.equal(
        logits(client.infer("resnet18", [images(*encoded, binary=binary)])), expected
    )


def test_pixels_are_treated_as_an_image_file_of_them(
    client: Any, reference: nn.Module, photo: Path, photo_logits: Tensor
) -> None:
    with Image.open(photo) as opened:
        pixels = np.asarray(opened.convert("RGB"))[None]
        small = np.asarray(opened.resize((9, 7)))[None]
    assert torch.equal(logits(client.infer("resnet18", [given(pixels, "UINT8")])), photo_logits)
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    both = np.concatenate([small, 255 - small])
    expected = forward(reference, torch.stack([preset(Image.fromarray(one)) for one in both]))
    for binary in (True, False):
        result = client.infer("resnet18", [given(both, "UINT8", binary=binary)])
        assert torch.equal(logits(result), expected)


@pytest.mark.parametrize(("top", "count"), [(1, 1), (7, 7), (CLASSES, CLASSES), (1 << 63, CLASSES)])
@pytest.mark.parametrize("binary", [True, False])
def test_labels_are_the_most_probable_up_to_all_there_are(
    client: Any, photo: Path, photo_logits: Tensor, top: int, count: int, binary: bool
) -> None:
    result = client.infer(
        "resnet18",
        [images(photo.read_bytes())],
        outputs=[InferRequestedOutput("labels", binary_data=binary)],
        parameters={"top": top},
    )
    (found,) = result.as_numpy("labels").tolist()
    texts = [name.decode() if binary else name for name in found]
    order = torch.softmax(photo_logits, dim=1).topk(count).indices[0].tolist()
    assert texts[:3] == [CATEGORIES[index] for index in order[:3]]
    assert sorted(texts) == sorted(CATEGORIES[index] for index in order)


@pytest.mark.parametrize("name", ["logits", "probabilities"])
@pytest.mark.parametrize("binary", [True, False])
def test_an_output_may_come_as_a_classification(
    client: Any, photo: Path, photo_logits: Tensor, name: str, binary: bool
) -> None:
    result = client.infer(
        "resnet18",
        [images(photo.read_bytes())],
        outputs=[InferRequestedOutput(name, binary_data=binary, class_count=4)],
    )
    (found,) = result.as_numpy(name).tolist()
    texts = [text.decode() if binary else text for text in found]
    values = photo_logits if name == "logits" else torch.softmax(photo_logits, dim=1)
    for text, index in zip(texts, values.topk(4).indices[0].tolist(), strict=True):
        value, place, label = text.split(":")
        assert (int(place), label) == (index, CATEGORIES[index])
        assert np.float32(value) == values[0, index].item()


def test_each_output_comes_in_its_own_form_and_the_order_asked_for(
    server: Server, reference: nn.Module, value: Tensor
) -> None:
    outputs = [
        {"name": "labels"},
        {"name": "logits", "parameters": {"binary_data": False}},
        {"name": "probabilities", "parameters": {"binary_data": True}},
    ]
    header, binary = ask(
        server, value, outputs=outputs, parameters={"binary_data_output": True, "top": 2}
    )
    labels, found, probabilities = header["outputs"]
    assert [labels["name"], found["name"], probabilities["name"]] == [
        "labels",
        "logits",
        "probabilities",
    ]
    expected = forward(reference, value)
    assert found["data"] == expected.flatten().tolist()
    assert set(found) == {"name", "datatype", "shape", "data"}
    size = labels["parameters"]["binary_data_size"]
    assert probabilities["parameters"] == {"binary_data_size": 4 * 2 * CLASSES}
    assert binary[size:] == torch.softmax(expected, dim=1).numpy().tobytes()
    (length,) = struct.unpack_from("<I", binary)
    best = int(expected[0].argmax())
    assert binary[4 : 4 + length].decode() == CATEGORIES[best]


def ask(server: Server, value: Tensor, **more: Any) -> tuple[dict[str, Any], bytes]:
    """Sends the value as binary data; the answer's JSON object and what follows it."""
    response = send(server, [described(value)], value.numpy().tobytes(), **more)
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == "application/octet-stream"
    length = int(response.headers[LENGTH])
    return json.loads(response.content[:length]), response.content[length:]


def described(value: Tensor, size: Any = None, **more: Any) -> dict[str, Any]:
    parameters = {"binary_data_size": 4 * value.numel() if size is None else size}
    shape = list(value.shape)
    return {"name": "input", "shape": shape, "datatype": "FP32", "parameters": parameters, **more}


def send(
    server: Server,
    inputs: list[dict[str, Any]],
    binary: bytes,
    path: str = PATH,
    length: str | None = None,
    **more: Any,
) -> httpx.Response:
    header = json.dumps({"inputs": inputs, **more}).encode()
    response: httpx.Response = server.client.post(
        path,
        content=header + binary,
        headers={
            LENGTH: str(len(header)) if length is None else length,
            "Content-Type": "application/octet-stream",
        },
    )
    return response


def test_a_body_of_nothing_but_a_tensor_gets_every_output_as_binary_data(
    server: Server, reference: nn.Module, value: Tensor
) -> None:
    body = value[:1].numpy().tobytes()
    response = server.client.post(PATH, content=body, headers={LENGTH: "0"})
    result = InferResult.from_response_body(
        response.content, header_length=response.headers[LENGTH]
    )
    assert torch.equal(logits(result), forward(reference, value[:1]))
    outputs = result.get_response()["outputs"]
    assert [output["name"] for output in outputs] == ["logits", "probabilities", "labels"]
    assert all("binary_data_size" in output["parameters"] for output in outputs)


def test_an_answer_in_json_only_has_no_header_of_the_extension(
    server: Server, value: Tensor
) -> None:
    response = send(server, [described(value)], value.numpy().tobytes())
    assert response.headers["Content-Type"] == "application/json"
    assert LENGTH not in response.headers


def test_numbers_that_are_not_finite_pass_as_binary_data_and_are_null_in_json(
    server: Server, client: Any
) -> None:
    value = torch.full((1, 3, 224, 224), torch.inf)
    assert logits(client.infer("resnet18", [given(value.numpy(), "FP32")])).isnan().all()
    response = send(server, [described(value)], value.numpy().tobytes())
    found = response.json()["outputs"][0]
    assert found["data"] == [None] * CLASSES
    assert found["parameters"] == {"finite": False}


def test_the_default_models_route_takes_the_same(
    server: Server, reference: nn.Module, value: Tensor
) -> None:
    outputs = [{"name": "logits"}]
    binary = send(
        server, [described(value)], value.numpy().tobytes(), path="/invocations", outputs=outputs
    )
    tensor = described(value, data=value.flatten().tolist(), parameters={})
    as_json = server.client.post("/invocations", json={"inputs": [tensor], "outputs": outputs})
    expected = forward(reference, value).flatten().tolist()
    assert binary.json()["outputs"][0]["data"] == expected
    assert as_json.json()["outputs"][0]["data"] == expected


@pytest.mark.parametrize(
    ("model", "version", "sentence"),
    [
        ("resnet50", "", "model 'resnet50' is not prepared; prepared are resnet18"),
        ("resnet18", "1", "model 'resnet18' has no version '1'"),
    ],
)
def test_the_client_is_told_what_there_is_not(
    client: Any, value: Tensor, model: str, version: str, sentence: str
) -> None:
    with pytest.raises(InferenceServerException, match=sentence) as raised:
        client.infer(model, [given(value.numpy(), "FP32")], model_version=version)
    assert raised.value.status() == "404"


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (lambda: given(np.zeros((1, 3, 224, 224), np.int8), "INT8"), "has datatype 'INT8'"),
        (lambda: given(np.zeros((1, 224, 224, 3), np.float32), "FP32"), "shape .1, 224, 224, 3."),
        (lambda: given(np.zeros((1, 3, 224, 224), np.uint8), "UINT8"), "height, width, 3"),
        (lambda: given(np.zeros((0, 3, 224, 224), np.float32), "FP32"), "n from 1"),
        (lambda: images(b"GET me a dog"), "image"),
        (lambda: images(b""), "empty"),
        (lambda: images(b"not base64!", binary=False), "element 1 of data .* in base64"),
        (lambda: given(np.zeros((60, 1, 1, 3), np.uint8), "UINT8"), "over the limit"),
    ],
)
def test_the_client_is_told_what_is_wrong_with_its_input(
    client: Any, tensor: Any, sentence: str
) -> None:
    with pytest.raises(InferenceServerException, match=sentence) as raised:
        client.infer("resnet18", [tensor()])
    assert raised.value.status() == "400"


def test_of_several_images_the_bad_one_is_named(client: Any, photo: Path) -> None:
    with pytest.raises(InferenceServerException, match="image 2 of 2: "):
        client.infer("resnet18", [images(photo.read_bytes(), b"GET me a dog")])


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (InferRequestedOutput("scores"), "output 'scores' is unknown"),
        (InferRequestedOutput("logits", class_count=-1), "'classification' is -1"),
        (InferRequestedOutput("labels", class_count=1), "'labels' has no classification"),
        (InferRequestedOutput("logits", binary_data=1), "'binary_data' is 1, expected true or"),
    ],
)
def test_the_client_is_told_what_is_wrong_with_its_outputs(
    client: Any, value: Tensor, output: Any, sentence: str
) -> None:
    with pytest.raises(InferenceServerException, match=sentence) as raised:
        client.infer("resnet18", [given(value.numpy(), "FP32")], outputs=[output])
    assert raised.value.status() == "400"


@pytest.mark.parametrize("binary", [True, False])
def test_a_compressed_request_is_the_same_request(
    client: Any, reference: nn.Module, value: Tensor, binary: bool
) -> None:
    tensor = given(value.numpy(), "FP32", binary=binary)
    result = client.infer("resnet18", [tensor], request_compression_algorithm="gzip")
    assert torch.equal(logits(result), forward(reference, value))


def test_shared_memory_is_refused_by_name(client: Any, value: Tensor) -> None:
    output = InferRequestedOutput("logits")
    output.set_shared_memory("region", 4000)
    with pytest.raises(InferenceServerException, match="asks for shared memory"):
        client.infer("resnet18", [given(value.numpy(), "FP32")], outputs=[output])
    tensor = InferInput("input", [1, 3, 224, 224], "FP32")
    tensor.set_shared_memory("region", 4 * VALUES)
    with pytest.raises(InferenceServerException, match="neither data nor binary_data_size"):
        client.infer("resnet18", [tensor])


SIZE: Final = 4 * VALUES


@pytest.mark.parametrize(
    ("size", "sent", "sentence"),
    [
        (SIZE - 1, SIZE, "1 bytes follow those that the inputs' binary_data_size tell of"),
        (SIZE + 1, SIZE, f"is {SIZE + 1}, but {SIZE} bytes are left"),
        (SIZE, SIZE - 1, f"is {SIZE}, but {SIZE - 1} bytes are left"),
        (SIZE, SIZE + 1, "1 bytes follow"),
        (SIZE - 4, SIZE - 4, f"is {SIZE - 4}, expected {SIZE} for FP32 of shape [1, 3, 224, 224]"),
        (0, 0, f"is 0, expected {SIZE}"),
        (-1, SIZE, "is -1, expected a number of bytes"),
        (1 << 63, SIZE, f"is {1 << 63}, but"),
        (float(SIZE), SIZE, "is 602112.0, expected a number of bytes"),
        (str(SIZE), SIZE, "is '602112', expected a number of bytes"),
        (True, SIZE, "is True, expected a number of bytes"),
    ],
)
def test_a_wrong_size_of_binary_data_is_named(
    server: Server, size: Any, sent: int, sentence: str
) -> None:
    tensor = described(torch.zeros(1, 3, 224, 224), size)
    refused(send(server, [tensor], bytes(sent)), sentence)


@pytest.mark.parametrize(
    ("length", "sentence"),
    [
        ("-1", f"{LENGTH} is '-1', expected a number up to the body's"),
        ("1.5", f"{LENGTH} is '1.5'"),
        ("ten", f"{LENGTH} is 'ten'"),
        ("", f"{LENGTH} is ''"),
        ("0x10", f"{LENGTH} is '0x10'"),
        ("9" * 5000, f"{LENGTH} is '999"),
        (str(1 << 63), f"{LENGTH} is '{1 << 63}'"),
        ("602400", f"{LENGTH} is '602400'"),
        ("5", "the body is not JSON"),
        ("600000", "the body is not JSON"),
        ("0", f"bytes, expected {4 * VALUES}: with {LENGTH} 0 it is an FP32 tensor"),
    ],
)
def test_a_wrong_length_of_the_json_object_is_named(
    server: Server, length: str, sentence: str
) -> None:
    tensor = described(torch.zeros(1, 3, 224, 224))
    refused(send(server, [tensor], bytes(SIZE), length=length), sentence)


def refused(response: httpx.Response, sentence: str) -> None:
    assert (response.status_code, sentence in response.json()["error"]) == (400, True), (
        response.text
    )
