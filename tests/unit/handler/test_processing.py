"""The user's decode and encode: what they raise, and what they do to the threads of the process."""

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from handler import openmp
from handler.cancellation import Cancellation
from handler.errors import InvalidInput, ModelFault
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.processing import OwnProcessing
from handler.steps import LayerStep
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
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    left = threading.Thread(target=ended.wait, daemon=True)
    before = torch.get_num_threads()

    def starting(*_: object) -> None:
        torch.set_num_threads(before + 1)
        left.start()

    # This test's thread alone: another test's may end meanwhile.
    monkeypatch.setattr(threading, "active_count", left.is_alive)
    with caplog.at_level(logging.WARNING, "handler"):
        OwnProcessing("mine.py", starting, nothing).decode(DESCRIBED, bytearray())
        ended.set()
    assert torch.get_num_threads() == before
    assert [record.getMessage() for record in caplog.records] == [
        "decode of the processing mine.py changed torch's number of threads",
        "decode of the processing mine.py left Python threads running (1), which may slow the model down",
    ]


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    pipeline = Pipeline(retrievals=2)
    yield pipeline
    pipeline.close()


def asked(store: Store, pipeline: Pipeline, processing: Path, inputs: str) -> dict[str, Any]:
    """What is told of a request on torchvision's model, whose inputs a processing makes."""
    processing.write_text(
        f"import torch\ndef decode(*_): return {inputs}\ndef encode(outputs, _): return 1\n"
    )
    handler = RequestHandler(store, pipeline, processing=str(processing))
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
    with handler.handling(header, bytearray(), time.monotonic_ns(), Cancellation()) as (told, _):
        return told


@pytest.mark.usefixtures("imports_are_undone")
@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ("torch.ones(1, 5)", "RuntimeError: "),
        ('{"pixels": 1}', "(Type|Attribute)Error: "),
    ],
)
def test_inputs_that_torchvisions_model_does_not_take_are_its_fault(
    store: Store, pipeline: Pipeline, tmp_path: Path, inputs: str, reason: str
) -> None:
    file = tmp_path / "mine.py"
    told = asked(store, pipeline, file, inputs)
    assert told["status"] == 500
    failed = (
        f"model 'resnet18-safetensors': its forward failed on what the processing {file} gave it: "
    )
    assert re.match(re.escape(failed) + reason, told["message"]), told["message"]


@pytest.mark.usefixtures("imports_are_undone")
def test_of_a_request_on_torchvisions_model_the_processing_alone_is_watched(
    store: Store, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    watched = openmp.watched

    def noting(what: str) -> AbstractContextManager[None]:
        noted.append(what)
        return watched(what)

    monkeypatch.setattr(openmp, "watched", noting)
    file = tmp_path / "mine.py"
    assert asked(store, pipeline, file, "torch.ones(1, 3, 224, 224)")["type"] == "result"
    name = f"the processing {file}"
    assert noted == [name, f"decode of {name}", f"encode of {name}"]


@pytest.mark.usefixtures("imports_are_undone")
def test_a_fault_of_another_unit_is_not_called_the_forwards(
    store: Store, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(LayerStep, "apply", failing)
    told = asked(store, pipeline, tmp_path / "mine.py", "torch.ones(1, 3, 224, 224)")
    assert told["status"] == 500
    assert told["message"] == "the handler failed: a fault of the service"
