"""A request's figures as response headers: Server-Timing, and RFC 9651 dictionaries and items.

All values are numbers or names of a known form, so nothing that a caller or a file says can shape a header.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from handler.timeline import UnitTimes
from runtime.frames import Timeline

NAMES = (
    "Server-Timing",
    "Cicada-Strategy",
    "Cicada-Model",
    "Cicada-Version",
    "Cicada-Layers",
    "Cicada-Work",
    "Cicada-Wait",
    "Cicada-Idle",
    "Cicada-Utilization",
    "Cicada-Occupancy",
    "Cicada-Placeholder",
)


@dataclass(frozen=True, slots=True)
class ProxyTimes:
    """What the proxy measured, in milliseconds (DESIGN.md section 8)."""

    receive: float
    queue: float
    total: float


def headers(timeline: Timeline, times: ProxyTimes) -> dict[str, str]:
    """The headers of a successful inference."""
    figures = timeline.figures
    durations = {
        "receive": times.receive,
        "queue": times.queue,
        "input": figures.input_ms,
        "construct": figures.construct_ms,
        "initialize": figures.initialize_ms,
        "retrieve": figures.retrieve_ms,
        "apply": figures.apply_ms,
        "execute": figures.execute_ms,
        "pipeline": figures.pipeline_ms,
        "total": times.total,
    }
    values = (
        _server_timing(durations),
        timeline.strategy,
        timeline.model,
        timeline.version,
        str(figures.layers),
        _units(figures.work_ms),
        _units(figures.wait_ms),
        _units(figures.idle_ms),
        _decimal(figures.utilization),
        _decimal(figures.occupancy),
        f"bytes={figures.placeholder_bytes}, usage={_decimal(figures.placeholder_usage_ms)}",
    )
    return dict(zip(NAMES, values, strict=True))


def _server_timing(durations: Mapping[str, float]) -> str:
    return ", ".join(f"{name};dur={_decimal(duration)}" for name, duration in durations.items())


def _units(times: UnitTimes) -> str:
    units = {"layer": times.layer, "weight": times.weight, "compute": times.compute}
    return ", ".join(f"{unit}={_decimal(time)}" for unit, time in units.items())


def _decimal(value: float) -> str:
    """A Decimal has at most three digits after its point (RFC 9651, section 3.3.2)."""
    return f"{value:.3f}"
