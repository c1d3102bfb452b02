"""How images become a model's input: a torchvision preset, changed as the user says."""

import math
from dataclasses import dataclass, fields

from models import pretrained
from models.errors import ModelError
from models.manifest import InputSpec, Interpolation
from models.pretrained import Preset


class PreprocessingError(ModelError):
    """What images cannot be prepared by, or not for this model."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What the user wants otherwise than the preset has it; None: as the preset."""

    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    interpolation: Interpolation | None = None

    def __post_init__(self) -> None:
        """Raises PreprocessingError."""
        sides = self.resize if isinstance(self.resize, tuple) else (self.resize,)
        for title, sizes in (("resize", sides), ("crop", (self.crop,))):
            if any(size is not None and size < 1 for size in sizes):
                raise PreprocessingError(f"{title} {sizes[0]}: expected pixels, 1 or more")
        if self.mean is not None and not all(map(math.isfinite, self.mean)):
            raise PreprocessingError(f"mean {self.mean}: expected numbers")
        if self.std is not None and not all(0 < value < math.inf for value in self.std):
            raise PreprocessingError(f"std {self.std}: expected numbers above 0")

    @property
    def made(self) -> dict[str, object]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def chosen(
    architecture: str,
    image_size: int,
    preset: str | None = None,
    changes: Changes = Changes(),
    *,
    fixed: bool,
) -> Preset:
    """The preset of that name, or the one for that image size, with the changes.

    image_size: for which the architecture is built; fixed: it takes no other. Raises PreprocessingError,
    PretrainedError, UnknownArchitecture.
    """
    if preset is None:
        base = pretrained.preset(architecture, changes.crop or image_size)
    else:
        base = pretrained.preset_of(pretrained.any_weights(architecture, preset))
    found = _changed(base, changes)
    if fixed and found.input.crop != image_size:
        raise PreprocessingError(
            f"this {architecture} takes images of {image_size} x {image_size} pixels, "
            f"but would get {found.input.crop}: expected --crop {image_size}"
        )
    return found


def _changed(base: Preset, changes: Changes) -> Preset:
    made = changes.made
    if not made:
        return base
    spec = InputSpec.model_validate(base.input.model_dump() | made)
    others = set(type(changes).__slots__) - set(made)
    name = f"{base.name}, but {', '.join(made)}" if others else "own"
    return Preset(name, spec)
