"""Checks of what the ring needs from a machine and its network, for `cyxtrain doctor`; nothing joins."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import ClosedError, dial_once, socket_address
from cyxtrain.ring.rendezvous.handshake import HandshakeError, Hello, RefusedError, Role
from cyxtrain.ring.rendezvous.listen import listen, listen_unix
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.rendezvous import own_record
from cyxtrain.ring.wire.link import Deadline, watch_over

_CONNECT_SECONDS = 1.0


class RankProbe:
    """A rank's listening sockets and its connections to others, as in a rendezvous, without joining."""

    def __init__(self, store: Store, rank: int, world_size: int, options: RingOptions) -> None:
        self._listeners = listen(rank, store, options.transport)
        self.record = own_record(rank, world_size, self._listeners, options)  # how others reach this rank
        self._own = Hello("", 0, Role.COLLECTIVES, rank, world_size, checksums=False)
        self._key = b""
        self.accepted: dict[int, socket.socket] = {}  # by rank; the caller closes the sockets that it takes out
        self._acceptor: Acceptor | None = None

    def start(self, run: str, key: bytes) -> None:
        """Accept, during `serve`, connections of ranks that know the name of the run and the key."""
        self._own = replace(self._own, run=run)
        self._key = key
        self._acceptor = self._listeners.serve(f"rank {self._own.rank}", key, self._authorize, self._accept)

    def serve(self, seconds: float = 0.0) -> None:
        """Accept connections for up to `seconds`."""
        assert self._acceptor is not None
        self._acceptor.serve(seconds)

    def dial(self, peer: int, record: RankRecord, deadline: Deadline, poll: Callable[[], None]) -> socket.socket:
        """Connect to a rank over TCP; `poll` is called while this waits.

        Raises:
            ConnectionAbortedError: The address does not belong to a rank of this run; the message has the reason.
            ConnectionResetError: The other side closed the connection.
            ConnectionRefusedError, TimeoutError, OSError: The address refused, did not answer, or cannot be reached.
        """
        hello = replace(self._own, to_rank=peer)
        try:
            sock = dial_once(socket_address(record, unix=False), hello, self._key, deadline, poll)
        except (RefusedError, HandshakeError) as error:
            raise ConnectionAbortedError(str(error)) from None
        except ClosedError as error:
            raise ConnectionResetError(str(error)) from None
        watch_over(sock)
        return sock

    def refuses(self, record: RankRecord) -> bool:
        """Return whether a rank's port refuses connections; False if it is unknown."""
        error = _connection_error(*socket_address(record, unix=False))
        return isinstance(error, ConnectionRefusedError)

    def transport_to(self, record: RankRecord) -> str:
        """Return the transport that the ring would use to a rank: "unix" or "tcp"; "" between machines."""
        if record.machine != self.record.machine:
            return ""
        if not (self.record.unix and record.unix):
            return "tcp"
        if _connection_error(*socket_address(record, unix=True)) is not None:
            return "tcp"
        return "unix"

    def close(self) -> None:
        """Close every socket."""
        for sock in self.accepted.values():
            sock.close()
        self._listeners.close()

    def _authorize(self, hello: Hello) -> str:
        return "" if hello.run == self._own.run else "it belongs to another run"

    def _accept(self, hello: Hello, sock: socket.socket) -> None:
        if hello.rank in self.accepted:
            self.accepted[hello.rank].close()
        watch_over(sock)
        self.accepted[hello.rank] = sock


def try_transports() -> dict[str, str]:
    """Return for each transport, the fastest first, why it does not work here; "": it works."""
    return {"unix": _why_no_unix(), "tcp": _why_unreachable(socket.create_server(("127.0.0.1", 0)))}


def _why_no_unix() -> str:
    listener = listen_unix("auto")
    if listener is None:
        return "Linux only" if sys.platform != "linux" else "not available on this system"
    return _why_unreachable(listener)


def _why_unreachable(listener: socket.socket) -> str:
    """Connect to a listening socket, and close it; return why it does not accept connections, or ""."""
    with listener:
        error = _connection_error(listener.family, listener.getsockname())
    return str(error or "")


def _connection_error(family: int, address: Any) -> OSError | None:
    """Return why a socket does not accept connections, or None."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        try:
            sock.connect(address)
        except OSError as error:
            return error
    return None
