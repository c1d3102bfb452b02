"""`/models` and `/strategies` tell what is in the store and what may be asked for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.strategies import STRATEGIES
from models.store import Store

ServeStubs = Callable[..., Any]
PrepareTiny = Callable[..., str]


@pytest.fixture
def service(serve_stubs: ServeStubs, prepare_tiny: PrepareTiny, tmp_path: Path) -> Iterator[Any]:
    prepare_tiny(tmp_path / "weights")
    running = serve_stubs(CICADA_WEIGHTS=str(tmp_path / "weights"), CICADA_STRATEGY="mini")
    yield running
    running.close()


def models(service: Any) -> dict[str, Any]:
    shown: dict[str, Any] = service.client.get("/models").json()
    return shown


def test_a_real_model_is_told_as_it_was_prepared(server: Any, weights: Path) -> None:
    model = Store(weights).open("resnet18")
    assert model.manifest.input is not None
    (listed,) = models(server)["models"]
    assert listed == {
        "name": "resnet18",
        "version": model.version,
        "versions": [model.version],
        "architecture": "resnet18",
        "granularity": "block",
        "format": "safetensors",
        "classes": 1000,
        "side": 224,
        "layers": len(model.manifest.layers),
        "bytes": sum(file.stat().st_size for file in model.path.glob("*.safetensors")),
        "parameters": 11_689_512,  # torchvision's documentation of ResNet18_Weights
        "dtype": model.manifest.dtype,
        "source": "random:0",
        "execution": "as torchvision's, bit for bit",
        "preset": "IMAGENET1K_V1",
        "input": model.manifest.input.model_dump(mode="json"),
    }
    whole = server.client.get("/models/resnet18").json()
    assert {name: whole[name] for name in listed} == listed
    assert [layer["index"] for layer in whole["contents"]] == list(range(listed["layers"]))
    assert sum(layer["bytes"] for layer in whole["contents"]) == listed["bytes"]
    assert sum(layer["parameters"] for layer in whole["contents"]) == listed["parameters"]
    assert whole["labels"] == list(model.labels or ())


def test_a_model_prepared_anew_has_a_version_before(
    service: Any, prepare_tiny: PrepareTiny, tmp_path: Path
) -> None:
    before = models(service)["models"][0]["version"]
    now = prepare_tiny(tmp_path / "weights", "tiny", "stage")
    (shown,) = models(service)["models"]
    assert (shown["version"], shown["versions"]) == (now, [now, before])


def test_the_default_is_the_only_one(
    service: Any, prepare_tiny: PrepareTiny, tmp_path: Path
) -> None:
    assert models(service)["default"] == "tiny"
    prepare_tiny(tmp_path / "weights", "other")
    assert models(service)["default"] is None
    assert [model["name"] for model in models(service)["models"]] == ["other", "tiny"]


def test_a_damaged_model_is_told_with_its_fault(service: Any, tmp_path: Path) -> None:
    (tmp_path / "weights" / "tiny" / "manifest.json").write_text("{")
    shown = models(service)
    assert shown["models"] == []
    ((name, fault),) = [tuple(damaged.values()) for damaged in shown["damaged"]]
    assert name == "tiny"
    assert "manifest.json" in fault


def test_a_model_that_is_not_there_is_404(service: Any) -> None:
    answer = service.client.get("/models/huge")
    assert answer.status_code == 404
    assert "'huge' is not prepared" in answer.json()["error"]


def test_the_strategies_are_those_that_requests_may_name(service: Any) -> None:
    shown = service.client.get("/strategies").json()
    assert [strategy["name"] for strategy in shown["strategies"]] == list(STRATEGIES)
    assert shown["default"] == "mini"
    for strategy in shown["strategies"]:
        headers = {"Cicada-Strategy": strategy["name"]}
        answer = service.client.post("/predictions/tiny", content=b"image", headers=headers)
        assert answer.status_code == 200
