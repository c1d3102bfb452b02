"""What a run of `cicada bench paper` measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.paper import published
from bench.replay.synthetic import Shape
from bench.replay.trace import Window
from models.manifest import Granularity, WeightFormat

QUICK_MODELS: Final = ("resnet50", "vgg11", "vit_b_32")


@dataclass(frozen=True, slots=True)
class Setup:
    """How weights lie on disk and how finely models are cut."""

    name: str
    title: str
    weight_format: WeightFormat
    granularity: Granularity


PAPERS: Final = Setup("paper", "as the paper had it: pth, layers by stage", "pth", "stage")
OURS: Final = Setup("ours", "ours: safetensors, layers by block", "safetensors", "block")
SETUPS: Final = (PAPERS, OURS)


@dataclass(frozen=True, slots=True)
class Choices:
    """What makes two runs comparable; a run goes on only with the same ones."""

    models: Sequence[str]
    rounds: int
    threads: int
    trace: str | None
    window: Window
    shape: Shape
    seed: int
    replay_strategies: Sequence[str]
    replay_minutes: int
    replay_speedup: float
    density_models: Sequence[str]
    memory_limit: int
    cold_models: Sequence[str]
    cold_rounds: int
    disk_bytes_per_s: int

    @property
    def timeline_models(self) -> list[str]:
        """The paper's three, as far as they are chosen; else those that are."""
        found = [model for model in published.TIMELINE_MODELS if model in self.models]
        return found or list(self.models[:3])

    @property
    def memory_models(self) -> list[str]:
        """The first chosen of each family."""
        first: dict[str, str] = {}
        for model in self.models:
            first.setdefault(published.family(model), model)
        return list(first.values())


@dataclass(frozen=True, slots=True)
class Run:
    """Where a run writes. `stores` are removed when it is over."""

    choices: Choices
    folder: Path
    stores: Path
    trace: Path | None

    @property
    def journals(self) -> Path:
        return self.folder / "journals"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def figures(self) -> Path:
        return self.folder / "figures"
