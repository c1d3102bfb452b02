"""The exposition against the rules that `promtool check metrics` applies, read by the official parsers."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from prometheus_client import parser
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser

from handler.timeline import KINDS, Figures, UnitTimes
from runtime.frames import Timeline
from runtime.handler_process import End
from runtime.limits import Limits
from runtime.metrics import BUCKETS_S, UNKNOWN, Metrics
from runtime.pool import Pool
from runtime.requests import Record

MODELS: Final = ("resnet50", "vgg16")
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
NONE: Final = UnitTimes(0.0, 0.0, 0.0)
FIGURES: Final = Figures(
    layers=1, input_ms=0, construct_ms=0.5, initialize_ms=0, retrieve_ms=9, apply_ms=3, execute_ms=70,
    pipeline_ms=80, work_ms=NONE, wait_ms=NONE, idle_ms=NONE, utilization=1, occupancy=1,
    placeholder_bytes=0, placeholder_usage_ms=0,
)  # fmt: skip


def answered(model: str = "resnet50", status: int = 200) -> Record:
    timeline = Timeline(
        strategy="cicada",
        model=model,
        version="0123456789ab",
        layers=("fc",),
        arrival_ns=0,
        decoded_ns=(0, 0),
        spans=(),
        suspensions=(),
        placeholder_bytes=0,
        figures=FIGURES,
    )
    return Record(
        "r",
        arrived_ns=0,
        inference=True,
        model=model,
        strategy="cicada",
        received_ns=1_000_000,
        dispatched_ns=5_000_000,
        answered_ns=90_000_000,
        status=status,
        timeline=timeline if status == 200 else None,
        retrieved_bytes=1000 if status == 200 else 0,
    )


def unknown() -> Record:
    return Record("r", arrived_ns=0, inference=True, answered_ns=1_000_000, status=404)


@pytest.fixture
def metrics() -> Metrics:
    measured = Metrics()
    pool = Pool(["true"], handlers=1, queue=1, timeout_s=1)
    measured.watch(pool, Limits(cpus=1.5, memory_bytes=1 << 30))
    measured.handler_ended(End("SIGKILL", "was killed by SIGKILL"))
    for record in (answered(), answered(), answered("vgg16"), answered(status=504), unknown()):
        measured.observe(record)
    return measured


def families(metrics: Metrics, *models: str) -> dict[str, Metric]:
    content, _ = metrics.exposition("", models or MODELS)
    return {
        family.name: family for family in parser.text_string_to_metric_families(content.decode())
    }


def sample(families: dict[str, Metric], name: str, **labels: str) -> float:
    found = [
        s.value
        for family in families.values()
        for s in family.samples
        if s.name == name and labels.items() <= s.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_requests_are_counted_by_model_strategy_and_status(metrics: Metrics) -> None:
    found = families(metrics)
    count = "cicada_requests_total"
    assert sample(found, count, model="resnet50", strategy="cicada", status="200") == 2
    assert sample(found, count, model="resnet50", strategy="cicada", status="504") == 1
    assert sample(found, count, model=UNKNOWN, strategy=UNKNOWN, status="404") == 1
    assert sample(found, "cicada_retrieved_bytes_total", model="resnet50") == 2000
    assert sample(found, "cicada_handler_restarts_total", cause="SIGKILL") == 1
    assert sample(found, "cicada_cpu_limit_cores") == 1.5
    assert sample(found, "cicada_memory_limit_bytes") == 1 << 30
    assert sample(found, "cicada_handlers_alive") == 0
    assert sample(found, "cicada_queue_depth") == 0
    assert sample(found, "cicada_in_flight") == 0


@pytest.mark.parametrize(
    ("name", "labels", "seconds", "within"),
    [
        ("cicada_total_seconds", {}, 0.09 + 0.09, "0.1"),
        ("cicada_queue_seconds", {}, 0.004 + 0.004, "0.005"),
        ("cicada_pipeline_seconds", {}, 0.08 + 0.08, "0.1"),
        ("cicada_span_seconds", {"kind": "construct"}, 0.001, "0.001"),
        ("cicada_span_seconds", {"kind": "execute"}, 0.14, "0.1"),
    ],
)
def test_times_are_histograms_from_1_ms_to_30_s(
    name: str, labels: dict[str, str], seconds: float, within: str
) -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.observe(answered())
    found = families(metrics)
    assert sample(found, f"{name}_sum", model="resnet50", **labels) == pytest.approx(seconds)
    assert sample(found, f"{name}_count", model="resnet50", **labels) == 2
    buckets = {
        s.labels["le"]: s.value
        for s in found[name].samples
        if s.name == f"{name}_bucket" and labels.items() <= s.labels.items()
    }
    bounds = [float(bound) for bound in buckets]
    assert (bounds[0], bounds[-2:]) == (0.001, [30.0, float("inf")])
    assert bounds == [*sorted(BUCKETS_S), float("inf")]
    lower = [count for bound, count in buckets.items() if float(bound) < float(within)]
    assert (set(lower), buckets[within]) in [({0.0}, 2), (set(), 2)]


def test_every_kind_of_span_has_its_time(metrics: Metrics) -> None:
    samples = families(metrics)["cicada_span_seconds"].samples
    assert {s.labels["kind"] for s in samples} == set(KINDS)


def test_a_removed_models_series_go_and_the_others_stay(metrics: Metrics) -> None:
    def named(found: dict[str, Metric]) -> set[str]:
        samples = [s for family in found.values() for s in family.samples]
        return {s.labels["model"] for s in samples if "model" in s.labels}

    assert named(families(metrics)) == {*MODELS, UNKNOWN}
    assert named(families(metrics, "vgg16")) == {"vgg16", UNKNOWN}
    assert named(families(metrics)) == {"vgg16", UNKNOWN}, "what is forgotten does not come back"
    metrics.observe(answered("resnet50"))
    found = families(metrics)
    assert sample(found, "cicada_requests_total", model="resnet50", status="200") == 1


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version="),
        ("text/html, */*;q=0.1", "text/plain; version="),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (f"{OPENMETRICS};q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "application/openmetr"),
    ],
)
def test_the_content_type_is_the_one_asked_for(
    metrics: Metrics, accept: str, content_type: str
) -> None:
    content, answered_type = metrics.exposition(accept, MODELS)
    assert answered_type.startswith(content_type)
    assert "charset=utf-8" in answered_type
    assert content.endswith(b"# EOF\n") == answered_type.startswith("application/openmetrics")


def test_openmetrics_is_read_by_its_strict_parser(metrics: Metrics) -> None:
    content, _ = metrics.exposition(OPENMETRICS, MODELS)
    read: Iterable[Metric] = openmetrics_parser.text_string_to_metric_families(content.decode())  # type: ignore[no-untyped-call]
    assert {family.name for family in read} >= {"cicada_requests", "cicada_total_seconds"}


# prometheus/util/promlint: what `promtool check metrics` complains about.
UNITS_BESIDE_THE_BASE: Final = re.compile(
    r"_(milli|micro|nano|kilo|mega|giga|kibi|mebi|gibi)?(bits|minutes|hours|days|weeks)(_|$)"
    r"|_(milli|micro|nano|kilo|mega|giga|kibi|mebi|gibi)(seconds|bytes|meters|grams)(_|$)"
    r"|_(ms|us|ns|s|sec|secs|b|kb|mb|gb|tb|pb|m|h|d)(_|$)"
)
TYPES: Final = ("counter", "gauge", "histogram", "summary", "untyped")


def findings(content: str) -> Iterator[str]:
    helped, typed, samples = set(), {}, []
    for line in content.splitlines():
        match line.split(" ", 3):
            case ["#", "HELP", name, text]:
                assert text
                assert name not in helped, f"{name} has two HELP lines"
                helped.add(name)
            case ["#", "TYPE", name, kind]:
                assert name not in typed, f"{name} has two TYPE lines"
                typed[name] = kind
            case _:
                samples.append(line.rpartition(" ")[0])
    if len(set(samples)) != len(samples):
        yield "a series is there twice"
    for name, kind in typed.items():
        if name not in helped:
            yield f"{name} has no help"
        yield from _name_findings(name, kind)
    for line in samples:
        name = re.split(r"[{ ]", line)[0]
        family = name if name in typed else re.sub(r"_(bucket|sum|count)$", "", name)
        if family not in typed:
            yield f"{name} has no type"


def _name_findings(name: str, kind: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        yield f"{name} is not in snake case"
    if (kind == "counter") != name.endswith("_total"):
        yield f"{name}, a {kind}, and the suffix _total"
    if any(f"_{word}" in name for word in TYPES):
        yield f"{name} has a type in its name"
    if kind != "histogram" and re.search(r"_(bucket|count|sum)$", name):
        yield f"{name} has a histogram's suffix"
    if UNITS_BESIDE_THE_BASE.search(name):
        yield f"{name} is not in a base unit"


def test_the_exposition_has_none_of_promtools_findings(metrics: Metrics) -> None:
    content, _ = metrics.exposition("", MODELS)
    assert list(findings(content.decode())) == []


def test_the_findings_are_found() -> None:
    bad = "# TYPE requestCount counter\nrequestCount 1\nrequestCount 2\nother_ms 1\n# TYPE a_ms gauge\na_ms 1\n"
    assert len(list(findings(bad))) == 7


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_no_finding(metrics: Metrics) -> None:
    content, _ = metrics.exposition("", MODELS)
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=content,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_the_readme_names_every_metric_and_its_labels(metrics: Metrics, repository: Path) -> None:
    rows = re.findall(
        r"^\| `(cicada_[a-z_]+)` \| (.*?) ?\|", (repository / "README.md").read_text(), re.MULTILINE
    )
    told = {name: set(re.findall("`([a-z]+)`", labels)) for name, labels in rows}
    found = {
        family.name + "_total" * (family.type == "counter"): {
            label for s in family.samples for label in s.labels if label != "le"
        }
        for family in families(metrics).values()
        if family.name.startswith("cicada_")
    }
    assert told == found


def test_labels_come_from_known_sets_only(metrics: Metrics) -> None:
    content, _ = metrics.exposition("", MODELS)
    labels = set(re.findall(r'([a-z]+)="([^"]*)"', content.decode()))
    known: dict[str, set[str]] = {
        "model": {*MODELS, UNKNOWN},
        "strategy": {"cicada", UNKNOWN},
        "status": {"200", "404", "504"},
        "cause": {"SIGKILL"},
        "kind": {*KINDS},
    }
    for name, value in labels:
        if name != "le":
            assert value in known[name]
