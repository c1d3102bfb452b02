"""Control groups with a limit, where this process may make them: memory, and reading from a disk.

Both versions: `memory.max` and `io.max`, or `memory.limit_in_bytes` and `blkio.throttle.read_bps_device`.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.errors import ModelError
from runtime import limits

_END_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.05


class NotAllowed(ModelError):
    """No such group can be made here."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process joins by writing its id into `folder`/cgroup.procs; what it has already stays elsewhere."""

    folder: Path
    setting: str
    """The limit as it was set: `memory.max = 2000000000`."""

    def join(self) -> None:
        """Puts this process into it."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_limited(limit_bytes: int) -> Iterator[Group]:
    """A group whose processes may hold so much together. Raises NotAllowed."""
    settings = {"memory.max": str(limit_bytes), "memory.limit_in_bytes": str(limit_bytes)}
    with _made("memory", settings) as group:
        _forbid_swap(group.folder, limit_bytes)
        yield group


def _forbid_swap(folder: Path, limit_bytes: int) -> None:
    swap = {"memory.swap.max": "0", "memory.memsw.limit_in_bytes": str(limit_bytes)}
    for name, value in swap.items():
        with suppress(OSError):  # where swap is not counted there is none to forbid
            if (folder / name).exists():
                (folder / name).write_text(value)


@contextmanager
def read_limited(path: Path, bytes_per_s: int) -> Iterator[Group]:
    """A group that reads so fast from the disk that `path` lies on. Raises NotAllowed."""
    device = disk(path)
    settings = {
        "io.max": f"{device} rbps={bytes_per_s}",
        "blkio.throttle.read_bps_device": f"{device} {bytes_per_s}",
    }
    with _made("blkio", settings) as group:
        yield group


def disk(path: Path) -> str:
    """The disk's numbers, `254:0`; a partition's disk is limited as a whole. Raises NotAllowed."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise NotAllowed(f"{path} lies on no disk of its own")
    real = device.resolve()
    if (real / "partition").exists():
        real = real.parent
    return (real / "dev").read_text().strip()


@contextmanager
def _made(controller: str, settings: Mapping[str, str]) -> Iterator[Group]:
    group = _make(controller, settings)
    try:
        yield group
    finally:
        _remove(group.folder)


def _make(controller: str, settings: Mapping[str, str]) -> Group:
    """In our own group, or else in one above it; with the first setting that the kernel knows."""
    reason = "there is no such control group hierarchy"
    for parent in limits.control_groups(limits.HOST, controller):
        folder = parent / f"cicada-bench-{os.getpid()}"
        try:
            folder.mkdir()
            return Group(folder, _set(folder, settings))
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            with suppress(OSError):
                folder.rmdir()
    raise NotAllowed(f"no control group with a {controller} limit can be made: {reason}")


def _set(folder: Path, settings: Mapping[str, str]) -> str:
    for name, value in settings.items():
        if (folder / name).exists():
            (folder / name).write_text(value)
            return f"{name} = {value}"
    raise OSError(errno.ENOENT, "has none of " + ", ".join(settings), str(folder))


def _remove(folder: Path) -> None:
    """Once its processes have ended: the kernel needs a moment to see it."""
    deadline = time.monotonic() + _END_LIMIT_S
    while True:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
        else:
            return
