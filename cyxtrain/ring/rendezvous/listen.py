"""The sockets at which a rank listens: TCP for all ranks, a Unix socket for ranks of its machine."""

from __future__ import annotations

import secrets
import selectors
import socket
import sys
from collections.abc import Callable

from torch.distributed import FileStore, Store, TCPStore

from cyxtrain.errors import RendezvousError, exhausted, reason_of
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import family_of
from cyxtrain.ring.rendezvous.handshake import Hello, place_of
from cyxtrain.ring.rendezvous.key_values import KeyValueStore
from cyxtrain.ring.rendezvous.store_client import root_of

_BACKLOG = 1024
"""If it overflows, TCP itself is slow to retry."""
_DEFAULT_ROUTE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the route to it is the default route."""


class Listeners:
    """The non-blocking listening sockets of a rank, and their acceptor, which serves all generations.

    The data of each socket in `selector` is the function to call.
    """

    def __init__(self, tcp: socket.socket, unix: socket.socket | None = None) -> None:
        self.tcp = tcp
        self.unix = unix
        self.selector = selectors.DefaultSelector()
        self.acceptor: Acceptor | None = None

    @property
    def unix_name(self) -> str:
        """The name of the abstract Unix socket as "@name"; empty without one."""
        return "" if self.unix is None else place_of(self.unix.getsockname())

    def serve(
        self,
        name: str,
        key: bytes,
        authorize: Callable[[Hello], str | None],
        accept: Callable[[Hello, socket.socket], None],
    ) -> Acceptor:
        """Accept connections from now on; the arguments are the same as of `Acceptor`."""
        if self.acceptor is None:
            self.acceptor = Acceptor(self._sockets(), name, key, authorize, accept, self.selector)
        else:
            self.acceptor.judge_by(authorize, accept)
        return self.acceptor

    def close_unix(self) -> None:
        """Close the Unix socket, once all ranks have connected."""
        if self.unix is not None:
            if self.acceptor is not None:
                self.acceptor.remove(self.unix)
            self.unix.close()
            self.unix = None

    def close(self) -> None:
        """Close everything. Idempotent."""
        if self.acceptor is not None:
            self.acceptor.close()
            self.acceptor = None  # breaks a reference cycle: it refers to the connector, which refers to this object
        self._close_files()

    def abandon(self) -> None:
        """Close everything in a forked child, without affecting the parent, which shares the sockets."""
        if self.acceptor is not None:
            self.acceptor.abandon()
        self._close_files()

    def _close_files(self) -> None:
        for sock in self._sockets():
            sock.close()
        self.selector.close()

    def _sockets(self) -> list[socket.socket]:
        return [self.tcp] if self.unix is None else [self.tcp, self.unix]


def listen(rank: int, store: Store, transport: str) -> Listeners:
    """Listen where other ranks can reach this one; errors name its global `rank`.

    Raises RendezvousError if the address of this machine cannot be bound.
    """
    address = own_address(_store_host(store))
    try:
        listener = socket.create_server((address, 0), family=family_of(address), backlog=_BACKLOG)
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
    """Listen at a Unix socket for the ranks of this machine; return None if unavailable or not needed."""
    if transport == "tcp" or sys.platform != "linux":  # elsewhere, such sockets leave files and have small buffers
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
    if isinstance(store, (KeyValueStore, TCPStore)):
        return store.host
    if isinstance(store, FileStore):  # on a disk that machines share
        return _DEFAULT_ROUTE
    return "localhost"


def own_address(store_host: str) -> str:
    """Return the address of this machine that others can reach: the one that it uses towards the store."""
    if store_host == "localhost" or _is_loopback(store_host):
        return "127.0.0.1"
    # Many systems give their own host name a loopback address, useless to others: then use the default route.
    for target in (store_host, _DEFAULT_ROUTE):
        try:
            address = _local_address_towards(target)
        except OSError as error:
            if exhausted(error):
                raise
            continue
        if not _is_loopback(address):
            return address
    return "127.0.0.1"


def _local_address_towards(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends no packet: connecting a UDP socket only asks the routing table
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
