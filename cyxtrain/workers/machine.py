"""What ranks on this machine share: cores, the rendezvous port, environment variables."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping

from cyxtrain.environment import schedulers
from cyxtrain.environment.cpu import count_usable_cores

# With more ranks each has so little work that they mostly wait for each other.
_MAX_DEFAULT_RANKS = 8


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
    """Return one rank's environment; keep `OMP_NUM_THREADS` and `PYTHONUNBUFFERED` if they are set.

    The ranks meet at `address`, which is machine 0, and `port`; each machine has `num_ranks` of them.
    """
    # By default every rank would start a thread for each core of the machine.
    threads = environment.get("OMP_NUM_THREADS") or str(cores_per_rank(num_ranks, environment))
    return {
        "PYTHONUNBUFFERED": "1",
        **environment,
        "OMP_NUM_THREADS": threads,
        "RANK": str(node_rank * num_ranks + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nnodes * num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def usable_cores(environment: Mapping[str, str]) -> int:
    """Return how many cores affinity, cgroup quotas and the scheduler allow this process and its children."""
    cores = count_usable_cores()
    return min(cores, schedulers.cores_left(environment) or cores)


def cores_per_rank(num_ranks: int, environment: Mapping[str, str]) -> int:
    """Return each rank's share of this machine's usable cores, at least one."""
    return max(1, usable_cores(environment) // num_ranks)


def ranks_by_cores(environment: Mapping[str, str]) -> int:
    """Return the default number of ranks without GPUs: one per core, up to 8."""
    return min(usable_cores(environment), _MAX_DEFAULT_RANKS)


@contextlib.contextmanager
def free_port(*, for_any_program: bool = False) -> Iterator[int]:
    """Reserve a free TCP port.

    On Linux it stays bound: only a process of this user that asks for this number with SO_REUSEPORT, as rank 0's store
    does, can listen there. With `for_any_program`, any process that asks for it with SO_REUSEADDR can, as PyTorch's
    store does. On other systems another process may take it before rank 0 listens; the error then names the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        if sys.platform == "linux":
            option = socket.SO_REUSEADDR if for_any_program else socket.SO_REUSEPORT
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(("", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port
