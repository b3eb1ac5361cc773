"""Try what the ring needs of a machine and of the network, without joining: for `cyxtrain doctor`."""

from __future__ import annotations

import contextlib
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
    """A rank's listening sockets and its connections to others, as in a rendezvous; nothing is decided or joined."""

    def __init__(self, store: Store, rank: int, world_size: int, options: RingOptions) -> None:
        self._listeners = listen(rank, store, options.transport)
        self.record = own_record(rank, world_size, self._listeners, options)  # how others reach this rank
        self._own = Hello("", 0, Role.COLLECTIVES, rank, world_size, checksums=False)
        self._key = b""
        self.accepted: dict[int, socket.socket] = {}  # the caller closes those that it takes out
        self._acceptor: Acceptor | None = None

    def start(self, run: str, key: bytes) -> None:
        """Accept connections of the ranks that know the name of the run and the key, whenever this rank serves."""
        self._own, self._key = replace(self._own, run=run), key
        self._acceptor = self._listeners.serve(f"rank {self._own.rank}", key, self._authorize, self._accept)

    def serve(self, seconds: float = 0.0) -> None:
        """Accept connections, for at most so long."""
        assert self._acceptor is not None
        self._acceptor.serve(seconds)

    def dial(self, peer: int, record: RankRecord, deadline: Deadline, poll: Callable[[], None]) -> socket.socket:
        """Connect to a rank over TCP; `poll` is called while this waits.

        Raises:
            ConnectionAbortedError: What answers is no rank of this run; the text says why.
            ConnectionResetError: It closed the connection.
            OSError: It cannot be reached; ConnectionRefusedError, TimeoutError: refused, no answer.
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
        """Return whether a rank's port refuses connections; False if that cannot be told."""
        return isinstance(_connection_error(*socket_address(record, unix=False)), ConnectionRefusedError)

    def transport_to(self, record: RankRecord) -> str:
        """Return what the ring would use from this rank: unix or tcp; empty between machines."""
        if record.machine != self.record.machine:
            return ""
        if not (self.record.unix and record.unix) or _connection_error(*socket_address(record, unix=True)):
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
    """Return for each transport, the fastest first, why it does not work here; empty: it works."""
    other = "Linux only" if sys.platform != "linux" else "not available on this system"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tcp = _connection_error(listener.family, listener.getsockname())
    near = listen_unix("auto")
    with near or contextlib.nullcontext():
        unix = _connection_error(near.family, near.getsockname()) if near else other
    return {"unix": str(unix or ""), "tcp": str(tcp or "")}


def _connection_error(family: int, address: Any) -> OSError | None:
    """Return why a socket does not accept connections."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        try:
            sock.connect(address)
        except OSError as error:
            return error
    return None
