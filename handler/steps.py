"""The layers of one request: a version's files opened, and per layer the steps L, W, A and E."""

import os
from collections.abc import Sequence

from torch import Tensor

from handler import miniloader
from handler.errors import ModelFault
from handler.plan import Plan, PlannedLayer
from handler.retrieval import MappedFile, ReadFile, WeightFile
from handler.strategies import Strategy
from models.layers import BuiltLayer
from models.manifest import WeightFormat
from models.store import PreparedModel


class OpenFiles:
    """A version's weight files, opened all at once, so that its removal does the request no harm.

    Raises FileNotFoundError when the version has gone, ModelFault for a file that is not as prepared.
    """

    def __init__(self, model: PreparedModel, plan: Plan) -> None:
        self._descriptors: dict[int, int] = {}
        folder = os.open(model.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for planned in plan.layers:
                self._open(model, planned, folder)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder)

    def _open(self, model: PreparedModel, planned: PlannedLayer, folder: int) -> None:
        entry = planned.entry
        if entry.file is None:
            return
        where = f"model {model.name!r}: {model.path / entry.file}"
        try:
            descriptor = os.open(
                entry.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
            )
        except OSError as error:
            raise ModelFault(f"{where}: {error.strerror}") from error
        self._descriptors[entry.index] = descriptor
        size = os.fstat(descriptor).st_size
        if size != entry.bytes:
            raise ModelFault(f"{where}: has {size} bytes, expected {entry.bytes}")

    def descriptor(self, index: int) -> int:
        return self._descriptors[index]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class LayerStep:
    """One layer of one request."""

    __slots__ = ("_built", "_files", "_format", "_planned", "_strategy")

    def __init__(
        self,
        planned: PlannedLayer,
        files: OpenFiles,
        weight_format: WeightFormat,
        strategy: Strategy,
    ) -> None:
        self._planned = planned
        self._files = files
        self._format = weight_format
        self._strategy = strategy
        self._built: BuiltLayer | None = None

    @property
    def weighted(self) -> bool:
        return self._planned.entry.file is not None

    @property
    def built(self) -> BuiltLayer:
        if self._built is None:
            raise RuntimeError(f"{self._planned.layer.name} is used before its construction")
        return self._built

    def construct(self) -> None:
        if self._strategy.initialize:
            self._built = self._planned.layer.build()
        else:
            self._built = miniloader.load(self._planned.layer)

    def initialize(self) -> None:
        self.built.allocate()
        self.built.initialize()

    def held_bytes(self) -> int:
        return self.built.parameter_bytes()

    def retrieval(self) -> WeightFile:
        entry = self._planned.entry
        descriptor = self._files.descriptor(entry.index)
        if self._format == "pth":
            return ReadFile(descriptor, entry.bytes)
        return MappedFile(descriptor, entry.bytes, self._planned.views)

    def apply(self, retrieval: WeightFile) -> None:
        tensors = retrieval.take()
        if self._format == "safetensors":
            self.built.bind(tensors)
            return
        if not self._strategy.initialize:
            miniloader.restore(self.built)
        self.built.copy(tensors)

    def execute(self, value: Tensor) -> Tensor:
        return self.built.execute(value)


def steps(
    model: PreparedModel, plan: Plan, files: OpenFiles, strategy: Strategy
) -> Sequence[LayerStep]:
    weight_format = model.manifest.weight_format
    return [LayerStep(planned, files, weight_format, strategy) for planned in plan.layers]
