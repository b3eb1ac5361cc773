"""What a process finds where it runs: versions, cores, memory, GPUs, and the interface of an address."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.environment import process_env
from cyxtrain.progress import tables
from cyxtrain.workers.machine import usable_cores

_SIOCGIFADDR = 0x8915
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Where a rank runs.

    Attributes:
        host: Its name.
        interface: That has the address at which the rank listens; "": unknown.
        cores: On how many it may run.
        memory: In words; "": unknown.
        gpus: In words: "2 x NVIDIA H200", or "none".
        cyxtrain: Its version; as the next two.
        torch: PyTorch's.
        python: Python's.
    """

    host: str
    interface: str
    cores: int
    memory: str
    gpus: str
    cyxtrain: str
    torch: str
    python: str


def this_machine(address: str = "") -> Machine:
    """Returns what this process finds.

    Args:
        address: At which it listens.
    """
    counts, memory = Counter(name for name, _ in gpus()), memory_bytes()
    return Machine(
        host=socket.gethostname(),
        interface=interface_of(address),
        cores=usable_cores(process_env.to_pass_on()),
        memory=tables.size(memory) if memory else "",
        gpus=", ".join(f"{count} x {name}" for name, count in counts.items()) or "none",
        cyxtrain=library_versions()["cyxtrain"],
        torch=torch.__version__,
        python=platform.python_version(),
    )


def memory_bytes() -> int:
    """Returns how much memory this process may have, by its machine and its container; 0: unknown."""
    found = []
    with contextlib.suppress(ValueError, OSError, AttributeError):  # Windows has no such thing
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(Path(file).read_text()))
    return min(found, default=0)


def gpus() -> list[tuple[str, int]]:
    """Returns (name, bytes of memory) of each GPU that this process sees."""
    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    return [(str(properties.name), int(properties.total_memory)) for properties in found]


def interface_of(address: str) -> str:
    """Returns the network interface that has an address; "" where nobody can tell. Linux only."""
    if sys.platform != "linux" or not address:
        return ""
    with contextlib.suppress(OSError, ValueError):
        if ":" in address:
            packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
            lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
            return next((fields[-1] for fields in lines if fields[0] == packed), "")
        wanted = socket.inet_aton(address)
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == wanted), "")
    return ""


def _address_of(interface: str) -> bytes:
    """Returns the IPv4 address of an interface, as netdevice(7) tells it; empty where it has none."""
    import fcntl  # there is none on Windows

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        return fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24]
    return b""
