"""The layers of one request: a version's files opened, and per layer the steps L, W, A and E."""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from handler import miniloader
from handler.errors import ModelFault
from handler.pipeline import Forward, InTurn
from handler.plan import Plan, PlannedLayer
from handler.retrieval import MappedFile, ReadFile, WeightFile
from handler.strategies import Strategy
from models.errors import is_of_memory
from models.gates import Enter, GatedForward
from models.layers import BuiltLayer
from models.manifest import LayerEntry
from models.store import PreparedModel

# Whoever opens a pipe would wait for its writer.
_OPENING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OpenFiles:
    """A version's weight files, opened all at once, so that its removal does the request no harm.

    Raises FileNotFoundError when the version has gone, ModelFault for a file that is not as prepared.
    """

    def __init__(self, model: PreparedModel, plan: Plan) -> None:
        self._model = model
        self._descriptors: dict[int, int] = {}
        folder = os.open(model.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for planned in plan.layers:
                self._open(planned.entry, folder)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder)

    def _open(self, entry: LayerEntry, folder: int) -> None:
        if entry.file is None:
            return
        try:
            descriptor = os.open(entry.file, _OPENING, dir_fd=folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._model.path.exists():
                raise
            raise self.fault(entry, error.strerror) from error
        self._descriptors[entry.index] = descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self.fault(entry, "is not a regular file")
        if status.st_size != entry.bytes:
            raise self.fault(entry, f"has {status.st_size} bytes, expected {entry.bytes}")

    def fault(self, entry: LayerEntry, what: str | None) -> ModelFault:
        """What is wrong with a layer's file, named."""
        return ModelFault(f"model {self._model.name!r}: {entry.file}: {what}")

    def descriptor(self, index: int) -> int:
        return self._descriptors[index]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class NamedFile:
    """A layer's weight file whose faults name it."""

    __slots__ = ("_fault", "_file")

    def __init__(self, file: WeightFile, fault: Callable[[str], ModelFault]) -> None:
        self._file = file
        self._fault = fault

    @property
    def bytes(self) -> int:
        return self._file.bytes

    @property
    def is_mapped(self) -> bool:
        return self._file.is_mapped

    def step(self) -> bool:
        try:
            return self._file.step()
        except OSError as error:
            if is_of_memory(error):
                raise
            raise self._fault(error.strerror or str(error)) from error

    def take(self) -> Mapping[str, Tensor]:
        return self._file.take()


class LayerStep:
    """One layer of one request."""

    __slots__ = ("_built", "_files", "_held_bytes", "_planned", "_strategy")

    def __init__(self, planned: PlannedLayer, files: OpenFiles, strategy: Strategy) -> None:
        self._planned = planned
        self._files = files
        self._strategy = strategy
        self._built: BuiltLayer | None = None
        self._held_bytes = 0

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
            self._built, self._held_bytes = miniloader.load(self._planned.layer)

    def initialize(self) -> None:
        self.built.allocate()
        self._held_bytes = self.built.parameter_bytes()
        self.built.initialize()

    def held_bytes(self) -> int:
        return self._held_bytes

    def retrieval(self, *, in_memory: bool = False) -> WeightFile:
        entry, layout = self._planned.entry, self._planned.layout
        descriptor = self._files.descriptor(entry.index)
        if layout is None:
            return NamedFile(ReadFile(descriptor, entry.bytes), self._fault)
        mapped = MappedFile(descriptor, entry.bytes, layout, in_memory=in_memory)
        return NamedFile(mapped, self._fault)

    def apply(self, retrieval: WeightFile) -> None:
        tensors = retrieval.take()
        if self._planned.layout is not None:
            self.built.bind(tensors)
            return
        self._check(tensors)
        if not self._strategy.initialize:
            miniloader.restore(self.built)
        self.built.copy(tensors)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """A `pth` file has its own say on shapes, and a copy would broadcast what does not fit."""
        for place in self._planned.layer.tensors:
            found = tensors.get(place.key)
            if not isinstance(found, Tensor):
                raise self._fault(f"has no tensor {place.key}")
            if tuple(found.shape) != place.shape or found.dtype != place.dtype:
                raise self._fault(
                    f"has {place.key} as {found.dtype} {tuple(found.shape)}, "
                    f"expected {place.dtype} {place.shape}"
                )

    def _fault(self, what: str) -> ModelFault:
        return self._files.fault(self._planned.entry, what)

    def execute(self, value: Any) -> Any:
        return self.built.execute(value)

    def release(self) -> None:
        built, self._built = self._built, None
        if built is not None:
            built.empty()


class GatedSteps:
    """The model's own forward over its layers' steps.

    own: it is the user's, which may come back to a layer on other inputs than the example's.
    """

    def __init__(self, gated: GatedForward, steps: Sequence[LayerStep], *, own: bool) -> None:
        self._passage = gated.passage()
        self._steps = steps
        self.until = [None if own else part.until for part in gated.parts]

    def __call__(self, enter: Enter, value: Any) -> Any:
        return self._passage.run(lambda layer: self._steps[layer].built, enter, value)

    def leave(self) -> None:
        self._passage.leave()


def forward(model: PreparedModel, plan: Plan, steps: Sequence[LayerStep]) -> Forward:
    """How the layers are run: by the model's own forward, or each on the output of the one before."""
    if plan.gated is None:
        return InTurn(steps)
    return GatedSteps(plan.gated, steps, own=model.manifest.factory is not None)


def steps(plan: Plan, files: OpenFiles, strategy: Strategy) -> Sequence[LayerStep]:
    return [LayerStep(planned, files, strategy) for planned in plan.layers]
