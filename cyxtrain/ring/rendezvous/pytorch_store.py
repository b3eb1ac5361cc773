"""PyTorch's TCPStore, for backends that need one (NCCL, Gloo) and for torchrun, whose agent keeps it.

PyTorch's client hides why it cannot connect, and waits for ever if another program answers on the port: here errors
have the true cause, within the deadline. Its server trusts everybody: it is closed once all ranks are connected.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import struct
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore

from cyxtrain.errors import reason_of
from cyxtrain.ring.rendezvous.key_values import KeyValueStore
from cyxtrain.ring.rendezvous.listen import own_address
from cyxtrain.ring.rendezvous.store import RETRY_SECONDS, await_listener, foreign_service, not_reached
from cyxtrain.ring.rendezvous.store_client import attempt_in_thread, root_of
from cyxtrain.ring.wire.link import Deadline

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06  # "return 0 bytes of the packet": drop it
_KEY = "pytorch/store"
"""Where rank 0 writes the address."""


def share_tcp_store(store: Store, rank: int, world_size: int, deadline: Deadline) -> Store:
    """Return a store of PyTorch that all ranks share, for threads of C++. All ranks call it.

    It is `store`, that of the run, if that is one of PyTorch. Once all are connected nobody else gets in.
    """
    ours = root_of(store)
    if not isinstance(ours, KeyValueStore):
        return store
    seconds = max(deadline.left(), 0.001)
    ours.set_timeout(timedelta(seconds=seconds))
    if rank == 0:
        shared, listener = host_store(own_address(ours.host), seconds)
        store.set(_KEY, f"{shared.host} {shared.port}")
    else:
        host, port = store.get(_KEY).decode().split()
        shared = reach_tcp_store(rank, host, int(port), world_size, seconds)
    store.set(f"{_KEY}/{rank}", "connected")
    store.wait([f"{_KEY}/{other}" for other in range(world_size)])
    if rank == 0:
        close_to_newcomers(listener)
    return shared


def host_store(host: str, timeout_seconds: float) -> tuple[TCPStore, socket.socket]:
    """Open a store of PyTorch at a free port of this machine; return it and its listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port, timeout = int(listener.getsockname()[1]), timedelta(seconds=timeout_seconds)
    own = listener.dup()
    store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, own


def close_to_newcomers(listener: socket.socket) -> None:
    """Let nobody else connect: the kernel drops what reaches the listening socket, and keeps open connections.

    Linux only (SO_ATTACH_FILTER, socket(7)); elsewhere the port stays open.
    """
    with listener, contextlib.suppress(OSError, AttributeError):
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(nothing))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def reach_tcp_store(rank: int, address: str, port: int, world_size: int, timeout_seconds: float) -> TCPStore:
    """Connect to a store of PyTorch, which may open later.

    Raises RendezvousError with the true cause, and how often it was tried.
    """
    deadline = Deadline(timeout_seconds)
    while True:
        failure = await_listener(address, port, deadline.left())
        if failure is not None:
            raise not_reached(rank, address, port, timeout_seconds, failure)
        left = timedelta(seconds=max(deadline.left(), 0.1))
        connect = functools.partial(TCPStore, address, port, world_size, False, left, wait_for_workers=False)
        opened = attempt_in_thread(connect, left.total_seconds() + 0.2)
        if isinstance(opened, TCPStore):
            return opened
        if deadline.left() <= RETRY_SECONDS:
            detail = "" if isinstance(opened, TimeoutError) else reason_of(opened)
            raise foreign_service(rank, f"{address}:{port}", detail)
        time.sleep(RETRY_SECONDS)  # the previous store may be closing
