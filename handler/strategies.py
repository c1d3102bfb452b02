"""The strategies (paper, section V-A), as data."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Strategy:
    """Which of the paper's techniques a request's pipeline uses.

    pipelined: the three units run side by side; otherwise everything runs in turn on the compute thread.
    initialize: layers register full-precision parameters and run every initializer (no MiniLoader).
    decoupled: weight files are retrieved asynchronously, overlapping construction, and applied out of
        order (WeightDecoupler and priority-aware scheduler); otherwise in line, after the layer's L.
    """

    name: str
    pipelined: bool
    initialize: bool
    decoupled: bool


STRATEGIES: Final[dict[str, Strategy]] = {
    strategy.name: strategy
    for strategy in (
        Strategy("traditional", pipelined=False, initialize=True, decoupled=False),
        Strategy("pisel", pipelined=True, initialize=True, decoupled=False),
        Strategy("mini", pipelined=True, initialize=False, decoupled=False),
        Strategy("preload", pipelined=True, initialize=True, decoupled=True),
        Strategy("cicada", pipelined=True, initialize=False, decoupled=True),
    )
}
DEFAULT_STRATEGY: Final = "cicada"
