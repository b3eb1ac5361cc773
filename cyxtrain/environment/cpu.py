"""The number of cores that this process may use, and the processor's name."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_usable_cores() -> int:
    """Return how many cores affinity (taskset, cpusets) and cgroup quotas (containers) leave; at least 1."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_quota())))


@functools.cache
def processor_name() -> str:
    """Return the processor's name, such as "Intel(R) Xeon(R) Platinum 8481C", or its architecture."""
    with contextlib.suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cgroup_quota(root: Path = Path("/")) -> float:
    """Return the CPU limit of this process's control groups in cores, such as 1.5; infinity: no limit."""
    if sys.platform != "linux":
        return math.inf
    return min((_limit(folder) for folder in _cpu_groups(root)), default=math.inf)


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents."""
    lines: list[str] = []  # only Linux has control groups
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, alone or in addition to version 1
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"]
        else:
            continue
        # In a container the path may be the host's: only the mount's root exists there.
        own = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for folder in (own, *own.parents):
                yield root / mount / folder


def _limit(folder: Path) -> float:
    """Return the CPU limit of a control group in cores; infinity: no limit."""
    try:
        if (folder / "cpu.max").exists():  # version 2
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # version 2 writes "max"
        return math.inf
    if cores <= 0:  # version 1 writes -1 for no limit
        return math.inf
    return cores
