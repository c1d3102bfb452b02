"""Control group trees as Linux shows them, version 2, version 1, and both at once."""

import os
from pathlib import Path

import pytest

from runtime.limits import (
    Limits,
    available_cpus,
    available_memory,
    cpu_used_s,
    measure,
    memory_used,
)

GIB = 1 << 30
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "30 23 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs rw,mode=755\n"
    "32 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 30 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
UNLIMITED_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, group: str, files: dict[str, str]) -> Path:
    proc = {
        "proc/self/cgroup": f"0::{group}\n",
        "proc/self/mountinfo": V2,
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
    }
    return write(root, {**proc, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})


def test_without_control_groups_the_host_and_the_affinity_count(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == len(os.sched_getaffinity(0))
    assert available_memory(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemTotal: 8388608 kB\n"})
    assert available_memory(tmp_path) == 8 * GIB


def test_version_2_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {"cpu.max": "150000 100000\n", "memory.max": f"{GIB}\n"})
    assert available_cpus(root, affinity=8) == 1.5
    assert available_memory(root) == GIB


def test_a_limit_of_any_group_above_holds(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        "/kubepods/pod/container",
        {
            "kubepods/pod/container/cpu.max": "max 100000",
            "kubepods/pod/container/memory.max": "max",
            "kubepods/pod/cpu.max": "200000 100000",
            "kubepods/pod/memory.max": str(2 * GIB),
            "kubepods/cpu.max": "700000 100000",
            "kubepods/memory.max": str(4 * GIB),
        },
    )
    assert available_cpus(root, affinity=8) == 2.0
    assert available_memory(root) == 2 * GIB


def test_no_limit_anywhere_leaves_the_host(tmp_path: Path) -> None:
    root = v2(tmp_path, "/a", {"a/cpu.max": "max 100000", "a/memory.max": "max"})
    assert available_cpus(root, affinity=3) == 3.0
    assert available_memory(root) == 16 * GIB


def test_the_affinity_mask_may_be_the_smaller(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {"cpu.max": "400000 100000"})
    assert available_cpus(root, affinity=2) == 2.0


def test_a_limit_above_the_hosts_memory_is_the_hosts_memory(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {"memory.max": str(64 * GIB)})
    assert available_memory(root) == 16 * GIB


def test_version_1_with_the_hosts_path_but_only_its_own_group_mounted(tmp_path: Path) -> None:
    """Docker without a cgroup namespace: the path does not exist below the mount."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "proc/self/mountinfo": V1.replace(" / /sys/fs/cgroup/", " /docker/abc /sys/fs/cgroup/"),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB),
        },
    )
    assert available_cpus(root, affinity=4) == 0.5
    assert available_memory(root) == 3 * GIB


def test_version_1_without_limits(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/a\n",
            "proc/self/mountinfo": V1,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": UNLIMITED_V1,
        },
    )
    assert available_cpus(root, affinity=4) == 4.0
    assert available_memory(root) is None


def test_version_1_above_and_version_2_beside(tmp_path: Path) -> None:
    """The hybrid layout: version 2 is mounted, but the controllers are version 1's."""
    hybrid = V1 + "41 30 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/a/b\n4:cpu,cpuacct:/a/b\n0::/a/b\n",
            "proc/self/mountinfo": hybrid,
            "sys/fs/cgroup/unified/a/b/cgroup.procs": "",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": UNLIMITED_V1,
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(GIB),
        },
    )
    assert available_memory(root) == GIB


@pytest.mark.parametrize(
    ("cpus", "handlers", "threads"),
    [(4.0, 1, 4), (4.0, 2, 2), (3.9, 1, 3), (0.5, 1, 1), (2.0, 5, 1)],
)
def test_threads_are_whole_cores_shared_and_at_least_one(
    cpus: float, handlers: int, threads: int
) -> None:
    assert Limits(cpus, None).threads(handlers) == threads


def test_memory_is_shared_and_0_means_unknown() -> None:
    assert Limits(1.0, 3 * GIB).memory_each(3) == GIB
    assert Limits(1.0, None).memory_each(3) == 0


def test_this_machine_has_something() -> None:
    limits = measure()
    assert limits.cpus > 0
    assert limits.memory_bytes is not None
    assert limits.memory_bytes > 64 << 20


def test_what_is_used_is_our_own_groups_in_version_2(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        "/pod/container",
        {
            "pod/memory.stat": f"anon {4 * GIB}\nfile 0\n",
            "pod/cpu.stat": "usage_usec 9000000\n",
            "pod/container/memory.stat": "anon 1000\nfile 500000\nshmem 200\nkernel_stack 30\n",
            "pod/container/cpu.stat": "usage_usec 1500000\nuser_usec 1000000\n",
        },
    )
    assert memory_used(root) == 1230, "file pages can be dropped"
    assert cpu_used_s(root) == 1.5


def test_what_is_used_in_version_1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/box\n3:cpu,cpuacct:/box\n",
            "proc/self/mountinfo": V1,
            "sys/fs/cgroup/memory/box/memory.stat": "rss 1\ntotal_rss 700\ntotal_cache 9000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpuacct.usage": "2500000000\n",
        },
    )
    assert memory_used(root) == 700
    assert cpu_used_s(root) == 2.5


def test_what_is_used_is_unknown_without_control_groups(tmp_path: Path) -> None:
    assert memory_used(tmp_path) is None
    assert cpu_used_s(tmp_path) is None
