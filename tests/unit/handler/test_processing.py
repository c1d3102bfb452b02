"""The user's decode and encode: what they raise, and what they do to the threads of the process."""

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from handler.cancellation import Cancellation
from handler.errors import InvalidInput, ModelFault
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.processing import OwnProcessing
from models.store import Store

DESCRIBED: dict[str, Any] = {"kind": "own", "content_type": None, "parameters": {}}


def nothing(*_: object) -> None: ...


def exiting(*_: object) -> None:
    sys.exit("enough")


def failing(*_: object) -> None:
    raise KeyError("absent")


@pytest.mark.parametrize(
    ("function", "reason"), [(exiting, "SystemExit: enough"), (failing, "KeyError: 'absent'")]
)
def test_whatever_it_raises_is_a_fault_that_names_it(
    function: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(ModelFault, match=rf"the processing mine\.py failed in decode: {reason}"):
        OwnProcessing("mine.py", function, nothing).decode(DESCRIBED, bytearray())
    with pytest.raises(ModelFault, match=rf"the processing mine\.py failed in encode: {reason}"):
        OwnProcessing("mine.py", nothing, function).encode(None)


def test_invalid_input_is_raised_as_it_is() -> None:
    def refusing(*_: object) -> None:
        raise InvalidInput("found none, expected one")

    with pytest.raises(InvalidInput, match=r"^found none, expected one$"):
        OwnProcessing("mine.py", refusing, nothing).decode(DESCRIBED, bytearray())


def test_threads_that_it_sets_are_put_back_and_those_it_leaves_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = threading.Event()
    before = torch.get_num_threads()

    def starting(*_: object) -> None:
        torch.set_num_threads(before + 1)
        threading.Thread(target=ended.wait, daemon=True).start()

    with caplog.at_level(logging.WARNING, "handler"):
        OwnProcessing("mine.py", starting, nothing).decode(DESCRIBED, bytearray())
        ended.set()
    assert torch.get_num_threads() == before
    assert [record.getMessage() for record in caplog.records] == [
        "decode of the processing mine.py changed torch's number of threads",
        "decode of the processing mine.py left threads running (1), which may slow the model down",
    ]


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    pipeline = Pipeline(retrievals=2)
    yield pipeline
    pipeline.close()


@pytest.mark.usefixtures("imports_are_undone")
@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ("torch.ones(1, 5)", "RuntimeError: "),
        ('{"pixels": 1}', "(Type|Attribute)Error: "),
    ],
)
def test_inputs_that_torchvisions_model_does_not_take_are_its_fault(
    store: Store,
    pipeline: Pipeline,
    tmp_path: Path,
    inputs: str,
    reason: str,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import torch\ndef decode(*_): return {inputs}\ndef encode(outputs, _): return 1\n"
    )
    handler = RequestHandler(store, pipeline, processing=str(file))
    header: dict[str, Any] = {
        "type": "infer",
        "id": "one",
        "model": "resnet18-safetensors",
        "version": None,
        "strategy": "cicada",
        "input": DESCRIBED,
        "outputs": [],
        "top": 5,
    }
    arrival_ns = time.monotonic_ns()
    with handler.handling(header, bytearray(), arrival_ns, Cancellation()) as (told, _):
        assert told["status"] == 500
        failed = f"model 'resnet18-safetensors': its forward failed on what the processing {file} gave it: "
        assert re.match(re.escape(failed) + reason, told["message"]), told["message"]
