"""The sockets at which a rank listens: TCP for all ranks, and a Unix socket for those of its machine."""

from __future__ import annotations

import secrets
import socket
import sys
from dataclasses import dataclass

from torch.distributed import FileStore, Store, TCPStore

from cyxtrain.errors import RendezvousError, exhausted, reason_of
from cyxtrain.ring.rendezvous.handshake import place_of
from cyxtrain.ring.rendezvous.key_values import KeyValueStore
from cyxtrain.ring.rendezvous.store_client import root_of

_BACKLOG = 1024
"""If it overflows, TCP itself is slow to retry."""
_DEFAULT_ROUTE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the route to it is the default route."""


@dataclass
class Listeners:
    """The listening sockets of a rank, non-blocking."""

    tcp: socket.socket
    unix: socket.socket | None = None

    @property
    def unix_name(self) -> str:
        """The name of the abstract Unix socket as "@name"; empty if there is none."""
        return "" if self.unix is None else place_of(self.unix.getsockname())

    def close_unix(self) -> None:
        """Close the Unix socket, once all ranks have connected."""
        if self.unix is not None:
            self.unix.close()
            self.unix = None

    def close(self) -> None:
        """Close both. Idempotent."""
        self.close_unix()
        self.tcp.close()


def listen(rank: int, store: Store, transport: str) -> Listeners:
    """Listen where other ranks can reach this one, whose rank in the world is for errors.

    Raises RendezvousError if the address of this machine cannot be bound.
    """
    address = own_address(_store_host(store))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        if exhausted(error):
            raise
        raise RendezvousError(
            f"rank {rank} cannot listen at {address} ({reason_of(error)}), where others would reach it.",
            rank=rank,
        ) from error
    listener.setblocking(False)
    return Listeners(listener, listen_unix(transport))


def listen_unix(transport: str) -> socket.socket | None:
    """Listen at a Unix socket for the ranks of this machine; None if there is none or none is needed."""
    if transport == "tcp" or sys.platform != "linux":  # elsewhere such sockets leave files, and have small buffers
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0cyxtrain-{secrets.token_hex(8)}")  # abstract: leaves no file behind
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        return None
    return listener


def _store_host(store: Store) -> str:
    """Return the host of the store's server; this machine for stores without one."""
    store = root_of(store)
    if isinstance(store, FileStore):  # on a disk that machines share
        return _DEFAULT_ROUTE
    return store.host if isinstance(store, (KeyValueStore, TCPStore)) else "localhost"


def own_address(store_host: str) -> str:
    """Return the address of this machine that others can reach: the one it uses towards the store.

    No packet is sent: connecting a UDP socket only asks the routing table.
    """
    if store_host in ("localhost", "::1") or store_host.startswith("127."):
        return "127.0.0.1"
    # Many systems give their own host name a loopback address, useless to others: then use the default route.
    for target in (store_host, _DEFAULT_ROUTE):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
        except OSError as error:
            if exhausted(error):
                raise
            continue
        if own != "::1" and not own.startswith("127."):
            return own
    return "127.0.0.1"
