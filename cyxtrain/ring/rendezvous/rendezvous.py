"""Ranks find each other through the store, and each pair connects.

Each rank listens on its own port, writes its address to the store, waits until all have, connects to the lower ranks
and accepts the higher ones: three connections per pair, for collectives, messages and control, each authenticated.
Addresses and listener are kept: ranks can reconnect after the store is gone, and unknown callers are rejected.

A rank that fails writes the cause to the store, which all others poll: they fail with the same cause. In the end ranks
compare the records that they decide by, so that none chooses another algorithm than the rest and hangs.

Cost per rank: three sockets to each other rank and one listening socket; one store write, and one read per rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import secrets
import selectors
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.environment.cpu import count_usable_cores
from cyxtrain.environment.processes import this_process
from cyxtrain.errors import CyxtrainError, RendezvousError
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import dial, notify_duplicate
from cyxtrain.ring.rendezvous.handshake import PEER_ROLES, Hello, Role
from cyxtrain.ring.rendezvous.listen import Listeners, listen
from cyxtrain.ring.rendezvous.membership import Membership, PeerFailure, RankTakenError, ended
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.checksums import SUM_BYTES, Checksums
from cyxtrain.ring.wire.frames import FrameError, damaged, json_object
from cyxtrain.ring.wire.link import LOST_PACKETS, POLL_SECONDS, Deadline, Poller, backoff, watch_over

_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 16
_PADDING_BYTES = 10_000
"""More than a packet can have, so that a network which loses large packets is noticed before the first collective."""
_DIGEST_CHARACTERS = 16
_warned: dict[str | tuple[str, type[Warning], int], int] = {}
_NO_SECRET = (
    "CYXTRAIN_SECRET is not set: every process that reaches rank 0's port and speaks this protocol can join this run "
    "or end it. Set CYXTRAIN_SECRET to the same long random text on every rank (python -c 'import secrets; "
    "print(secrets.token_hex(32))'); require_secret=True in DistributedConfig refuses to start without."
)
_NO_READING = (
    "CYXTRAIN_TRANSPORT=cma: ranks do not read each other's memory any more; they share memory, which is faster and "
    "needs no permission. Unset CYXTRAIN_TRANSPORT."
)


@dataclass
class RendezvousResult:
    """The records and connections that a rank has after rendezvous."""

    table: list[RankRecord] = field(default_factory=list)
    listeners: Listeners | None = None
    acceptor: Acceptor | None = None
    """Rejects all further connections."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    """Waits for the listener and unauthenticated connections; `SelectorKey.data` is the callback."""
    sockets: dict[Role, dict[int, socket.socket]] = field(default_factory=lambda: {role: {} for role in PEER_ROLES})
    all_unix: bool = False
    """Whether Unix sockets connect all ranks for collectives."""
    checksums: Checksums | None = None

    def close(self) -> None:
        """Close every socket. Idempotent."""
        if self.acceptor is not None:
            self.acceptor.close()
            self.acceptor = None  # it refers to the connector, which refers to this: a reference cycle
        self._close_files()

    def abandon(self) -> None:
        """Close every socket in a forked child, without affecting the parent, which shares them."""
        if self.acceptor is not None:
            self.acceptor.abandon()
        self._close_files()

    def _close_files(self) -> None:
        for connected in self.sockets.values():
            for sock in connected.values():
                sock.close()
        if self.listeners is not None:
            self.listeners.close()
        self.selector.close()


def rendezvous(
    store: Store,
    rank: int,
    global_ranks: Sequence[int],
    timeout: timedelta,
    options: RingOptions,
    generation: int,
    peer_failure: PeerFailure,
) -> RendezvousResult:
    """Connect this rank with all others; ranks may do so repeatedly through the same store. Errors use `global_ranks`.

    Raises:
        RendezvousError: Ranks are missing at the deadline (it lists them), a duplicate rank, a rank has ended, ranks
            are incompatible, have different secrets, or cannot reach each other.
        PeerLostError, PeerSilentError: Another group of this world has lost a rank.
    """
    membership = Membership(
        store, rank, global_ranks, Deadline(timeout.total_seconds()), options, peer_failure, generation
    )
    hello = Hello("", generation, Role.CONTROL, rank, len(global_ranks), options.checksums)  # rank 0 names the run
    result = RendezvousResult()
    try:
        with membership.joining():
            result.listeners = listen(global_ranks[rank], store, options.transport)
            membership.register(own_record(rank, len(global_ranks), result.listeners, options))
            result.table = membership.await_all()
            own = replace(hello, run=result.table[0].run)
            _Connector(result, global_ranks, options, own, membership).connect_all()
    except RankTakenError as taken:
        if taken.holder is not None and taken.first is not None:
            own = replace(hello, run=taken.first.run, to_rank=rank)
            notify_duplicate(taken.holder, own, _secret(options, taken.first))
        raise RendezvousError(str(taken), rank=taken.rank) from None
    except BaseException:
        result.close()
        raise
    return result


class _Connector:
    """Connects one rank with all others, once all of them listen."""

    def __init__(
        self,
        result: RendezvousResult,
        global_ranks: Sequence[int],
        options: RingOptions,
        own: Hello,
        membership: Membership,
    ) -> None:
        if options.secret is None and own.rank == 0:
            # Explicit: not attributable to user code, and shown once per process.
            warnings.warn_explicit(_NO_SECRET, UserWarning, "cyxtrain", 1, registry=_warned)
        if options.transport == "cma" and own.rank == 0:
            warnings.warn_explicit(_NO_READING, FutureWarning, "cyxtrain", 1, registry=_warned)
        assert result.listeners is not None
        self._secret = _secret(options, result.table[0])
        self._checksums = result.checksums = Checksums(self._secret, own.run)
        self._selector = result.selector
        self._listeners = result.listeners
        self._result = result
        self._rank = own.rank
        self._global_ranks = global_ranks
        self._own = own
        self._membership = membership
        self._awaited = {(other, role) for other in range(own.rank + 1, len(global_ranks)) for role in PEER_ROLES}
        self._failure: RendezvousError | None = None
        listening = [sock for sock in (self._listeners.tcp, self._listeners.unix) if sock is not None]
        name = f"rank {global_ranks[own.rank]}"
        result.acceptor = Acceptor(listening, name, self._secret, self._authorize, self._accept, self._selector)

    @property
    def _acceptor(self) -> Acceptor:
        """Owned by the result, to avoid a reference cycle."""
        assert self._result.acceptor is not None
        return self._result.acceptor

    def connect_all(self) -> None:
        """Connect to the lower ranks, accept the higher ones, and wait until all ranks are connected."""
        result = self._result
        for peer in range(self._rank):
            for role in PEER_ROLES:
                result.sockets[role][peer] = self._dial(peer, role)
        for peer in range(self._rank):
            self._watch_for_disconnect(peer)
        while self._awaited:
            self._wait(POLL_SECONDS)
        self._await_all_connected()
        sockets = result.sockets[Role.COLLECTIVES]
        result.all_unix = _compare_tables(
            self._rank, self._global_ranks, result.table, sockets, self._checksums, self._membership.deadline
        )
        if self._listeners.unix is not None:
            self._acceptor.remove(self._listeners.unix)
            self._listeners.close_unix()
        for sock in result.sockets[Role.CONTROL].values():
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)

    def _await_all_connected(self) -> None:
        """Wait until all ranks are connected, so that all of them get the cause if one fails first."""
        membership = self._membership
        try:
            try:
                membership.report_connected()
                pauses = backoff()
                while not membership.all_connected():
                    self._wait(next(pauses))
            except CyxtrainError as error:
                if membership.report_failure(error):
                    raise
        except CyxtrainError:
            # If the store is lost, all connections of this rank exist: the monitor will receive what has happened.
            if not membership.store.lost:
                raise

    def _wait(self, seconds: float) -> None:
        """Poll once: serve connections, and raise the error if the rendezvous has failed."""
        self._acceptor.serve(seconds)
        self._membership.check()  # first: a rank that closes its connections has already reported why
        failure = self._failure or self._acceptor.failure
        if failure is not None:
            raise failure
        if self._membership.deadline.passed():
            raise self._missing()

    def _dial(self, peer: int, role: Role) -> socket.socket:
        caller, hello = f"rank {self._global_ranks[self._rank]}", replace(self._own, role=role, to_rank=peer)
        peer_record, own = self._result.table[peer], self._result.table[self._rank]
        # Control stays on TCP, whose kernel timers it needs.
        unix = role is not Role.CONTROL and bool(peer_record.unix) and peer_record.machine == own.machine
        return dial(peer_record, self._global_ranks[peer], caller, hello, self._secret, self._membership, unix=unix)

    def _authorize(self, hello: Hello) -> str:
        """Return why a process that knows the secret is refused; "" if it is not."""
        own, name = self._own, self._global_ranks[self._rank]
        if hello.run != own.run or hello.generation != own.generation:
            return f"it belongs to another run than rank {name}, or to an earlier incarnation of this run"
        if not hello.to_place or hello.to_rank != own.rank:
            return f"it connected to rank {hello.to_rank} and reached rank {own.rank}"
        if hello.rank >= hello.world_size:
            return f"there is no rank {hello.rank} in a world of {hello.world_size}"
        peer_record = RankRecord(hello.world_size, checksums=hello.checksums, protocol=hello.protocol)
        caller = self._global_ranks[hello.rank] if hello.rank < len(self._global_ranks) else hello.rank
        reason = peer_record.why_incompatible(caller, RankRecord(own.world_size, checksums=own.checksums), name)
        if reason:
            self._failure = RendezvousError(reason, rank=caller)
            return reason
        if (hello.rank, hello.role) not in self._awaited:
            return f"rank {caller} is taken: another process has joined as rank {caller} already"
        return ""

    def _accept(self, hello: Hello, sock: socket.socket) -> None:
        self._awaited.discard((hello.rank, hello.role))
        self._result.sockets[hello.role][hello.rank] = sock
        if hello.role is Role.CONTROL:
            self._watch_for_disconnect(hello.rank)

    def _watch_for_disconnect(self, peer: int) -> None:
        """Detect that a connected rank ends while others are awaited."""
        selector, sock = self._selector, self._result.sockets[Role.CONTROL][peer]

        def on_data() -> None:
            try:
                is_end = not sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                is_end = True
            selector.unregister(sock)  # the peer has already started sending frames: the monitor will read them
            if is_end:
                self._failure = ended(self._global_ranks[peer])

        selector.register(sock, selectors.EVENT_READ, on_data)

    def _missing(self) -> RendezvousError:
        """Return the error for a deadline that has passed."""
        timed_out = f"Joining timed out after {self._membership.deadline.seconds:.3g} s"
        missing = sorted({peer for peer, _ in self._awaited})
        if not missing:
            unconnected = self._membership.unconnected()
            unconnected_ranks = " and ".join(f"rank {name}" for name in unconnected)
            return RendezvousError(
                f"{timed_out}: {unconnected_ranks} did not connect with all others, and rank "
                f"{self._global_ranks[self._rank]} did. Look at their output; across machines, firewalls must allow "
                "TCP between all ranks.",
                rank=unconnected[0] if unconnected else None,
            )
        own = self._result.table[self._rank]
        global_ranks = [self._global_ranks[peer] for peer in missing]
        unauthenticated = [self._global_ranks[peer] for peer in missing if self._acceptor.unauthenticated[peer]]
        hint = "across machines, firewalls must allow TCP between all ranks"
        if unauthenticated:
            hint = (
                f"a process that claimed to be rank {unauthenticated[0]} did not know the secret: CYXTRAIN_SECRET must "
                "be the same on every rank"
            )
        return RendezvousError(
            f"{timed_out}: {', '.join(f'rank {name}' for name in global_ranks)} did not connect to rank "
            f"{self._global_ranks[self._rank]} at {own.host}:{own.port}. Look at the output of the missing ranks; "
            f"{hint}.",
            rank=global_ranks[0],
        )


def _secret(options: RingOptions, first: RankRecord) -> bytes:
    """Return the secret of the run: CYXTRAIN_SECRET, or the one that rank 0 made."""
    return bytes.fromhex(first.key) if options.secret_bytes is None else options.secret_bytes


def own_record(rank: int, world_size: int, listeners: Listeners, options: RingOptions) -> RankRecord:
    """Return the record of this rank."""
    host, port = listeners.tcp.getsockname()[:2]
    cores = count_usable_cores()
    return RankRecord(
        world_size=world_size,
        process=this_process(str(host)),
        host=str(host),
        port=int(port),
        unix=listeners.unix_name,
        transport=options.transport,
        room=cores // (torch.get_num_threads() + 1),
        cores=cores,
        has_secret=options.secret is not None,
        checksums=options.checksums,
        heartbeat_timeout_seconds=options.heartbeat_timeout_seconds,
        devices=options.devices,
        run=secrets.token_hex(16) if rank == 0 else "",
        key=secrets.token_hex(32) if rank == 0 and options.secret is None else "",
    )


def _compare_tables(
    rank: int,
    global_ranks: Sequence[int],
    table: Sequence[RankRecord],
    sockets: Mapping[int, socket.socket],
    checksums: Checksums,
    deadline: Deadline,
) -> bool:
    """Compare the table of records with all other ranks; return whether Unix sockets connect all. All ranks call it.

    If two ranks have different tables, every rank differs from at least one of them: all raise. Cost: a message of
    about 11 KiB each way between each two ranks. Nothing has been sent on the sockets yet.

    Raises:
        RendezvousError: Another rank has another table (with the fields that differ), has ended or is silent.
        DamagedFrameError: Data was corrupted in transit.
    """
    own = _digests(table)
    all_unix = not any(sock.family in (socket.AF_INET, socket.AF_INET6) for sock in sockets.values())
    padding = " " * _PADDING_BYTES
    body = json.dumps({"all_unix": all_unix, "padding": padding, **own}).encode()
    for sock in sockets.values():
        watch_over(sock)
        with contextlib.suppress(OSError):  # a lost connection is noticed below
            sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body + checksums.of(body))
    for peer, sock in sorted(sockets.items()):
        place = f"{table[peer].host}:{table[peer].port}"
        received = _receive_table(sock, global_ranks[peer], place, deadline)
        if checksums.of(received[:-SUM_BYTES]) != received[-SUM_BYTES:]:
            raise damaged(global_ranks[peer], global_ranks[rank], "the comparison of records")
        theirs: dict[str, Any] = {}
        with contextlib.suppress(FrameError):
            theirs = json_object(received[:-SUM_BYTES])
        differing = [name for name in own if theirs.get(name) != own[name]]
        if differing:
            raise RendezvousError(
                f"rank {global_ranks[rank]} and rank {global_ranks[peer]} have read different values at the store, "
                f"of: {', '.join(differing)}. Another program writes there. Set CYXTRAIN_SECRET to the same "
                "value on every rank, or choose another MASTER_PORT.",
                rank=global_ranks[peer],
            )
        all_unix = all_unix and theirs.get("all_unix") is True
    return all_unix


def _digests(table: Sequence[RankRecord]) -> dict[str, str]:
    rows = [dataclasses.asdict(record) for record in table]
    return {
        name: hashlib.sha256(json.dumps([row[name] for row in rows]).encode()).hexdigest()[:_DIGEST_CHARACTERS]
        for name in rows[0]
    }


def _receive_table(sock: socket.socket, name: int, place: str, deadline: Deadline) -> bytes:
    """Return one message and its checksum; read not a byte more."""
    received, end, poller = bytearray(), _LENGTH_BYTES, Poller()
    while len(received) < end:
        if not poller.wait([sock], [], deadline, POLL_SECONDS):
            if deadline.passed():
                raise RendezvousError(
                    f"rank {name} at {place} is connected to all others, and did not send its records for comparison "
                    f"within {deadline.seconds:.3g} s. Look at its output, and at the MTU of the network between.",
                    rank=name,
                )
            continue
        try:
            part = sock.recv(end - len(received))
        except BlockingIOError:
            continue
        except TimeoutError:  # the kernel's: the socket does not block
            raise RendezvousError(f"rank {name} at {place} cannot be reached: {LOST_PACKETS}.", rank=name) from None
        except OSError:
            part = b""
        if not part:
            raise ended(name)
        received += part
        if end == len(received) == _LENGTH_BYTES:
            end += min(int.from_bytes(received, "big"), _MAX_BYTES) + SUM_BYTES
    return bytes(received[_LENGTH_BYTES:])
