"""Ranks that share this machine: their cores, their meeting point, the environment of each."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping

from cyxtrain.environment import schedulers
from cyxtrain.environment.cpu import count_usable_cores

_MOST_RANKS = 8
"""With more, each has so little to do that they mostly wait for each other."""


def launch_environment(
    environment: Mapping[str, str],
    local_rank: int,
    num_ranks: int,
    port: str,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    address: str = "127.0.0.1",
) -> dict[str, str]:
    """Returns the environment of one rank; `OMP_NUM_THREADS` and `PYTHONUNBUFFERED` that are set are kept.

    Without its share of the cores each rank would start as many threads as there are cores, and N ranks would
    slow each other down.

    Args:
        environment: What it begins with.
        local_rank: Among those of this machine.
        num_ranks: On each machine.
        port: At which the ranks meet.
        nnodes: How many machines there are.
        node_rank: Which of them this is.
        address: Of the first one.
    """
    return {
        "OMP_NUM_THREADS": str(cores_of_each(num_ranks, environment)),
        "PYTHONUNBUFFERED": "1",
        **{name: value for name, value in environment.items() if value or name != "OMP_NUM_THREADS"},
        "RANK": str(node_rank * num_ranks + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nnodes * num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def usable_cores(variables: Mapping[str, str]) -> int:
    """Returns how many cores affinity, cgroup quotas and the scheduler leave to this process and those that it starts.

    Args:
        variables: The environment.
    """
    cores = count_usable_cores()
    return min(cores, schedulers.cores_left(variables) or cores)


def cores_of_each(num_ranks: int, variables: Mapping[str, str]) -> int:
    """Returns the share of this machine's cores that each of so many ranks has: at least one."""
    return max(1, usable_cores(variables) // num_ranks)


def ranks_by_cores(variables: Mapping[str, str]) -> int:
    """Returns how many ranks there are where nobody says how many and none has a GPU: one per core, up to 8."""
    return min(usable_cores(variables), _MOST_RANKS)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Lends a TCP port that is free on all addresses of this machine, as the kernel picks one.

    On Linux nobody else gets it meanwhile: it stays bound, and only who asks for it by its number, and sets
    SO_REUSEADDR as the store of rank 0 does, may listen there. Elsewhere that is not possible, and another process may
    get it before rank 0 listens: seldom, and then joining fails with an error that names the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port
