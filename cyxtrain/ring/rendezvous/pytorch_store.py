"""PyTorch's TCP store, where PyTorch needs one: for NCCL and Gloo, and where torchrun's agent keeps it.

PyTorch's client hides why it cannot connect, and waits for ever where something else answers on the port: here errors
have the true cause, within the deadline. Its server believes everybody: it is closed to newcomers once all have come.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from cyxtrain.ring.rendezvous.store import RETRY_SECONDS, await_listener, not_ours, not_reached
from cyxtrain.ring.rendezvous.store_client import first_line
from cyxtrain.ring.wire.link import Deadline

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06  # "return 0 bytes of the packet": drop it


def host_store(host: str, timeout_seconds: float) -> tuple[TCPStore, socket.socket]:
    """Opens a store of PyTorch's on this machine, at a port that the system chooses.

    Args:
        host: Address at which the other ranks reach this one.
        timeout_seconds: Of each access.

    Returns:
        The store, and its listening socket, for `close_to_newcomers`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port, timeout = int(listener.getsockname()[1]), timedelta(seconds=timeout_seconds)
    own = listener.dup()
    store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, own


def close_to_newcomers(listener: socket.socket) -> None:
    """Lets nobody else connect to a listening socket: the kernel drops whatever reaches it, before PyTorch sees it.

    Connections that stand are not touched. Linux only (SO_ATTACH_FILTER, socket(7)); elsewhere the port stays open.
    """
    with listener, contextlib.suppress(OSError, AttributeError):
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(nothing))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


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
        failure = await_listener(address, port, deadline.left())
        if failure is not None:
            raise not_reached(rank, address, port, timeout_seconds, failure)
        opened = _connect(address, port, world_size, deadline)
        if isinstance(opened, TCPStore):
            return opened
        if deadline.left() <= RETRY_SECONDS:
            raise not_ours(rank, f"{address}:{port}", "" if opened is None else first_line(opened))
        time.sleep(RETRY_SECONDS)  # the store of a life before may be closing


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
