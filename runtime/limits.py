"""The processors and the memory that this container really has.

Sources: the scheduler's affinity mask, `/proc/meminfo`, and the control groups, version 2 (`cpu.max`,
`memory.max`, `memory.stat`, `memory.events`) and version 1 (`cpu.cfs_quota_us`, `memory.limit_in_bytes`,
`memory.stat`, `memory.oom_control`). A limit set on any group above
ours holds for us too, so every group up to the hierarchy's root is asked and the smallest limit wins.
"""

import functools
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
    quotas = [
        quota for group in control_groups(root, "cpu") if (quota := _cpu_quota(group)) is not None
    ]
    return min([float(cores), *quotas])


def available_memory(root: Path = HOST) -> int | None:
    """Bytes: the host's, or fewer where a control group allows fewer."""
    limits = [
        limit
        for group in control_groups(root, "memory")
        if (limit := _memory_limit(group)) is not None
    ]
    total = _memory_info(root, "MemTotal")
    return min([*limits, *([total] if total is not None else [])], default=None)


def memory_left(root: Path = HOST) -> int | None:
    """Bytes that may still be taken before a limit is met; None where none is known.

    Of each limit what is left of it by memory that cannot be dropped; the file pages of mapped weights can.
    """
    left = [
        limit - _held_memory(group)
        for group in _memory_groups(root)
        if (limit := _memory_limit(group)) is not None
    ]
    available = _memory_info(root, "MemAvailable")
    smallest = min([*left, *([available] if available is not None else [])], default=None)
    return None if smallest is None else max(0, smallest)


def memory_used(root: Path = HOST) -> int | None:
    """Bytes that our control group holds and that cannot be dropped; None where the kernel does not tell."""
    groups = (
        group for group in control_groups(root, "memory") if (group / "memory.stat").is_file()
    )
    own = next(groups, None)
    return None if own is None else _held_memory(own)


def cpu_used_s(root: Path = HOST) -> float | None:
    """Seconds of processor time that our control group has used; None where the kernel does not tell."""
    for group in control_groups(root, "cpu"):
        microseconds = _counters(group / "cpu.stat").get("usage_usec")
        if microseconds is not None:
            return microseconds / 1e6
    for group in control_groups(root, "cpuacct"):
        nanoseconds = _integer(_read(group / "cpuacct.usage"))
        if nanoseconds is not None:
            return nanoseconds / 1e9
    return None


def private_memory(pid: int, root: Path = HOST) -> int:
    """Bytes that a process has for itself alone, file pages left out; 0 when it has gone."""
    resident, shared = (_read(root / f"proc/{pid}/statm") or "0 0 0").split()[1:3]
    return max(0, int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class OutOfMemoryKills:
    """The processes of our own control group, or else of the host, that the kernel killed to get memory."""

    def __init__(self, root: Path = HOST) -> None:
        self._root = root
        self._accounted = _out_of_memory_kills(root)

    def explain_one(self) -> bool:
        """Whether there was a kill that has not explained a death yet; it then has explained this one."""
        if _out_of_memory_kills(self._root) <= self._accounted:
            return False
        self._accounted += 1
        return True


@functools.cache
def _memory_groups(root: Path) -> tuple[Path, ...]:
    """Found once: they are asked with every large request."""
    return tuple(control_groups(root, "memory"))


def _out_of_memory_kills(root: Path) -> int:
    for group in _memory_groups(root):
        for file in ("memory.events", "memory.oom_control"):
            kills = _counters(group / file).get("oom_kill")
            if kills is not None:
                return kills
    return _counters(root / "proc/vmstat").get("oom_kill", 0)


_HELD_V2 = ("anon", "shmem", "kernel_stack", "pagetables", "slab_unreclaimable")
_HELD_V1 = ("total_rss", "total_shmem")


def _held_memory(group: Path) -> int:
    counters = _counters(group / "memory.stat")
    held = _HELD_V1 if "total_rss" in counters else _HELD_V2
    return sum(counters.get(name, 0) for name in held)


def _counters(path: Path) -> dict[str, int]:
    """A file of lines of a name and a number."""
    rows = (line.split() for line in (_read(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


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


def _memory_info(root: Path, wanted: str) -> int | None:
    """One of the host's figures, in bytes."""
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            kibibytes = _integer(value.removesuffix("kB").strip())
            return None if kibibytes is None else kibibytes * 1024
    return None


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: the group it shows at `point`, and its controllers (none: version 2)."""

    group: PurePosixPath
    point: Path
    controllers: frozenset[str]


def control_groups(root: Path, controller: str) -> Iterator[Path]:
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
