"""The processors and the memory that this container really has.

Sources: the scheduler's affinity mask, `/proc/meminfo`, and the control groups, version 2 (`cpu.max`,
`memory.max`) and version 1 (`cpu.cfs_quota_us`, `memory.limit_in_bytes`). A limit set on any group above
ours holds for us too, so every group up to the hierarchy's root is asked and the smallest limit wins.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HOST = Path("/")
_V1_UNLIMITED = 1 << 60  # version 1 says "no limit" as the largest multiple of the page size


@dataclass(frozen=True, slots=True)
class Limits:
    """cpus: whole and broken cores; memory_bytes: None where not even the host's size is known."""

    cpus: float
    memory_bytes: int | None

    def threads(self, handlers: int) -> int:
        """Whole cores, shared among the handlers; at least one each."""
        return max(1, math.floor(self.cpus) // handlers)

    def memory_each(self, handlers: int) -> int:
        """One handler's share in bytes, 0 where no limit is known."""
        return (self.memory_bytes or 0) // handlers


def measure(root: Path = HOST) -> Limits:
    return Limits(cpus=available_cpus(root), memory_bytes=available_memory(root))


def available_cpus(root: Path = HOST, *, affinity: int | None = None) -> float:
    """Cores: the affinity mask's, or fewer where a control group's quota allows fewer."""
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return min([float(cores), *quotas])


def available_memory(root: Path = HOST) -> int | None:
    """Bytes: the host's, or fewer where a control group allows fewer."""
    limits = [
        limit for group in _groups(root, "memory") if (limit := _memory_limit(group)) is not None
    ]
    total = _host_memory(root)
    return min([*limits, *([total] if total is not None else [])], default=None)


def _cpu_quota(group: Path) -> float | None:
    allowed = _read(group / "cpu.max")
    if allowed is not None:
        quota, _, period = allowed.partition(" ")
        return None if quota == "max" else _ratio(quota, period)
    return _ratio(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _ratio(quota: str | None, period: str | None) -> float | None:
    quota_us, period_us = _integer(quota), _integer(period)
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def _memory_limit(group: Path) -> int | None:
    limit = _integer(_read(group / "memory.max") or _read(group / "memory.limit_in_bytes"))
    return None if limit is None or limit >= _V1_UNLIMITED else limit


def _host_memory(root: Path) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            kibibytes = _integer(value.removesuffix("kB").strip())
            return None if kibibytes is None else kibibytes * 1024
    return None


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: the group it shows at `point`, and its controllers (none: version 2)."""

    group: PurePosixPath
    point: Path
    controllers: frozenset[str]


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of our own control group and of all above it that can be seen, per hierarchy."""
    memberships = _memberships(root)
    for mount in _mounts(root):
        if mount.controllers and controller not in mount.controllers:
            continue
        key = controller if mount.controllers else ""
        if key in memberships:
            yield from _upwards(mount, memberships[key])


def _upwards(mount: _Mount, group: PurePosixPath) -> Iterator[Path]:
    # Without a namespace of its own a container sees the host's path in /proc/self/cgroup, but
    # finds its own group mounted as the root: what lies outside the mount is the mount itself.
    inside = group.relative_to(mount.group) if group.is_relative_to(mount.group) else "."
    folder = mount.point / inside
    while folder != mount.point:
        yield folder
        folder = folder.parent
    yield mount.point


def _memberships(root: Path) -> dict[str, PurePosixPath]:
    """Controller -> our group's path; version 2's stands under the empty name (cgroups(7))."""
    memberships: dict[str, PurePosixPath] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        memberships.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    return memberships


def _mounts(root: Path) -> Iterator[_Mount]:
    """The control group hierarchies in /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        place, _, kind = line.partition(" - ")
        file_system, _, options = kind.split(" ", 2)
        if file_system not in {"cgroup", "cgroup2"}:
            continue
        group, point = place.split(" ")[3:5]
        controllers = options.split(",") if file_system == "cgroup" else []
        yield _Mount(PurePosixPath(group), root / point.lstrip("/"), frozenset(controllers))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None
