"""Who a rank says it is, and who may come in: members of the same meeting, and nobody else."""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.frames import PROTOCOL_VERSION

HELLO = struct.Struct(">2sBBIII16s")
_HELLO_SECONDS = 5.0
"""How long a stranger may take to say who it is."""
_MAX_STRANGERS = 256
"""How many may do so at a time; then the one that has been silent for longest must go."""


class Role(enum.IntEnum):
    """What a connection between two ranks is for."""

    COLLECTIVES = 1
    MESSAGES = 2
    CONTROL = 3


@dataclass(frozen=True)
class Identity:
    """Who a rank says it is; all but the rank must be the same on both sides.

    Attributes:
        run: 16 random bytes that rank 0 made for this meeting.
        generation: Of the group.
        rank: This rank.
        names: By rank, how errors call it.
    """

    run: bytes
    generation: int
    rank: int
    names: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """How many ranks meet."""
        return len(self.names)

    def hello(self, role: Role) -> bytes:
        """Returns what is said first on a new connection, by both sides."""
        return HELLO.pack(b"CX", PROTOCOL_VERSION, role, self.generation, self.rank, self.world_size, self.run)

    def recognize(self, hello: bytes | bytearray) -> tuple[int, Role] | None:
        """Returns (rank, role) of a member of this meeting; None for a stranger."""
        magic, version, role, generation, rank, world_size, run = HELLO.unpack(hello)
        same = (magic, version, generation, world_size, run) == (
            b"CX",
            PROTOCOL_VERSION,
            self.generation,
            self.world_size,
            self.run,
        )
        if not same or rank >= self.world_size or role not in iter(Role):
            return None
        return rank, Role(role)


class _Door:
    """Takes connections at the listener until all members have come; a stranger costs 32 bytes and five seconds.

    Args:
        listener: Non-blocking.
        identity: Of this rank.
        admit: Called with (rank, role, socket) of each member.
    """

    def __init__(
        self, listener: socket.socket, identity: Identity, admit: Callable[[int, Role, socket.socket], None]
    ) -> None:
        self._identity = identity
        self._admit = admit
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._heard: dict[socket.socket, bytearray] = {}
        self._patience: dict[socket.socket, float] = {}

    def serve(self, deadline: float) -> None:
        """Waits for a connection or for words on one, and deals with them."""
        soonest = min([deadline, *self._patience.values()])
        for key, _ in self._selector.select(max(soonest - time.monotonic(), 0.001)):
            if key.fileobj is self._listener:
                self._welcome()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._heard:
                self._listen_to(key.fileobj)
        for sock in [sock for sock, until in self._patience.items() if until <= time.monotonic()]:
            self._forget(sock).close()

    def close(self) -> None:
        """Turns away whoever has not said who it is."""
        for sock in list(self._heard):
            self._forget(sock).close()
        self._selector.close()

    def _welcome(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has left again
        if len(self._heard) >= _MAX_STRANGERS:
            self._forget(next(iter(self._heard))).close()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)
        self._heard[sock] = bytearray()
        self._patience[sock] = time.monotonic() + _HELLO_SECONDS

    def _listen_to(self, sock: socket.socket) -> None:
        heard = self._heard[sock]
        try:
            part = sock.recv(HELLO.size - len(heard))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        heard += part
        if part and len(heard) < HELLO.size:
            return
        self._forget(sock)
        member = self._identity.recognize(heard) if part else None
        if member is None:
            sock.close()
            return
        self._admit(*member, sock)

    def _forget(self, sock: socket.socket) -> socket.socket:
        self._selector.unregister(sock)
        del self._heard[sock], self._patience[sock]
        return sock


def accept_all(
    listener: socket.socket, identity: Identity, sockets: dict[Role, dict[int, socket.socket]], deadline: float
) -> None:
    """Takes the connections of all higher ranks into `sockets`.

    Raises:
        RendezvousError: Some had not come at the deadline; they are named.
    """
    awaited = {(rank, role) for rank in range(identity.rank + 1, identity.world_size) for role in Role}

    def admit(rank: int, role: Role, sock: socket.socket) -> None:
        if (rank, role) not in awaited:
            sock.close()
            return
        awaited.discard((rank, role))
        sockets[role][rank] = sock
        with contextlib.suppress(OSError):  # it has ended again: its first use will say so
            sock.send(identity.hello(role))  # 32 bytes into an empty buffer: it cannot block

    door = _Door(listener, identity, admit)
    try:
        while awaited:
            if time.monotonic() >= deadline:
                missing = sorted({identity.names[rank] for rank, _ in awaited})
                whom = ", ".join(f"rank {rank}" for rank in missing)
                raise RendezvousError(
                    f"{whom} did not connect to rank {identity.names[identity.rank]} before the deadline. Look at "
                    "the output of the missing ranks; across machines, firewalls must allow TCP between all ranks.",
                    rank=missing[0],
                )
            door.serve(deadline)
    finally:
        door.close()
