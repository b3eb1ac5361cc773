"""Where a rank listens: at the address of this machine that others reach, and at a Unix socket for ranks of it."""

from __future__ import annotations

import secrets
import socket
import sys

from torch.distributed import FileStore, Store, TCPStore

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.key_values import KeyValueStore
from cyxtrain.ring.rendezvous.store_client import root_of

_BACKLOG = 1024
"""Connections that wait while this rank does something else; where they overflow, TCP itself is slow to try again."""
_DEFAULT_ROUTE = "192.0.2.1"
"""An address of nobody's (RFC 5737): the way to it is the way to everybody."""


def listen(name: int, store: Store) -> socket.socket:
    """Returns a TCP socket at which others reach this rank.

    Args:
        name: How errors call this rank.
        store: At which the ranks meet.

    Raises:
        RendezvousError: It cannot listen there.
    """
    address = own_address(_store_host(store))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise RendezvousError(
            f"rank {name} cannot listen at {address} ({error.strerror or error}), where others would reach it.",
            rank=name,
        ) from error
    listener.setblocking(False)
    return listener


def listen_near(transport: str) -> socket.socket | None:
    """Returns a Unix socket for the other ranks of this machine; None where there is none, or none is wanted."""
    if transport == "tcp" or sys.platform != "linux":  # elsewhere such sockets leave files, and have small buffers
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0cyxtrain-{secrets.token_hex(8)}")  # abstract: no file can be left behind
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        return None
    return listener


def _store_host(store: Store) -> str:
    """Returns the host of the store's server; this machine for stores that have none."""
    store = root_of(store)
    if isinstance(store, FileStore):  # on a disk that machines share
        return _DEFAULT_ROUTE
    return store.host if isinstance(store, (KeyValueStore, TCPStore)) else "localhost"


def own_address(store_host: str) -> str:
    """Returns the address of this machine that others can reach: the one it uses towards the store.

    No packet is sent: connecting a UDP socket only asks the routing table.
    """
    if store_host in ("localhost", "::1") or store_host.startswith("127."):
        return "127.0.0.1"
    # Many systems give their own host name a loopback address, useless to others: then the default route's is taken.
    for target in (store_host, _DEFAULT_ROUTE):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        if own != "::1" and not own.startswith("127."):
            return own
    return "127.0.0.1"
