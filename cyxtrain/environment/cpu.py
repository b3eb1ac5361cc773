"""The number of cores that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_usable_cores() -> int:
    """Return how many cores affinity (taskset, cpusets) and cgroup quotas (containers) leave; at least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_quota())))


def cgroup_quota(root: Path = Path("/")) -> float:
    """Return the CPU limit of this process's control groups in cores, such as 1.5; infinity: none."""
    if sys.platform != "linux":
        return math.inf
    return min((_limit(folder) for folder in _cpu_groups(root)), default=math.inf)


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents."""
    lines: list[str] = []
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
        # In a container the path may be that of the host, of which only the mount's root exists.
        own = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for folder in (own, *own.parents):
                yield root / mount / folder


def _limit(folder: Path) -> float:
    """Return the CPU limit of a control group in cores; infinity: none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max"
        return math.inf
    return cores if cores > 0 else math.inf  # version 1 writes -1 for no limit
