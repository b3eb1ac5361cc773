"""PyTorch's TCP store, opened so that whatever is wrong is said: the true cause, within the deadline.

PyTorch's own client hides why it cannot connect, and waits for ever where something else answers on the port.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from cyxtrain.errors import RendezvousError

_RETRY_SECONDS = 0.1
_LONGEST_TRY_SECONDS = 2.0


def host_store(address: str, port: int, world_size: int, timeout_seconds: float) -> TCPStore:
    """Opens the store on this machine, for all ranks.

    Args:
        address: Where the other ranks look for it.
        port: TCP port; it must be free.
        world_size: How many ranks will come.
        timeout_seconds: Of each later access.

    Raises:
        RendezvousError: The port is in use, or must not be used.
    """
    try:
        listener = _listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = (
                f"rank 0 cannot wait for the others: port {port} is in use on this machine. "
                "Another training may run here: choose another port with MASTER_PORT (or master_port), on every rank."
            )
        else:
            message = f"rank 0 cannot wait at {address}:{port}: {_cause(error)}. Choose another MASTER_PORT."
        raise RendezvousError(message, rank=0) from error
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(
        address, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _listen(address: str, port: int) -> socket.socket:
    if address == "localhost" or address.startswith("127."):
        return socket.create_server(("127.0.0.1", port), backlog=1024)  # a run on one machine stays inside it
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def reach_store(rank: int, address: str, port: int, world_size: int, timeout_seconds: float) -> TCPStore:
    """Connects to the store of rank 0, which may start later.

    Args:
        rank: This rank, for the error.
        address: Host name or address of rank 0.
        port: Its port.
        world_size: How many ranks there are.
        timeout_seconds: Until it gives up.

    Raises:
        RendezvousError: The true cause, and how often it was tried.
    """
    deadline = time.monotonic() + timeout_seconds
    _await_listener(rank, address, port, timeout_seconds)
    opened: list[TCPStore | Exception] = []

    def connect() -> None:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
        try:
            opened.append(TCPStore(address, port, world_size, False, left, wait_for_workers=False))
        except Exception as error:
            opened.append(error)

    # PyTorch's client never gives up where a silent stranger listens: it waits in a thread that we can leave.
    thread = threading.Thread(target=connect, name="cyxtrain-store", daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0.1) + 0.2)
    if opened and isinstance(opened[0], TCPStore):
        return opened[0]
    detail = f" ({str(opened[0]).splitlines()[0]})" if opened and isinstance(opened[0], Exception) else ""
    raise RendezvousError(
        f"rank {rank} found something at {address}:{port} that is not the meeting point of this run{detail}. "
        "Another program may use that port: choose another MASTER_PORT, the same on every rank.",
        rank=0,
    )


def _await_listener(rank: int, address: str, port: int, timeout_seconds: float) -> None:
    """Waits until something listens there; at the deadline says why it could not be reached."""
    deadline = time.monotonic() + timeout_seconds
    tries = 0
    cause = "no answer"
    while True:
        tries += 1
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(min(left, _LONGEST_TRY_SECONDS), 0.01)).close()
            return
        except OSError as error:
            cause = _cause(error)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(left, _RETRY_SECONDS))  # rank 0 may not listen yet
    raise RendezvousError(
        f"rank {rank} could not reach rank 0 at {address}:{port} within {timeout_seconds:g} s: {cause} "
        f"({tries} tries). Is rank 0 running, are MASTER_ADDR and MASTER_PORT right, does a firewall stand between? "
        "timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long to wait.",
        rank=0,
    )


def _cause(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer (timed out)"
    return os.strerror(error.errno).lower() if error.errno else str(error)
