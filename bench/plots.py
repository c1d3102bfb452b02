"""How plots look and are written: matplotlib, which comes with the extra `bench`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from models.errors import ModelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: Final = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#000000",
)
"""Okabe and Ito's, which colour-blind people tell apart."""
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1)))
"""Lines are told apart without colours too."""
_PNG_DPI: Final = 110
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "cicada",
}


class PlotsMissing(ModelError):
    """matplotlib or jinja2 is not installed."""

    def __init__(self) -> None:
        super().__init__("this needs the extra 'bench': pip install 'cicada-serverless[bench]'")


def require() -> None:
    """Raises PlotsMissing."""
    try:
        import jinja2  # noqa: F401, PLC0415
        import matplotlib  # noqa: ICN001, PLC0415
    except ImportError as error:
        raise PlotsMissing from error
    matplotlib.use("agg")


@contextmanager
def figure(
    stem: Path, width: float, height: float, described: str, **grid: Any
) -> Iterator[tuple["Figure", Any]]:
    """A figure and its axes, written as `stem`.svg and `stem`.png on leaving; sizes in inches.

    described: goes into both files' metadata. grid: what `Figure.subplots` takes.
    """
    import matplotlib as mpl  # noqa: PLC0415 an optional extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(_STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made, made.subplots(**grid)
        made.savefig(stem.with_suffix(".svg"), metadata={"Description": described, "Date": None})
        made.savefig(stem.with_suffix(".png"), dpi=_PNG_DPI, metadata={"Description": described})
