"""How many cores this process may use. Without PyTorch or NumPy: the launcher asks it, too, and needs neither."""

from __future__ import annotations

import os
import sys


def count_usable_cores() -> int:
    """Returns on how many cores this process may run, which taskset and Slurm restrict."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
