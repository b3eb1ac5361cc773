"""How many cores this process may use. Without PyTorch or NumPy: the launcher asks it, too, and needs neither."""

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
    """Return how many cores' time the control groups of this process get, such as 1.5; infinity without a limit."""
    if sys.platform != "linux":
        return math.inf
    return min((_limit(folder) for folder in _cpu_groups(root)), default=math.inf)


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of those around them, where their CPU time is limited."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, alone or beside version 1
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"]
        else:
            continue
        # In a container the path may be that of the host, and only the mount's own root is there.
        own = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for folder in (own, *own.parents):
                yield root / mount / folder


def _limit(folder: Path) -> float:
    """Return how many cores' time a group gets; infinity: it is not limited, or is not there."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return math.inf
    return cores if cores > 0 else math.inf  # version 1 writes -1 where there is no limit
