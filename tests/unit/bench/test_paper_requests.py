"""What is read of a request's timeline, and in which order models are asked."""

from collections import Counter
from typing import Any

import pytest

from bench.paper import requests
from bench.paper.choices import Choices
from bench.replay import assignment
from bench.replay.synthetic import Shape
from bench.replay.trace import Arrival, Window
from handler.timeline import Timeline

MS = 1_000_000


def timeline(*spans: tuple[int, Any, int, int], layers: int = 2) -> Timeline:
    made = Timeline([f"layer{n}" for n in range(layers)], decoupled=False, arrival_ns=0)
    for layer, kind, start, end in spans:
        made.record(layer, kind, start * MS, end * MS)
    return made


PISEL = timeline(
    (0, "construct", 0, 1),
    (0, "initialize", 1, 11),
    (0, "retrieve", 11, 14),
    (0, "apply", 14, 15),
    (0, "execute", 15, 20),
    (1, "construct", 11, 12),
    (1, "initialize", 12, 32),
    (1, "retrieve", 32, 36),
    (1, "apply", 36, 37),
    (1, "execute", 38, 40),
)


def test_exposed_time_is_that_in_which_nothing_else_ran() -> None:
    assert requests.exposed(PISEL) == {
        "construct": 1.0,
        "initialize": 10.0 + 12.0,  # 1 to 11, and 20 to 32, when layer 0 had been executed
        "retrieve": 4.0,
        "apply": 1.0,
        "execute": 2.0,
    }


def test_layers_have_their_own_times_and_waits() -> None:
    first, second = requests.layers(PISEL)
    assert first["layer"] == "layer0"
    assert (first["initialize_ms"], first["retrieve_ms"], first["execute_ms"]) == (10, 3, 5)
    assert (first["weight_wait_ms"], first["compute_wait_ms"]) == (0, 0)
    assert (second["weight_wait_ms"], second["compute_wait_ms"]) == (0, 1)
    figures = PISEL.figures()
    for unit in ("weight", "compute"):
        waits = sum(row[f"{unit}_wait_ms"] for row in (first, second))
        assert waits == pytest.approx(getattr(figures.wait_ms, unit))


def test_a_timeline_is_read_as_the_service_shows_it() -> None:
    shown = {
        "strategy": "cicada",
        "layers": ["a"],
        "spans": [
            {"layer": 0, "kind": "construct", "start_ms": 1.25, "end_ms": 1.5},
            {"layer": 0, "kind": "execute", "start_ms": 2.0, "end_ms": 4.000001},
        ],
    }
    read = requests.timeline_of(shown)
    assert read.decoupled
    assert [(span.start_ns, span.end_ns) for span in read.spans] == [
        (1_250_000, 1_500_000),
        (2_000_000, 4_000_001),
    ]


MODELS = ["resnet50", "vgg16", "vit_b_16"]


def choices(rounds: int) -> Choices:
    return Choices(
        models=MODELS,
        rounds=rounds,
        threads=1,
        trace=None,
        window=Window(1, 0, 60),
        shape=Shape(),
        seed=0,
        replay_strategies=[],
        replay_minutes=1,
        replay_speedup=1.0,
        density_models=[],
        memory_limit=1,
        cold_models=[],
        cold_rounds=1,
        disk_bytes_per_s=1,
    )


def function_of(model: str) -> str:
    return next(
        name
        for name in (f"app/{number}" for number in range(100))
        if assignment.model_of(name, MODELS, 0) == model
    )


def test_models_are_asked_in_the_trace_s_order_each_as_often_as_there_are_rounds() -> None:
    asked = ["vgg16", "vgg16", "resnet50", "vgg16"]
    arrivals = [Arrival(float(n), function_of(model)) for n, model in enumerate(asked)]
    planned = requests.planned(choices(rounds=2), arrivals)
    assert [model for _, model in planned][:3] == ["vgg16", "vgg16", "resnet50"]
    assert Counter(model for _, model in planned) == dict.fromkeys(MODELS, 2)
    assert len({step for step, _ in planned}) == len(planned)
    assert planned[0][0] == "vgg16, round 1"


def test_more_rounds_only_add_steps() -> None:
    arrivals = [Arrival(float(n), f"app/{n % 7}") for n in range(20)]
    few = {step for step, _ in requests.planned(choices(rounds=1), arrivals)}
    assert few < {step for step, _ in requests.planned(choices(rounds=3), arrivals)}
