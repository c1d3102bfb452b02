"""What `cicada bench latency` makes of its samples."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.progress import Progress

from bench import latency
from bench.latency import Options, Row, Samples, UnknownChoice
from models import catalog


@dataclass(frozen=True, slots=True)
class Named:
    name: str
    format: str | None = None
    granularity: str | None = None

    def run(self, value: bytes) -> float:
        return float(len(value))


OPTIONS = Options(
    models=["resnet18"],
    strategies=["cicada"],
    formats=["safetensors"],
    granularity="block",
    rounds=3,
    cold=True,
    peers=False,
    optimized=False,
    http=False,
    threads=1,
    folder=None,
)


def rows(samples: Sequence[Samples]) -> dict[str, Row]:
    found = latency._rows("resnet18", OPTIONS, samples)
    return {row.variant: row for row in found}


SAMPLES = [
    Samples(Named(latency.RESIDENT), [10.0, 20.0, 40.0]),
    Samples(Named("cicada", "safetensors", "block"), [20.0, 22.0, 42.0]),
    Samples(Named(latency.DIRECT_READ, "safetensors"), [40.0, 11.0, 14.0]),
]


def test_a_ratio_is_to_the_resident_forward_of_the_same_round() -> None:
    row = rows(SAMPLES)["cicada"]
    assert row.ratio_to_resident == pytest.approx(1.1)  # of 2.0, 1.1 and 1.05
    assert (row.n, row.median_ms, row.cache) == (3, 22.0, "cold")


def test_a_cold_ratio_is_to_the_longer_of_forward_and_direct_read() -> None:
    assert rows(SAMPLES)["cicada"].ratio_to_cold_floor == pytest.approx(1.05)  # of 0.5, 1.1, 1.05
    assert rows(SAMPLES[:2])["cicada"].ratio_to_cold_floor is None


def test_every_start_has_its_part_of_the_rounds_after_warming_up() -> None:
    started: list[list[float]] = []

    class Told(Named):
        def run(self, _: bytes) -> float:
            started[-1].append(float(len(started)))
            return started[-1][-1]

    def start(_: ExitStack) -> Iterator[latency.Variant]:
        started.append([])
        yield Told(latency.RESIDENT)

    options = replace(OPTIONS, rounds=5, starts=3, cold=False)
    (sample,) = latency._run("resnet18", start, b"", options, Path(), Progress(disable=True))
    assert sample.times == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert [len(runs) for runs in started] == [4, 4, 3]  # two of them before those that count


def test_means_over_models_are_geometric() -> None:
    row = rows(SAMPLES)["cicada"]
    pair = [replace(row, ratio_to_resident=1.0), replace(row, ratio_to_resident=4.0)]
    assert latency.geometric_means(pair) == {("cicada", "safetensors"): pytest.approx(2.0)}


def test_names_are_checked_and_groups_stand_for_several() -> None:
    assert latency.known_models(["paper"]) == list(catalog.PAPER)
    with pytest.raises(UnknownChoice, match="there is no model 'resnet51'"):
        latency.known_models(["resnet18", "resnet51"])


@pytest.mark.timeout(300)
def test_a_small_run_writes_every_variant_in_the_documented_form(tmp_path: Path) -> None:
    """Real processes, all the peers among them; the numbers' form, not their size."""
    options = replace(OPTIONS, rounds=1, cold=False, peers=True, optimized=True, folder=tmp_path)
    latency.run(options, tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert {"command", "threads", "versions", "processor"} <= written["environment"].keys()
    variants = {row["variant"] for row in written["rows"]}
    assert variants == {
        *("resident", "cicada", "cicada_optimized"),
        *latency.PEERS,
        *latency.EXTRA_PEERS,
    }
    assert all(
        {"model", "variant", "format", "granularity", "cache", "n", "median_ms", "p95_ms"}
        <= row.keys()
        and row["ratio_to_resident"] > 0
        for row in written["rows"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
