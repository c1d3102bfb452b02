"""Whole requests on a small real model: every strategy and format, every error, and nothing left behind."""

import errno
import gc
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification

from handler import classification, handle, retrieval, wire
from handler.cancellation import Cancellation
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.retrieval import MappedFile, ReadFile
from handler.steps import LayerStep
from handler.strategies import STRATEGIES
from handler.timeline import UNITS
from models.store import PreparedModel, Store

Answer = tuple[dict[str, Any], bytes]

FORMATS: Final = ("safetensors", "pth")
DEADLINE_S: Final = 20
DAMAGED: Final = 4
"""The layer whose file the tests damage."""

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("weight_format", FORMATS)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    pipeline = Pipeline(retrievals=2)
    yield pipeline
    pipeline.close()


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged as a fault of the service. Kept from pytest's own log, which holds on to the frames."""
    logged: list[str] = []
    monkeypatch.setattr(handle.log, "filters", [lambda record: logged.append(record.getMessage())])
    return logged


@pytest.fixture
def handler(store: Store, pipeline: Pipeline) -> RequestHandler:
    return RequestHandler(store, pipeline)


def request(image: Tensor, **fields: Any) -> tuple[dict[str, Any], bytearray]:
    header = {
        "type": "infer",
        "id": "one",
        "model": "resnet18-safetensors",
        "version": None,
        "strategy": "cicada",
        "received_ns": time.monotonic_ns(),
        "input": {"kind": "tensor", "datatype": "FP32", "shape": list(image.shape)},
        "outputs": ["logits"],
        "top": 5,
    }
    return header | fields, bytearray(image.numpy().tobytes())


def answer(
    handler: RequestHandler,
    header: dict[str, Any],
    body: bytearray,
    cancellation: Cancellation | None = None,
) -> Answer:
    """The answer as it goes over the wire."""
    with handler.handling(header, body, time.monotonic_ns(), cancellation or Cancellation()) as (
        told,
        content,
    ):
        return json.loads(json.dumps(told)), content


def ask(handler: RequestHandler, image: Tensor, **fields: Any) -> Answer:
    return answer(handler, *request(image, **fields))


def logits(told: Answer) -> Tensor:
    header, body = told
    assert header["type"] == "result", header
    (output,) = header["outputs"]
    assert (output["name"], output["datatype"], output["bytes"]) == ("logits", "FP32", len(body))
    values = np.frombuffer(body, dtype="<f4").reshape(output["shape"])
    return torch.from_numpy(values.copy())


class Left:
    """What a request may leave behind: threads, open files, mappings of weight files."""

    def __init__(self) -> None:
        self.threads = {thread.name for thread in threading.enumerate()}
        self.tasks = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - nothing else is opened
        self.files = sorted(_links())
        self.mappings = sorted(
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith((".safetensors", ".pth"))
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Left) and vars(self) == vars(other)

    def __hash__(self) -> int:
        raise TypeError

    def __repr__(self) -> str:
        return f"{self.tasks} tasks, {self.files}, {self.mappings}"


def _links() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            yield str(descriptor.readlink())
        except FileNotFoundError:  # the listing's own
            continue


def settles_to(before: Left) -> bool:
    """Whether threads, files and mappings are as before; a unit may still be on its way back to sleep."""
    deadline = time.monotonic() + DEADLINE_S
    while (now := Left()) != before:
        if time.monotonic() > deadline:
            print(f"before: {before}\nnow: {now}")
            return False
        time.sleep(0.001)
    return True


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What is let go must go without the cycle collector: a mapping that waits for it lingers."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@each_format
@each_strategy
def test_the_logits_are_torchvisions_bit_for_bit_and_nothing_is_kept(
    handler: RequestHandler,
    image: Tensor,
    expected: Tensor,
    strategy: str,
    weight_format: str,
) -> None:
    model = f"resnet18-{weight_format}"
    ask(handler, image, model=model, strategy=strategy)
    before = Left()
    assert before.mappings == []
    for _ in range(3):
        assert torch.equal(logits(ask(handler, image, model=model, strategy=strategy)), expected)
        assert settles_to(before)


def test_a_batch_is_torchvisions_too(handler: RequestHandler, resnet18: nn.Module) -> None:
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = resnet18(images)
    assert torch.equal(logits(ask(handler, images)), expected)


def test_an_image_is_preprocessed_as_torchvisions_preset_does(
    handler: RequestHandler, resnet18: nn.Module, photo: Path, store: Store
) -> None:
    spec = store.open("resnet18-safetensors").manifest.input
    assert spec is not None
    preset = ImageClassification(crop_size=spec.crop, resize_size=spec.resize)
    with torch.inference_mode(), Image.open(photo) as opened:
        expected = torch.softmax(resnet18(preset(opened.convert("RGB"))[None]), dim=1)[0]
    header, _ = request(
        torch.zeros(1), input={"kind": "image"}, outputs=["labels", "probabilities"], top=3
    )

    told, body = answer(handler, header, bytearray(photo.read_bytes()))

    found = torch.from_numpy(np.frombuffer(body, dtype="<f4").copy())
    assert torch.equal(found, expected)
    assert [output["name"] for output in told["outputs"]] == ["probabilities"]
    (labels,) = told["labels"]
    values, indices = found.topk(3)
    assert [label["index"] for label in labels] == indices.tolist()
    assert [label["probability"] for label in labels] == pytest.approx(values.tolist())
    assert [label["label"] for label in labels] == [str(index) for index in indices.tolist()]


def test_outputs_come_in_the_order_of_their_description(
    handler: RequestHandler, image: Tensor, expected: Tensor
) -> None:
    told, body = ask(handler, image, outputs=["probabilities", "logits"], top=99)
    assert [output["shape"] for output in told["outputs"]] == [[1, 10], [1, 10]]
    assert told["labels"] is None
    parts = {}
    for output in told["outputs"]:
        parts[output["name"]], body = body[: output["bytes"]], body[output["bytes"] :]
    assert body == b""
    found = {name: np.frombuffer(part, dtype="<f4") for name, part in parts.items()}
    assert np.array_equal(found["logits"], expected.numpy()[0])
    assert np.array_equal(found["probabilities"], torch.softmax(expected, dim=1).numpy()[0])


def test_more_labels_than_classes_are_all_classes(handler: RequestHandler, image: Tensor) -> None:
    told, _ = ask(handler, image, outputs=["labels"], top=99)
    assert told["outputs"] == []
    assert sorted(label["index"] for label in told["labels"][0]) == list(range(10))


@each_format
@each_strategy
def test_the_timeline_of_a_real_request_keeps_the_invariants(
    handler: RequestHandler, image: Tensor, store: Store, strategy: str, weight_format: str
) -> None:
    model = store.open(f"resnet18-{weight_format}")
    told, _ = ask(handler, image, model=model.name, strategy=strategy)

    timeline, figures = told["timeline"], told["timeline"]["figures"]
    assert (timeline["strategy"], timeline["model"]) == (strategy, model.name)
    assert timeline["version"] == told["version"] == model.version
    assert timeline["layers"] == [layer.name for layer in model.manifest.layers]
    assert figures["layers"] == len(timeline["layers"]) == 14
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for layer, kind, start, end in timeline["spans"]:
        assert start <= end
        assert (kind, layer) not in spans, "a layer takes each step once"
        spans[kind, layer] = start, end

    weighted = {entry.index for entry in model.manifest.layers if entry.file is not None}
    every = set(range(len(timeline["layers"])))
    by_kind = {
        kind: {layer for found, layer in spans if found == kind}
        for kind in ("construct", "initialize", "retrieve", "apply", "execute")
    }
    assert by_kind == {
        "construct": every,
        "initialize": every if STRATEGIES[strategy].initialize else set(),
        "retrieve": weighted,
        "apply": weighted,
        "execute": every,
    }
    last = "initialize" if STRATEGIES[strategy].initialize else "construct"
    for layer in weighted:
        assert spans["apply", layer][0] >= spans[last, layer][1], "A after L"
        assert spans["apply", layer][0] >= spans["retrieve", layer][1], "A after W"
        assert spans["execute", layer][0] >= spans["apply", layer][1], "E after A"
    for layer in every:
        assert spans["execute", layer][0] >= spans[last, layer][1]
        if layer:
            assert spans["execute", layer][0] >= spans["execute", layer - 1][1], "E in turn"
    assert_units_do_one_thing_at_a_time(spans, in_line=not STRATEGIES[strategy].decoupled)
    assert 0 < figures["utilization"] <= figures["occupancy"] <= 1
    for unit in UNITS:
        work, idle = figures["work_ms"][unit], figures["idle_ms"][unit]
        assert 0 < work <= figures["pipeline_ms"]
        assert idle >= 0
        assert work + idle <= figures["pipeline_ms"] + 1e-6
        assert figures["wait_ms"][unit] >= 0
    assert timeline["decoded_ns"][0] >= timeline["arrival_ns"]


def assert_units_do_one_thing_at_a_time(
    spans: dict[tuple[str, int], tuple[int, int]], *, in_line: bool
) -> None:
    weight = ("retrieve", "apply") if in_line else ("apply",)
    for kinds in (("construct", "initialize"), weight, ("execute",)):
        own = sorted(span for (kind, _), span in spans.items() if kind in kinds)
        for (_, end), (start, _) in itertools.pairwise(own):
            assert start >= end, kinds


@each_format
def test_placeholders_are_a_thirty_second_of_the_parameters(
    handler: RequestHandler, image: Tensor, resnet18: nn.Module, weight_format: str
) -> None:
    held = {
        strategy: ask(handler, image, strategy=strategy, model=f"resnet18-{weight_format}")[0][
            "timeline"
        ]["placeholder_bytes"]
        for strategy in STRATEGIES
    }
    parameters = list(resnet18.parameters())
    full = sum(4 * parameter.numel() for parameter in parameters)
    bits = sum((parameter.numel() + 7) // 8 for parameter in parameters)
    assert held == {
        "traditional": full,
        "pisel": full,
        "mini": bits,
        "preload": full,
        "cicada": bits,
    }


@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"model": "resnet19"}, 404, "there is no model 'resnet19'"),
        ({"model": "../etc"}, 404, "there is no model"),
        ({"version": "0" * 12}, 404, "no version '000000000000'"),
        ({"version": "../../x"}, 404, "no version"),
        ({"strategy": "fast"}, 404, "there is no strategy 'fast': known are traditional, pisel"),
        ({"input": {"kind": "image"}}, 400, "not an image"),
        ({"input": {"kind": "sound"}}, 400, "'sound'"),
        (
            {"input": {"kind": "tensor", "datatype": "FP32", "shape": [1, 3, 32, 32]}},
            400,
            r"expected [n, 3, 64, 64]",
        ),
        (
            {"input": {"kind": "tensor", "datatype": "FP32", "shape": [2, 3, 64, 64]}},
            400,
            "49152 bytes, expected 98304",
        ),
        (
            {"input": {"kind": "tensor", "datatype": "INT8", "shape": [1, 3, 64, 64]}},
            400,
            "datatype 'INT8', expected",
        ),
    ],
)
@pytest.mark.usefixtures("_no_collector")
def test_a_bad_request_gets_one_sentence_and_leaves_nothing(
    handler: RequestHandler,
    image: Tensor,
    expected: Tensor,
    fields: dict[str, Any],
    status: int,
    told: str,
) -> None:
    ask(handler, image)
    before = Left()
    error, body = ask(handler, image, **fields)
    assert (error["type"], error["id"], error["status"], body) == ("error", "one", status, b"")
    assert told in error["message"]
    assert "\n" not in error["message"]
    assert settles_to(before)
    assert torch.equal(logits(ask(handler, image)), expected)


@pytest.fixture(params=FORMATS)
def damaged(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path, pipeline: Pipeline
) -> tuple[RequestHandler, PreparedModel]:
    """A handler on a store of its own, which the test may damage."""
    copied = tmp_path / "weights"
    shutil.copytree(store.root, copied, symlinks=True, copy_function=_copy_or_link)
    own = Store(copied)
    return RequestHandler(own, pipeline), own.open(f"resnet18-{request.param}")


def _copy_or_link(source: str, target: str) -> None:
    """A copy of what the tests change, links to the rest: a model is 46 MB."""
    if Path(source).name.startswith(("manifest", f"{DAMAGED:03d}-")):
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def _manifest_changed(model: PreparedModel) -> None:
    path = model.path / "manifest.json"
    path.write_text(path.read_text().replace('"resnet18"', '"resnet34"'))


def _manifest_cut(model: PreparedModel) -> None:
    path = model.path / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])


def _manifest_gone(model: PreparedModel) -> None:
    (model.path / "manifest.json").unlink()


def _file_cut(model: PreparedModel) -> None:
    path = model.path / str(model.manifest.layers[DAMAGED].file)
    os.truncate(path, 100)


def _file_gone(model: PreparedModel) -> None:
    (model.path / str(model.manifest.layers[DAMAGED].file)).unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_manifest_changed, "manifest.json"),
        (_manifest_cut, "manifest.json"),
        (_manifest_gone, "manifest.json"),
        (_file_cut, "004-layer1.0.*has 100 bytes, expected"),
        (_file_gone, "004-layer1.0.*No such file"),
    ],
)
@each_strategy
def test_a_damaged_model_gets_one_sentence_that_names_the_file(
    damaged: tuple[RequestHandler, PreparedModel],
    damage: Callable[[PreparedModel], None],
    told: str,
    strategy: str,
    image: Tensor,
) -> None:
    handler, model = damaged
    before = Left()
    damage(model)

    error, _ = ask(handler, image, model=model.name, strategy=strategy)

    assert (error["type"], error["status"]) == ("error", 500)
    assert error["message"].startswith(f"model '{model.name}'")
    assert re.search(told, error["message"]), error["message"]
    assert settles_to(before)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("damaged", ["pth"], indirect=True)
@each_strategy
def test_a_file_of_rubbish_of_the_right_size_is_named(
    damaged: tuple[RequestHandler, PreparedModel], strategy: str, image: Tensor
) -> None:
    """A `pth` file: what bytes a mapped file holds is for `verify`, each value is a valid one."""
    handler, model = damaged
    path = model.path / str(model.manifest.layers[DAMAGED].file)
    path.write_bytes(b"\xff" * path.stat().st_size)
    before = Left()

    error, _ = ask(handler, image, model=model.name, strategy=strategy)

    assert error["status"] == 500
    assert path.name in error["message"]
    assert "no sound file of tensors" in error["message"]
    assert settles_to(before)


@pytest.mark.usefixtures("_no_collector")
@each_strategy
def test_a_file_cut_short_after_it_was_opened_is_named(
    damaged: tuple[RequestHandler, PreparedModel],
    strategy: str,
    image: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, model = damaged
    path = model.path / str(model.manifest.layers[DAMAGED].file)
    before = Left()
    retrieval = LayerStep.retrieval

    def cutting(step: LayerStep, **options: Any) -> Any:
        if path.stat().st_size != 100:
            os.truncate(path, 100)
        return retrieval(step, **options)

    monkeypatch.setattr(LayerStep, "retrieval", cutting)
    error, _ = ask(handler, image, model=model.name, strategy=strategy)

    assert (error["type"], error["status"]) == ("error", 500)
    assert path.name in error["message"]
    assert "ends after 100 of" in error["message"]
    assert settles_to(before)


def test_a_model_prepared_anew_between_opening_and_files_is_opened_again(
    damaged: tuple[RequestHandler, PreparedModel],
    image: Tensor,
    expected: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, model = damaged
    store = handler._store
    kept = model.path.with_name("kept")
    opens = 0
    opening = Store.open

    def removing_once(self: Store, name: str, version: str | None = None) -> PreparedModel:
        nonlocal opens
        opens += 1
        opened = opening(self, name, version)
        if opens == 1:
            model.path.rename(kept)
        else:
            assert opens == 2
        return opened

    def restoring(self: Store, name: str, version: str | None = None) -> PreparedModel:
        if opens == 1:
            kept.rename(model.path)
        return removing_once(self, name, version)

    monkeypatch.setattr(Store, "open", restoring)
    assert store is handler._store
    assert torch.equal(logits(ask(handler, image, model=model.name)), expected)
    assert opens == 2


def test_a_model_that_is_removed_at_every_try_is_unknown(
    damaged: tuple[RequestHandler, PreparedModel], image: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, model = damaged
    shutil.rmtree(model.path)
    monkeypatch.setattr(Store, "open", lambda *_: model)
    error, _ = ask(handler, image, model=model.name)
    assert error["status"] == 404
    assert f"{model.name!r} was removed" in error["message"]


class Injected(Exception):
    pass


FIRST, MIDDLE, LAST = 0, 6, 13


class Injection:
    """Raises at a step of one layer; counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: str, layer: int) -> None:
        self.raised = 0
        if step == "retrieve":
            self._patch_files(monkeypatch, layer)
        else:
            self._patch_step(monkeypatch, step, layer)

    def fail(self) -> None:
        self.raised += 1
        raise Injected("a\nb")

    def _patch_step(self, monkeypatch: pytest.MonkeyPatch, step: str, layer: int) -> None:
        method = getattr(LayerStep, step)

        def failing(own: LayerStep, *arguments: Any, **options: Any) -> Any:
            if own._planned.entry.index == layer:
                self.fail()
            return method(own, *arguments, **options)

        monkeypatch.setattr(LayerStep, step, failing)

    def _patch_files(self, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
        opening = LayerStep.retrieval
        chosen: set[int] = set()

        def choosing(own: LayerStep, **options: Any) -> Any:
            file = opening(own, **options)
            if own._planned.entry.index == layer:
                chosen.add(own._files.descriptor(layer))
            return file

        monkeypatch.setattr(LayerStep, "retrieval", choosing)
        for kind in (MappedFile, ReadFile):
            monkeypatch.setattr(kind, "step", self._failing_step(kind.step, chosen))

    def _failing_step(self, step: Callable[[Any], bool], chosen: set[int]) -> Callable[[Any], bool]:
        def failing(file: Any) -> bool:
            more = step(file)
            if file._descriptor in chosen:
                self.fail()
            return more

        return failing


INJECTIONS: Final = [
    *itertools.product(
        ["safetensors"],
        ["construct", "initialize", "retrieval", "retrieve", "apply", "execute"],
        [FIRST, MIDDLE, LAST],
    ),
    *itertools.product(["pth"], ["retrieve", "apply"], [MIDDLE]),
]
"""Into which format's request, at which step, of which layer. Formats differ in W and A alone."""


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(("weight_format", "step", "layer"), INJECTIONS)
@each_strategy
def test_an_error_at_any_step_is_one_clear_answer_and_the_next_request_does_not_notice(
    handler: RequestHandler,
    image: Tensor,
    expected: Tensor,
    strategy: str,
    weight_format: str,
    step: str,
    layer: int,
    faults: list[str],
) -> None:
    model = f"resnet18-{weight_format}"
    before = Left()
    with pytest.MonkeyPatch.context() as patch:
        injection = Injection(patch, step, layer)
        told = ask(handler, image, model=model, strategy=strategy)

    if step == "initialize" and not STRATEGIES[strategy].initialize:
        assert injection.raised == 0
        assert torch.equal(logits(told), expected)
    else:
        assert injection.raised == 1
        assert len(faults) == 1, "logged once, with its traceback"
        error, body = told
        assert body == b""
        assert error == {
            "type": "error",
            "id": "one",
            "status": 500,
            "message": "the handler failed: a fault of the service",
        }
    assert settles_to(before)
    assert torch.equal(logits(ask(handler, image, model=model, strategy=strategy)), expected)
    assert settles_to(before)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("step", ["construct", "apply", "execute"])
@each_strategy
def test_a_request_whose_caller_has_gone_stops_early_and_is_answered_499(
    handler: RequestHandler,
    image: Tensor,
    expected: Tensor,
    strategy: str,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Left()
    cancellation, attached = Cancellation(), threading.Event()
    executed: list[int] = []
    attach, method, execute = Cancellation.attach, getattr(LayerStep, step), LayerStep.execute

    def attaching(own: Cancellation, stop: Callable[[], None]) -> None:
        attach(own, stop)
        attached.set()

    def noting(own: LayerStep, value: Any) -> Any:
        executed.append(own._planned.entry.index)
        return execute(own, value)

    def cancelling(own: LayerStep, *arguments: Any) -> Any:
        if own._planned.entry.index == MIDDLE:
            assert attached.wait(DEADLINE_S)
            cancellation.cancel()
        return method(own, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Cancellation, "attach", attaching)
        patch.setattr(LayerStep, "execute", noting)
        method = getattr(LayerStep, step)
        patch.setattr(LayerStep, step, cancelling)
        header, body = request(image, strategy=strategy)
        error, _ = answer(handler, header, body, cancellation)

    assert (error["type"], error["status"]) == ("error", 499)
    assert max(executed, default=0) <= MIDDLE
    assert settles_to(before)
    assert torch.equal(logits(ask(handler, image, strategy=strategy)), expected)


def _too_much_of_torch() -> Tensor:
    return torch.empty(1 << 50)


def _too_much_of_python() -> bytearray:
    return bytearray(1 << 60)


@pytest.mark.parametrize("take", [_too_much_of_torch, _too_much_of_python])
def test_a_request_that_finds_no_memory_is_answered_503(
    handler: RequestHandler,
    image: Tensor,
    expected: Tensor,
    take: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LayerStep, "execute", lambda *_: take())
        error, _ = ask(handler, image)
    assert (error["type"], error["status"]) == ("error", 503)
    assert error["message"] == "the handler found no memory for the request"
    assert torch.equal(logits(ask(handler, image)), expected)


@each_strategy
def test_a_request_cancelled_before_it_began_executes_nothing(
    handler: RequestHandler, image: Tensor, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LayerStep, "execute", lambda *_: pytest.fail("a layer of a cancelled request ran")
    )
    cancellation = Cancellation()
    cancellation.cancel()
    error, _ = answer(handler, *request(image, strategy=strategy), cancellation)
    assert error["status"] == 499


def test_durations_are_recorded_from_request_to_request(
    handler: RequestHandler, image: Tensor, store: Store
) -> None:
    model = store.open("resnet18-safetensors")
    sizes = [entry.bytes for entry in model.manifest.layers]
    durations = handler._durations.of(str(model.path), sizes)
    before = [durations.retrieval_ns(layer) for layer in range(len(sizes))]
    ask(handler, image)
    after = [durations.retrieval_ns(layer) for layer in range(len(sizes))]
    changed = {
        layer for layer, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) > 1
    }
    assert changed == {entry.index for entry in model.manifest.layers if entry.file is not None}


def test_the_result_fits_into_a_frame(handler: RequestHandler, image: Tensor) -> None:
    told, body = ask(handler, image, outputs=["logits", "labels"])
    assert len(wire._encode(told, len(body))) < wire.MAX_HEADER_BYTES


def built_ahead(handler: RequestHandler, store: Store) -> list[Any]:
    plan = handler._plans.of(store.open("resnet18-safetensors"))
    return [planned.layer._ahead._made for planned in plan.layers]


@pytest.mark.parametrize("strategy", ["cicada", "traditional"])
def test_the_next_requests_modules_are_built_once_the_answer_is_sent_without_weights(
    handler: RequestHandler, image: Tensor, store: Store, strategy: str
) -> None:
    header, body = request(image, strategy=strategy)
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()):
        assert not any(built_ahead(handler, store))
    first = built_ahead(handler, store)
    assert all(first)
    for contents in first:
        assert {t.untyped_storage().nbytes() for t in contents.placeholders} <= {0}
        tables = contents.structure.tables
        assert {tensor for table in tables for tensor in table.values()} <= {None}
    ask(handler, image, strategy=strategy)
    second = built_ahead(handler, store)
    assert not {id(made) for made in first} & {id(made) for made in second}


def test_what_there_is_no_memory_for_ahead_is_left_to_the_request(
    handler: RequestHandler, image: Tensor, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    def refused(_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        header, body = request(image)
        with handler.handling(header, body, time.monotonic_ns(), Cancellation()) as (told, _):
            assert told["type"] == "result"
            patched.setattr(retrieval, "AddressSpace", refused)
        error, _ = ask(handler, image)
        assert error["status"] == 503
        assert error["message"] == "the handler found no memory for the request"
    assert ask(handler, image)[0]["type"] == "result"
    assert faults == ["a request failed"]


@pytest.mark.parametrize(
    ("in_memory", "decoding_ns", "order"),
    [
        (False, {"tensor": 0}, ["begin", "decode"]),
        (True, {"tensor": 0, "image": 10**8}, ["decode", "begin"]),
        (True, {"tensor": 10**8}, ["begin", "decode"]),
        (True, {"image": 0}, ["begin", "decode"]),
    ],
)
def test_loading_begins_after_decoding_only_where_neither_takes_long(
    handler: RequestHandler,
    image: Tensor,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    order: list[str],
    decoding_ns: dict[str, int],
    *,
    in_memory: bool,
) -> None:
    model = store.open("resnet18-safetensors")
    durations = handler._durations.of(
        str(model.path), [entry.bytes for entry in model.manifest.layers]
    )
    durations.in_memory, durations.decoding_ns = in_memory, dict(decoding_ns)
    log: list[str] = []
    begin, decode = Pipeline.begin, classification.ImageClassification.decode

    def beginning(*arguments: Any) -> Any:
        log.append("begin")
        return begin(*arguments)

    def decoding(*arguments: Any) -> Any:
        log.append("decode")
        return decode(*arguments)

    monkeypatch.setattr(Pipeline, "begin", beginning)
    monkeypatch.setattr(classification.ImageClassification, "decode", decoding)
    told, _ = ask(handler, image)

    assert log == order
    start, end = told["timeline"]["decoded_ns"]
    assert durations.decoding_ns == decoding_ns | {"tensor": end - start}


def test_of_a_model_that_is_expected_the_modules_are_there_ahead(
    handler: RequestHandler, store: Store
) -> None:
    handler.expect("resnet18-safetensors")
    assert all(built_ahead(handler, store))
    assert placed_ahead(handler, store) == {False}, "addresses are left to the threads that start"


def test_the_next_requests_addresses_are_reserved_once_the_answer_is_sent(
    handler: RequestHandler, image: Tensor, store: Store
) -> None:
    header, body = request(image)
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()):
        assert placed_ahead(handler, store) == {False}
    assert placed_ahead(handler, store) == {True}
    ask(handler, image, model="resnet18-pth")
    plan = handler._plans.of(store.open("resnet18-pth"))
    assert {planned.layout for planned in plan.layers} == {None}


def test_what_fails_ahead_is_the_next_requests_and_told(
    handler: RequestHandler, image: Tensor, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    def fail(_: object) -> None:
        raise ValueError("no such layout")

    with monkeypatch.context() as patched:
        header, body = request(image)
        with handler.handling(header, body, time.monotonic_ns(), Cancellation()):
            patched.setattr(retrieval.FileLayout, "_placed", fail)
        assert ask(handler, image)[0]["status"] == 500
    assert ask(handler, image)[0]["type"] == "result"
    assert faults == ["a request failed"]


def placed_ahead(handler: RequestHandler, store: Store) -> set[bool]:
    plan = handler._plans.of(store.open("resnet18-safetensors"))
    layouts = (planned.layout for planned in plan.layers if planned.layout is not None)
    return {layout._ahead._made is not None for layout in layouts}
