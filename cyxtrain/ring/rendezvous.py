"""Ranks find each other through the store, and connect every pair.

Each rank listens on a port of its own, publishes where, reads where all others listen, connects to the lower
ranks and is connected to by the higher ones: three connections a pair, for collectives, for messages, and for
what is said beside them. Table and listener are kept: survivors can meet again when the store has died.

Cost per rank: three sockets to each other rank and one to listen; two store round trips and one key per rank.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.door import HELLO, Identity, Role, accept_all

_BACKLOG = 1024
"""Connections that wait while this rank does something else; where they overflow, TCP itself is slow to try again."""
_PROCESS = secrets.token_hex(8)
_STORE_ERRORS = (RuntimeError,)  # DistStoreError and DistNetworkError are RuntimeErrors


class StoreLostError(RendezvousError):
    """The store has gone while ranks were meeting; another one may open in its place."""


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


def meet(store: Store, rank: int, names: Sequence[int], timeout_seconds: float, generation: int = 0) -> Meeting:
    """Connects this rank with all others.

    Args:
        store: Shared by all ranks. Ranks may meet there again, each as often as the others.
        rank: This rank.
        names: By rank, how errors call it: its rank in the world.
        timeout_seconds: Until it gives up.
        generation: Of the group that is made.

    Raises:
        RendezvousError: Ranks are missing at the deadline (they are named), a rank is there twice, ranks
            disagree on the world size, or a rank cannot be reached.
    """
    meeting = Meeting()
    if len(names) == 1:
        return meeting  # a world of one binds no port
    deadline = time.monotonic() + timeout_seconds
    try:
        meeting.listener = _listen(names[rank], _own_address(_store_host(store)))
        run, meeting.table = _publish(store, rank, names, meeting.listener, deadline)
        identity = Identity(run, generation, rank, tuple(names))
        for peer in range(rank):
            for role in Role:
                meeting.sockets[role][peer] = _connect(meeting.table[peer], peer, identity, role, deadline)
        accept_all(meeting.listener, identity, meeting.sockets, deadline)
    except BaseException:
        meeting.close()
        raise
    return meeting


def _publish(
    store: Store, rank: int, names: Sequence[int], listener: socket.socket, deadline: float
) -> tuple[bytes, list[tuple[str, int]]]:
    """Says where this rank listens; returns the run's random bytes and where every rank listens."""
    try:
        life = _claim(store, rank, names[rank])
        keys = {name: f"{life}/address/{other}" for other, name in enumerate(names)}
        if rank == 0:
            store.set(f"{life}/run", secrets.token_hex(16))
        host, port = listener.getsockname()[:2]
        store.set(keys[names[rank]], json.dumps({"host": host, "port": port, "world_size": len(names)}))
        table = []
        for name, key in keys.items():
            _await_key(store, key, keys, deadline)
            entry = json.loads(store.get(key))
            if entry["world_size"] != len(names):
                raise RendezvousError(
                    f"rank {name} was started for a world of {entry['world_size']}, rank {names[rank]} for a world of "
                    f"{len(names)}. Start all ranks with the same WORLD_SIZE.",
                    rank=name,
                )
            table.append((str(entry["host"]), int(entry["port"])))
        _await_key(store, f"{life}/run", keys, deadline)
        return bytes.fromhex(store.get(f"{life}/run").decode()), table
    except RendezvousError:
        raise
    except _STORE_ERRORS as error:
        raise StoreLostError(
            f"rank {names[rank]} lost the store at which the ranks meet ({_first_line(error)}): "
            "has the process of rank 0, or the launcher, ended? Look at its output first.",
            rank=0,
        ) from error


def _claim(store: Store, rank: int, name: int) -> int:
    """Takes a rank in the store; returns how often this process has done so: all ranks meet in the same life."""
    process = f"{os.getpid()}-{_PROCESS}"
    life = store.add(f"claims/{rank}", 1)
    if life > 1 and store.get(f"{life - 1}/process/{rank}").decode() != process:
        raise RendezvousError(
            f"rank {name} is taken: another process has joined as rank {name} already. Give every process a RANK of "
            "its own, and start all ranks anew after one has failed.",
            rank=name,
        )
    store.set(f"{life}/process/{rank}", process)
    return life


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


def _listen(name: int, address: str) -> socket.socket:
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


def _connect(address: tuple[str, int], peer: int, identity: Identity, role: Role, deadline: float) -> socket.socket:
    """Connects to a peer that listens already, and says who we are."""
    rank, other = identity.names[identity.rank], identity.names[peer]
    left = max(deadline - time.monotonic(), 0.001)
    try:
        sock = socket.create_connection(address, timeout=left)
    except OSError as error:
        raise RendezvousError(
            f"rank {rank} cannot reach rank {other} at {address[0]}:{address[1]} ({error.strerror or error}). "
            f"Has rank {other} ended? Across machines, firewalls must allow TCP between all ranks.",
            rank=other,
        ) from error
    try:
        sock.sendall(identity.hello(role))
        answer = _receive_exactly(sock, HELLO.size, deadline)
        if identity.recognize(answer) != (peer, role):
            raise OSError("the answer came from a process of another run")
    except OSError as error:
        sock.close()
        raise RendezvousError(
            f"rank {other} at {address[0]}:{address[1]} did not take rank {rank} in "
            f"({error.strerror or error}). Look at the output of rank {other}; do old processes of this job still run?",
            rank=other,
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
