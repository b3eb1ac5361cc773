"""What a process finds on its machine: versions, cores, memory, GPUs, and the interface of an address."""

from __future__ import annotations

import contextlib
import platform
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.doctor.terminal import size
from cyxtrain.environment import accelerator, process_env
from cyxtrain.workers.machine import usable_cores

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Where a rank runs; what is unknown is empty."""

    host: str
    interface: str
    """Of the address at which the rank listens."""
    cores: int
    memory: str
    gpus: str
    """Such as "2 x NVIDIA H200", or "none"."""
    cyxtrain: str
    torch: str
    python: str


def this_machine(address: str = "") -> Machine:
    """Return this process's machine; `address` is where it listens."""
    counts = Counter(name for _, name, _ in accelerator.all_with_memory())
    return Machine(
        host=socket.gethostname(),
        interface=interface_of(address),
        cores=usable_cores(process_env.to_pass_on()),
        memory=size(memory_bytes()),
        gpus=", ".join(f"{count} x {name}" for name, count in counts.items()) or "none",
        cyxtrain=library_versions()["cyxtrain"],
        torch=torch.__version__,
        python=platform.python_version(),
    )


def memory_bytes() -> int:
    """Return how much memory the machine and the container allow this process."""
    import psutil

    found = [int(psutil.virtual_memory().total)]
    for file in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(Path(file).read_text()))
    return min(found)


def interface_of(address: str) -> str:
    """Return the network interface that has an address; empty if none has."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((str(name) for name, found in interfaces if address in {each.address for each in found}), "")
