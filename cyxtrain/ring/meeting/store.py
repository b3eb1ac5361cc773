"""PyTorch's TCP store, opened so that whatever is wrong is said: the true cause, within the deadline.

PyTorch's own client hides why it cannot connect, and waits for ever where something else answers on the port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.link import Deadline
from cyxtrain.ring.meeting.board import first_line

_RETRY_SECONDS = 0.1
_LONGEST_TRY_SECONDS = 2.0


def host_store(address: str, port: int, world_size: int, timeout_seconds: float) -> TCPStore:
    """Opens the store on this machine, for all ranks.

    Args:
        address: Where the other ranks look for it.
        port: TCP port; it must be free.
        world_size: How many ranks will come.
        timeout_seconds: Until it gives up, and of each later access.

    Raises:
        RendezvousError: The port is in use, or must not be used; the address does not lead here.
    """
    try:
        listener = _listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = (
                f"rank 0 cannot wait for the others: port {port} is in use on this machine. "
                "Was rank 0 started twice, or does one of an earlier run still live? Where another training runs here, "
                "choose another port with MASTER_PORT (or master_port), on every rank."
            )
        else:
            message = f"rank 0 cannot wait at {address}:{port}: {_cause(error)}. Choose another MASTER_PORT."
        raise RendezvousError(message, rank=0) from error
    try:
        # PyTorch's server is its own first client, and gives up later than it was told.
        failure = _await_listener(address, port, timeout_seconds)
    except BaseException:
        listener.close()
        raise
    if failure is not None:
        listener.close()
        raise RendezvousError(
            f"rank 0 listens on port {port}, and {address}:{port} does not lead there: {failure}. "
            "MASTER_ADDR (or master_addr) must be the host name or an address of rank 0's machine.",
            rank=0,
        )
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(
        address, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _listen(address: str, port: int) -> socket.socket:
    if address == "localhost" or address.startswith("127."):  # a run on one machine stays inside it
        return socket.create_server(("127.0.0.1" if address == "localhost" else address, port), backlog=1024)
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
    deadline = Deadline(timeout_seconds)
    while True:
        failure = _await_listener(address, port, deadline.left())
        if failure is not None:
            raise RendezvousError(
                f"rank {rank} could not reach rank 0 at {address}:{port} within {timeout_seconds:.3g} s: {failure}. "
                "Is rank 0 running, are MASTER_ADDR and MASTER_PORT right, does a firewall stand between? "
                "timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long to wait.",
                rank=0,
            )
        opened = _connect(address, port, world_size, deadline)
        if isinstance(opened, TCPStore):
            return opened
        detail = "" if opened is None else f" ({first_line(opened)})"
        if deadline.left() <= _RETRY_SECONDS:
            break
        time.sleep(_RETRY_SECONDS)  # the store of a life before may be closing
    raise RendezvousError(
        f"rank {rank} found something at {address}:{port} that is not the meeting point of this run{detail}. "
        "Another program may use that port: choose another MASTER_PORT, the same on every rank.",
        rank=0,
    )


class StoreEnd:
    """A socket of rank 0 that closes after its store has: connections to it end then, which tells the other ranks.

    The store's own connections end before its port is free. A rank that joins again just then would reach a store
    that is about to close, and PyTorch's client would print pages of C++.

    Args:
        address: Of the store.

    Attributes:
        port: Where the others connect.
    """

    def __init__(self, address: str) -> None:
        self._socket = _listen(address, 0)
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Closes it; harmless twice."""
        self._socket.close()


class StoreWatch:
    """Another rank's connection to the `StoreEnd` of rank 0.

    Args:
        address: Of the store.
        port: Of its end.
    """

    def __init__(self, address: str, port: int) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._socket = socket.create_connection((address, port), _LONGEST_TRY_SECONDS)

    def await_end(self, address: str, deadline: Deadline) -> None:
        """Waits until the store has closed, if it is the one at this address.

        Args:
            address: Where a next store will open.
            deadline: When to give up.

        Raises:
            RendezvousError: It is still open at the deadline.
        """
        if self._socket is None or self._address != address:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            if not selector.select(max(deadline.left(), 0.001)):
                raise RendezvousError(
                    f"rank 0 is still in the world that this process has left, and has its port at {address}. To begin "
                    "a new world, every rank must leave the old one first (cyxtrain.finalize()).",
                    rank=0,
                )

    def close(self) -> None:
        """Closes the connection; harmless twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(address: str, port: int, world_size: int, deadline: Deadline) -> TCPStore | Exception | None:
    """Returns PyTorch's client, or why there is none; None where what listens there says nothing."""
    opened: list[TCPStore | Exception] = []

    def connect() -> None:
        left = timedelta(seconds=max(deadline.left(), 0.1))
        try:
            opened.append(TCPStore(address, port, world_size, False, left, wait_for_workers=False))
        except Exception as error:
            opened.append(error)

    # PyTorch's client never gives up where a silent stranger listens: it waits in a thread that we can leave.
    thread = threading.Thread(target=connect, name="cyxtrain-store", daemon=True)
    thread.start()
    thread.join(max(deadline.left(), 0.1) + 0.2)
    return opened[0] if opened else None


def _await_listener(address: str, port: int, timeout_seconds: float) -> str | None:
    """Waits until something listens there; returns None, or at the deadline why it could not be reached."""
    deadline = Deadline(timeout_seconds)
    tries = 0
    while True:
        tries += 1
        seconds = max(min(deadline.left(), _LONGEST_TRY_SECONDS), 0.01)
        try:
            with socket.create_connection((address, port), timeout=seconds) as probe:
                if probe.getsockname() != probe.getpeername():
                    return None
                cause = "connection refused"  # by chance the kernel gave us that very port, and we met ourselves
        except OSError as error:
            cause = _cause(error)
        if deadline.passed():
            return f"{cause} ({tries} tries)"
        time.sleep(min(deadline.left(), _RETRY_SECONDS))  # rank 0 may not listen yet


def _cause(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer (timed out)"
    if not error.errno or error.errno < 0:  # a name that cannot be resolved has a number of its own kind
        return error.strerror or str(error)
    return os.strerror(error.errno).lower()
