"""Ranks find each other through the store, and connect every pair.

Each rank listens on a port of its own, publishes where, reads where all others listen, connects to the lower
ranks and is connected to by the higher ones: three connections a pair, for collectives, for messages, and for
what is said beside them. Table and listener are kept: survivors can meet again when the store has died.

Cost per rank: three sockets to each other rank and one to listen; two store round trips and one key per rank.
"""

from __future__ import annotations

import enum
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.frames import PROTOCOL_VERSION

_HELLO = struct.Struct(">2sBBIII16s")
_HELLO_SECONDS = 5.0
"""How long a stranger may take to say who it is."""
_STORE_ERRORS = (RuntimeError,)  # DistStoreError and DistNetworkError are RuntimeErrors


class StoreLostError(RendezvousError):
    """The store has gone while ranks were meeting; another one may open in its place."""


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
        world_size: How many ranks meet.
    """

    run: bytes
    generation: int
    rank: int
    world_size: int

    def hello(self, role: Role) -> bytes:
        """Returns what is said first on a new connection, by both sides."""
        return _HELLO.pack(b"CX", PROTOCOL_VERSION, role, self.generation, self.rank, self.world_size, self.run)

    def recognize(self, hello: bytes | bytearray) -> tuple[int, Role] | None:
        """Returns (rank, role) of a member of this meeting; None for a stranger."""
        magic, version, role, generation, rank, world_size, run = _HELLO.unpack(hello)
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


@dataclass
class Meeting:
    """What a rank has after it met the others.

    Attributes:
        table: Host and port at which each rank listens, by rank.
        listener: Our own; None in a world of one.
        sockets: For each role, the connection to each other rank.
    """

    table: list[tuple[str, int]] = field(default_factory=list)
    listener: socket.socket | None = None
    sockets: dict[Role, dict[int, socket.socket]] = field(default_factory=lambda: {role: {} for role in Role})

    def close(self) -> None:
        """Closes every socket; harmless twice."""
        for connected in self.sockets.values():
            for sock in connected.values():
                sock.close()
        if self.listener is not None:
            self.listener.close()


def meet(store: Store, rank: int, world_size: int, timeout_seconds: float, generation: int = 0) -> Meeting:
    """Connects this rank with all others.

    Args:
        store: Shared by all ranks, with keys of its own for this meeting.
        rank: This rank.
        world_size: How many ranks meet.
        timeout_seconds: Until it gives up.
        generation: Of the group that is made.

    Raises:
        RendezvousError: Ranks are missing at the deadline (they are named), a rank is there twice, ranks
            disagree on the world size, or a rank cannot be reached.
    """
    meeting = Meeting()
    if world_size == 1:
        return meeting  # a world of one binds no port
    deadline = time.monotonic() + timeout_seconds
    try:
        meeting.listener = _listen(_own_address(_store_host(store)), world_size)
        run, meeting.table = _publish(store, rank, world_size, meeting.listener, deadline)
        identity = Identity(run, generation, rank, world_size)
        for peer in range(rank):
            for role in Role:
                meeting.sockets[role][peer] = _connect(meeting.table[peer], peer, identity, role, deadline)
        _accept_all(meeting, identity, deadline)
    except BaseException:
        meeting.close()
        raise
    return meeting


def _publish(
    store: Store, rank: int, world_size: int, listener: socket.socket, deadline: float
) -> tuple[bytes, list[tuple[str, int]]]:
    """Says where this rank listens; returns the run's random bytes and where every rank listens."""
    try:
        if store.add(f"claims/{rank}", 1) > 1:
            raise RendezvousError(
                f"rank {rank} is taken: another process has joined as rank {rank} already. "
                "Give every process a RANK of its own; a store can be used for one start only.",
                rank=rank,
            )
        if rank == 0:
            store.set("run", secrets.token_hex(16))
        host, port = listener.getsockname()[:2]
        store.set(f"address/{rank}", json.dumps({"host": host, "port": port, "world_size": world_size}))
        keys = {other: f"address/{other}" for other in range(world_size)}
        table = []
        for other, key in keys.items():
            _await_key(store, key, keys, deadline)
            entry = json.loads(store.get(key))
            if entry["world_size"] != world_size:
                raise RendezvousError(
                    f"rank {other} was started for a world of {entry['world_size']}, rank {rank} for a world of "
                    f"{world_size}. Start all ranks with the same WORLD_SIZE.",
                    rank=other,
                )
            table.append((str(entry["host"]), int(entry["port"])))
        _await_key(store, "run", keys, deadline)
        return bytes.fromhex(store.get("run").decode()), table
    except RendezvousError:
        raise
    except _STORE_ERRORS as error:
        raise StoreLostError(
            f"rank {rank} lost the store at which the ranks meet ({_first_line(error)}): "
            "has the process of rank 0, or the launcher, ended? Look at its output first.",
            rank=0,
        ) from error


def _await_key(store: Store, key: str, keys: dict[int, str], deadline: float) -> None:
    """Waits for a key; at the deadline says which ranks have not come."""
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(left, 0.001)))
            return
        except _STORE_ERRORS:
            if deadline - time.monotonic() > 0.01:
                raise  # not the deadline: the store itself has gone
        missing = [other for other, name in keys.items() if not store.check([name])]
        if missing:
            names = ", ".join(f"rank {other}" for other in missing)
            raise RendezvousError(
                f"{names} of a world of {len(keys)} did not come before the deadline. Look at the output of what "
                "is missing, or start it; timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long the others wait.",
                rank=missing[0],
            )
        if store.check([key]):
            return


def _store_host(store: Store) -> str:
    """Returns the host of the store's server; this machine for stores that have none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else "localhost"


def _own_address(store_host: str) -> str:
    """Returns the address of this machine that others can reach: the one it uses towards the store.

    No packet is sent: connecting a UDP socket only asks the routing table.
    """
    if store_host in ("localhost", "::1") or store_host.startswith("127."):
        return "127.0.0.1"
    # Many systems give their own host name a loopback address, useless to others: then the default route's is taken.
    for target in (store_host, "192.0.2.1"):
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


def _listen(address: str, world_size: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=len(Role) * world_size + 16)
    listener.setblocking(False)
    return listener


def _connect(
    address: tuple[str, int], peer: int, identity: Identity, role: Role, deadline: float
) -> socket.socket:
    """Connects to a peer that listens already, and says who we are."""
    left = max(deadline - time.monotonic(), 0.001)
    try:
        sock = socket.create_connection(address, timeout=left)
    except OSError as error:
        raise RendezvousError(
            f"rank {identity.rank} cannot reach rank {peer} at {address[0]}:{address[1]} ({error.strerror or error}). "
            f"Has rank {peer} ended? Across machines, firewalls must allow TCP between all ranks.",
            rank=peer,
        ) from error
    try:
        sock.sendall(identity.hello(role))
        answer = _receive_exactly(sock, _HELLO.size, deadline)
        if identity.recognize(answer) != (peer, role):
            raise OSError("the answer came from a process of another run")
    except OSError as error:
        sock.close()
        raise RendezvousError(
            f"rank {peer} at {address[0]}:{address[1]} did not take rank {identity.rank} in "
            f"({error.strerror or error}). Look at the output of rank {peer}; do old processes of this job still run?",
            rank=peer,
        ) from error
    return sock


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(count - len(data))
        if not part:
            raise OSError("it closed the connection")
        data += part
    return data


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
            elif isinstance(key.fileobj, socket.socket):
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
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)
        self._heard[sock] = bytearray()
        self._patience[sock] = time.monotonic() + _HELLO_SECONDS

    def _listen_to(self, sock: socket.socket) -> None:
        heard = self._heard[sock]
        try:
            part = sock.recv(_HELLO.size - len(heard))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        heard += part
        if part and len(heard) < _HELLO.size:
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


def _accept_all(meeting: Meeting, identity: Identity, deadline: float) -> None:
    """Takes the connections of all higher ranks."""
    awaited = {(rank, role) for rank in range(identity.rank + 1, identity.world_size) for role in Role}

    def admit(rank: int, role: Role, sock: socket.socket) -> None:
        if (rank, role) not in awaited:
            sock.close()
            return
        awaited.discard((rank, role))
        meeting.sockets[role][rank] = sock
        sock.send(identity.hello(role))  # 32 bytes into an empty buffer: it cannot block

    assert meeting.listener is not None
    door = _Door(meeting.listener, identity, admit)
    try:
        while awaited:
            if time.monotonic() >= deadline:
                missing = sorted({rank for rank, _ in awaited})
                names = ", ".join(f"rank {rank}" for rank in missing)
                raise RendezvousError(
                    f"{names} did not connect to rank {identity.rank} before the deadline. Look at the output of "
                    "the missing ranks; across machines, firewalls must allow TCP between all ranks.",
                    rank=missing[0],
                )
            door.serve(deadline)
    finally:
        door.close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
