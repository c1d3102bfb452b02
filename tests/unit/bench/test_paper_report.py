"""The report of measurements that the test makes up: its figures follow by hand, and its page is whole."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench import environment
from bench.paper import cold, comparison, latency, published, report, requests, units
from bench.paper.choices import OURS, PAPERS, SETUPS, Choices, Run
from bench.paper.material import Material
from bench.replay.synthetic import Shape
from bench.replay.trace import Arrival, Window
from handler.strategies import STRATEGIES
from handler.timeline import Timeline

MS = 1_000_000
MODELS = ("resnet50", "vgg11", "vit_l_16")
INITIALIZE, RETRIEVE, APPLY, EXECUTE = 60, 20, 4, 16
"""What each of two layers takes, milliseconds; instantiation takes 1."""


def timeline(strategy: str) -> Timeline:
    """Layers one after another, retrieval before everything where it is asynchronous."""
    kind = STRATEGIES[strategy]
    made = Timeline(["first", "second"], decoupled=kind.decoupled, arrival_ns=0)
    now = 0

    def run(layer: int, what: Any, length: int) -> None:
        nonlocal now
        made.record(layer, what, now * MS, (now + length) * MS)
        now += length

    for layer in (0, 1):
        if kind.decoupled:
            made.record(layer, "retrieve", now * MS, (now + 1) * MS)
        run(layer, "construct", 1)
        if kind.initialize:
            run(layer, "initialize", INITIALIZE)
        if not kind.decoupled:
            run(layer, "retrieve", RETRIEVE)
        run(layer, "apply", APPLY)
        run(layer, "execute", EXECUTE)
    made.placeholder_bytes = 3200 if kind.initialize else 100
    return made


def pipeline_ms(strategy: str) -> int:
    kind = STRATEGIES[strategy]
    return 2 * (
        1 + INITIALIZE * kind.initialize + RETRIEVE * (not kind.decoupled) + APPLY + EXECUTE
    )


def request(setup: str, strategy: str, number: int) -> dict[str, Any]:
    made = timeline(strategy)
    return {
        "setup": setup,
        "strategy": strategy,
        "cached_share": 0.5 if number == 2 and strategy == "mini" else 1.0,
        "client_ms": pipeline_ms(strategy) * (1 + 0.01 * number),
        "total_ms": pipeline_ms(strategy) * 1.0,
        "queue_ms": 0.0,
        "figures": asdict(made.figures()),
        "exposed_ms": requests.exposed(made),
        "layers": requests.layers(made),
        "suspensions": 0,
        "spans": requests._compact(made),
    }


def rounds(model: str) -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {
            "model": model,
            "resident_ms": 30.0,
            "requests": [
                request(setup.name, strategy, number)
                for setup in SETUPS
                for strategy in published.STRATEGIES
            ],
        }


def cold_round(disk: str, model: str) -> dict[str, Any]:
    return {
        "disk": disk,
        "limit": "none" if disk == "as it is" else "io.max = 254:0 rbps=200000000",
        "model": model,
        "direct_read_ms": 50.0,
        "requests": [
            {
                "setup": setup.name,
                "strategy": strategy,
                "scheduler": scheduler,
                "ms": 100.0 if scheduler else 125.0,
                "pipeline_ms": 90.0,
                "retrieve_ms": 40.0,
                "execute_ms": 30.0,
                "compute_wait_ms": 10.0,
                "first_execution_ms": 5.0,
                "suspensions": 2 if scheduler else 0,
                "suspended_ms": 3.0,
            }
            for setup in SETUPS
            for strategy, scheduler in cold.VARIANTS
        ],
    }


def outcome(number: int) -> dict[str, Any]:
    return {"number": number, "minute": 0, "error": None, "latency_ms": 10.0 + number}


@pytest.fixture
def material(tmp_path: Path) -> Material:
    choices = Choices(
        models=MODELS,
        rounds=3,
        threads=1,
        trace=None,
        window=Window(14, 0, 60),
        shape=Shape(),
        seed=0,
        replay_strategies=["pisel", "cicada"],
        replay_minutes=1,
        replay_speedup=1.0,
        density_models=["resnet50"],
        memory_limit=2_000_000_000,
        cold_models=["resnet50"],
        cold_rounds=1,
        disk_bytes_per_s=200_000_000,
    )
    layer = {"instantiation_ms": 0.2, "registration_ms": 0.1, "initialization_ms": 40.0}
    memory_request = {
        "answered_ms": 100.0,
        "before_mb": {"anonymous": 200.0, "file_backed": 90.0},
        "peak_anonymous_mb": 350.0,
        "peak_resident_mb": 500.0,
        "samples": [(0.0, 200.0, 90.0), (50.0, 350.0, 150.0), (100.0, 210.0, 90.0)],
    }
    return Material(
        run=Run(choices, tmp_path, tmp_path / "stores", None),
        sessions=[environment.describe(1, "cicada bench paper --out out")],
        arrivals=[Arrival(float(number), f"app/{number % 5}") for number in range(100)],
        trace_name="synthetic hour, seed 0",
        construction=[
            {
                "model": model,
                "resident_bytes": 110 << 20,
                "parameter_bytes": 100 << 20,
                "constructor_ms": [100.0, 101.0, 99.0],
                "instantiation_ms": [20.0, 20.0, 20.0],
                "layers": [{"layer": "first", **layer}, {"layer": "second", **layer}],
            }
            for model in MODELS
        ],
        rounds=[one for model in MODELS for one in rounds(model)],
        memory=[
            {
                "model": model,
                "requests": [
                    {"setup": setup.name, "strategy": strategy, **memory_request}
                    for setup in SETUPS
                    for strategy in published.STRATEGIES
                ],
            }
            for model in MODELS
        ],
        density=[
            {
                "model": "resnet50",
                "setup": setup.name,
                "strategy": strategy,
                "limit_bytes": 2_000_000_000,
                "rest_anonymous_bytes": 300_000_000,
                "peak_anonymous_bytes": 350_000_000,
                "carried": 5,
                "at_least": False,
                "how": "memory.max = 2000000000",
                "why": None,
            }
            for setup in SETUPS
            for strategy in published.STRATEGIES
        ],
        replays=[
            {
                "strategy": strategy,
                "minutes": [{"minute": 0, "invocations": 10, "answered": 10, "p50_ms": 14.5}],
                "seconds": 60.0,
                "outcomes": [outcome(number) for number in range(10)],
                "cost": {"served_gb_s": 1.0, "resident_gb_s": 100.0, "saved": 0.99},
            }
            for strategy in ("pisel", "cicada")
        ],
        cold=[cold_round(disk, "resnet50") for disk in cold.DISKS],
    )


def test_reductions_are_those_of_the_latencies(material: Material) -> None:
    found = latency.reduction_over_models(material, PAPERS, "pisel", "cicada", MODELS)
    assert found.median == pytest.approx(1 - pipeline_ms("cicada") / pipeline_ms("pisel"))
    assert found.n == 3


def test_what_explains_a_difference_is_measured(material: Material) -> None:
    """Under pisel 60 of 101 ms are initialization alone; that is what mini can save, and here saves."""
    compared = {one.what: one for one in comparison._all(material)}
    mini = compared["latency, mini less than pisel"]
    assert mini.paper == 0.5341
    assert mini.here["paper"] == pytest.approx(60 / 101)
    assert "Exposed initialize in pisel's requests" in mini.explained
    assert "paper: 59.4%; ours: 59.4%" in mini.explained
    preload = compared["latency, preload less than pisel"]
    assert preload.here["ours"] == pytest.approx(20 / 101)
    layer_work = compared["layer work, mini against pisel"]
    assert layer_work.here["paper"] == pytest.approx(1 / 61 - 1)
    assert "constructors without initializers take 20.0 ms" in layer_work.explained
    weight_work = compared["weight work, preload against pisel"]
    assert weight_work.here["paper"] == pytest.approx(4 / 24 - 1)
    assert "paper: 83.3%" in weight_work.explained
    used = compared["utilization, pisel, vit"]
    assert used.here["ours"] == pytest.approx(41 / 101)
    assert used.paper == 0.7034


def test_every_mean_of_the_paper_stands_in_the_comparison(material: Material) -> None:
    stated = {one.paper for one in comparison._all(material)}
    assert stated >= {0.0615, 0.5341, 0.6159, 0.1621, 0.5857, -0.6312, -0.7844, 0.2722, 0.2996}
    assert stated >= {0.1563, 0.9984, 0.9961, 0.9995, 0.3627, 0.2829, 0.7034}


def test_near_enough_needs_no_explanation() -> None:
    near = comparison.Compared("latency", 0.60, {"paper": 0.62, "ours": 0.58}, "why")
    assert comparison._explanation(near) == "agrees"
    far = comparison.Compared("latency", 0.60, {"paper": 0.62, "ours": 0.40}, "why")
    assert comparison._explanation(far) == "why"


def test_preload_time_is_retrieval_on_no_unit_s_time(material: Material) -> None:
    assert material.values("vgg11", OURS, "preload", units.preload_ms) == [2.0, 2.0, 2.0]
    assert material.values("vgg11", OURS, "pisel", units.preload_ms) == [0.0, 0.0, 0.0]


def test_the_scheduler_s_part_is_on_against_off(material: Material) -> None:
    rows = list(cold._scheduling(material))
    assert {row["strategy"] for row in rows} == {"preload", "cicada"}
    assert all(row["latency"].median == pytest.approx(0.2) for row in rows)


class Page(HTMLParser):
    """What a page would fetch, and the text that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"src", "srcset", "data"} or (name == "href" and tag != "a"):
                self.fetched.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_is_one_page_that_fetches_nothing(material: Material) -> None:
    path = report.write(material)
    page = Page()
    page.feed(path.read_text())
    assert page.fetched
    assert all(
        value.startswith(("data:image/svg+xml;", "data:image/png;")) for value in page.fetched
    )
    for words in (
        "6.15%",
        "53.41%",
        "61.59%",
        "34.8%",
        "45.8%",
        "synthetic",
        "resident",
        "In 6 of 90 requests",
    ):
        assert words in page.text, words
    assert "index of dispersion, 10" in page.text
    headings = re.findall(r"\((Figs?\. [^)]*)\)", page.text)
    assert {"Fig. 8", "Figs. 9 and 10", "Fig. 10", "Fig. 11", "Fig. 13", "Fig. 14"} <= set(headings)


def test_every_plot_comes_as_svg_and_png_and_all_data_as_json_and_csv(material: Material) -> None:
    report.write(material)
    run = material.run
    pictures = {path.stem for path in run.figures.glob("*.svg")}
    assert pictures == {path.stem for path in run.figures.glob("*.png")}
    wanted = ("fig4", "fig5", "fig8", "fig9", "fig10", "fig11", "fig13", "fig14", "density", "cold")
    for name in wanted:
        assert any(picture.startswith(name) for picture in pictures), name
    for picture in pictures:
        expected = "dropped" if picture.startswith("cold") else "warm"
        with Image.open(run.figures / f"{picture}.png") as image:
            made_on = json.loads(image.info["Description"])
        assert made_on["versions"]["torch"]
        assert expected in made_on["cache"]
        assert "torchvision" in (run.figures / f"{picture}.svg").read_text()
    sheets = {path.stem for path in run.data.glob("*.json")}
    assert sheets == {path.stem for path in run.data.glob("*.csv")}
    for name in sheets:
        told = json.loads((run.data / f"{name}.json").read_text())
        assert told["sessions"][0]["versions"]["torch"]
        assert told["cache"]
        with (run.data / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(told["rows"]) > 0, name
        assert all(row["processor"] and row["threads"] == "1" and row["cache"] for row in rows)


def test_sections_that_were_left_out_are_left_out_of_the_report(material: Material) -> None:
    without = Material(
        **{
            name: getattr(material, name)
            for name in ("run", "sessions", "arrivals", "trace_name", "construction", "rounds")
        },
        memory=material.memory,
        density=[],
        replays=material.replays,
        cold=[],
    )
    page = Page()
    page.feed(report.write(without).read_text())
    assert "Density:" not in page.text
    assert "Cold storage" not in page.text
