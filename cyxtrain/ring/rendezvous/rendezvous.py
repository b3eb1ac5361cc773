"""Ranks find each other through the store, and connect every pair.

Each rank listens on a port of its own, says where at the store, waits until all have, connects to the lower ranks
and is connected to by the higher ones: three connections a pair, for collectives, for messages, and for what is
said beside them; each begins with a handshake. Table and listener are kept: survivors can meet again when the store
has died, and strangers hear why they are not let in.

Whoever fails says why at the store, where all others look while they wait: they fail with it, and with its cause.

Cost per rank: three sockets to each other rank and one to listen; one key at the store, and one to read per rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.environment.cpu import count_usable_cores
from cyxtrain.errors import CyxtrainError, RendezvousError
from cyxtrain.ring.collective_thread import room_for_ranks
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.monitoring.process_state import this_process
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import call, knock
from cyxtrain.ring.rendezvous.handshake import PAIRED, Claim, Role
from cyxtrain.ring.rendezvous.listen import listen, listen_near
from cyxtrain.ring.rendezvous.membership import LOOK_SECONDS, Membership, RankTakenError, ended, naps
from cyxtrain.ring.rendezvous.record import RankRecord, misfit
from cyxtrain.ring.rendezvous.table_check import agree
from cyxtrain.ring.wire.checksums import Checksums
from cyxtrain.ring.wire.link import Deadline
from cyxtrain.ring.wire.peer_read import PeerMemory, open_to_reading

_warned: dict[str | tuple[str, type[Warning], int], int] = {}
_NO_SECRET = (
    "CYXTRAIN_SECRET is not set: every process that reaches rank 0's port and speaks this protocol can join this run "
    "or end it. Set CYXTRAIN_SECRET to the same long random text on every rank (python -c 'import secrets; "
    "print(secrets.token_hex(32))'); require_secret=True in DistributedConfig refuses to start without."
)


@dataclass
class Meeting:
    """What a rank has after it met the others.

    Attributes:
        table: What each rank said of itself, by rank; empty in a world of one.
        listener: Our own; None in a world of one.
        near: The Unix socket for ranks of this machine, while they meet; None: there is none.
        door: Lets nobody else in at the listener.
        selector: Waits for the listener and its strangers; the data of each socket is the function to call.
        sockets: For each role, the connection to each other rank.
        readers: Whose memory each rank can read, by rank.
        all_unix: Whether the connections for collectives between all ranks are Unix sockets.
        checksums: Of what travels between the ranks, once they have proven who they are; None: not yet.
    """

    table: list[RankRecord] = field(default_factory=list)
    listener: socket.socket | None = None
    near: socket.socket | None = None
    door: Acceptor | None = None
    selector: selectors.BaseSelector | None = None
    sockets: dict[Role, dict[int, socket.socket]] = field(default_factory=lambda: {role: {} for role in PAIRED})
    readers: list[set[int]] = field(default_factory=list)
    all_unix: bool = False
    checksums: Checksums | None = None

    def close(self) -> None:
        """Closes every socket; harmless twice."""
        if self.door is not None:
            self.door.close()
            self.door = None  # it asks the members, who hold this meeting: nothing is left for Python to collect
        self._close_files()

    def abandon(self) -> None:
        """Closes every socket in a forked child: its parent, which shares them, must not notice."""
        if self.door is not None:
            self.door.abandon()
        self._close_files()

    def leave_near(self) -> None:
        """Closes the Unix socket: all who shall come have come. Harmless twice, and where there is none."""
        if self.near is not None:
            self.near.close()
            self.near = None

    def _close_files(self) -> None:
        self.leave_near()
        for connected in self.sockets.values():
            for sock in connected.values():
                sock.close()
        if self.listener is not None:
            self.listener.close()
        if self.selector is not None:
            self.selector.close()


def meet(
    store: Store,
    rank: int,
    names: Sequence[int],
    timeout_seconds: float,
    options: RingOptions,
    generation: int = 0,
    siblings: GroupRegistry | None = None,
) -> Meeting:
    """Connects this rank with all others.

    Args:
        store: Shared by all ranks. Ranks may meet there again, each as often as the others.
        rank: This rank.
        names: By rank, how errors call it: its rank in the world.
        timeout_seconds: Until it gives up.
        options: Secret, transport, and what the ranks must have in common.
        generation: Of the group that is made.
        siblings: The other groups of the same world; None: there are none.

    Raises:
        RendezvousError: Ranks are missing at the deadline (they are named), a rank is there twice or has ended,
            ranks do not fit together, do not know the same secret, or cannot reach each other.
        PeerLostError, PeerSilentError: Another group of this world has lost a rank.
    """
    meeting = Meeting()
    if len(names) == 1:
        return meeting  # a world of one binds no port
    deadline = Deadline(timeout_seconds)
    roll = Membership(
        store,
        rank,
        names,
        deadline,
        siblings,
        waits_for_next_store=options.comes_again,
        secret=options.secret_bytes,
        generation=generation,
    )
    claim = Claim("", generation, Role.CONTROL, rank, len(names), options.checksums)  # rank 0 names the run
    try:
        with roll.taking_part():
            meeting.listener = listen(names[rank], store)
            meeting.near = listen_near(options.transport)
            roll.answer(own_record(rank, len(names), meeting, options))
            meeting.table = roll.table()
            _Members(meeting, names, options, replace(claim, run=meeting.table[0].run)).gather(roll)
    except RankTakenError as taken:
        if taken.holder is not None and taken.first is not None:
            knock(taken.holder, replace(claim, run=taken.first.run, to_rank=rank), _key(options, taken.first))
        raise RendezvousError(str(taken), rank=taken.rank) from None
    except BaseException:
        meeting.close()
        raise
    return meeting


class _Members:
    """Connects one rank with all others, once all of them listen.

    Args:
        meeting: With table and listener; gets the rest.
        names: By rank, how errors call it.
        options: With the secret.
        own: What this rank says of itself.
    """

    def __init__(self, meeting: Meeting, names: Sequence[int], options: RingOptions, own: Claim) -> None:
        if options.secret is None and own.rank == 0:
            # Explicit: it is about no line of anybody's, and is said once in a process.
            warnings.warn_explicit(_NO_SECRET, UserWarning, "cyxtrain", 1, registry=_warned)
        self._key = _key(options, meeting.table[0])
        self._checksums = meeting.checksums = Checksums(self._key, own.run)
        self._meeting = meeting
        self._rank = own.rank
        self._names = names
        self._own = own
        self._awaited = {(other, role) for other in range(own.rank + 1, len(names)) for role in PAIRED}
        self._failure: RendezvousError | None = None

    def gather(self, roll: Membership) -> None:
        """Opens the door to the higher ranks, connects to the lower ones, and waits until all are here."""
        meeting = self._meeting
        assert meeting.listener is not None
        meeting.selector = selectors.DefaultSelector()
        name = f"rank {self._names[self._rank]}"
        listeners = [listener for listener in (meeting.listener, meeting.near) if listener is not None]
        meeting.door = Acceptor(listeners, name, self._key, self._judge, self._admit, meeting.selector)
        for peer in range(self._rank):
            for role in PAIRED:
                meeting.sockets[role][peer] = self._call(peer, role, roll)
        for peer in range(self._rank):
            self._notice_end_of(peer)
        while self._awaited:
            self._wait(LOOK_SECONDS, roll)
        reads = self._await_the_others(roll)
        sockets = meeting.sockets[Role.COLLECTIVES]
        meeting.readers, meeting.all_unix = agree(
            self._rank, self._names, meeting.table, reads, sockets, self._checksums, roll.deadline
        )
        if meeting.near is not None:
            meeting.door.leave(meeting.near)
            meeting.leave_near()
        for sock in meeting.sockets[Role.CONTROL].values():
            with contextlib.suppress(KeyError):
                meeting.selector.unregister(sock)

    def _await_the_others(self, roll: Membership) -> list[int]:
        """Waits until all are connected with all: if one ends before, who is done must not leave with the cause.

        Returns:
            Whose memory this rank can read.
        """
        reads: list[int] = []
        try:
            nap_seconds = naps()
            try:
                reads = self._readable()
                roll.met()
                while not roll.all_met():
                    self._wait(next(nap_seconds), roll)
            except CyxtrainError as error:
                if roll.tell(error):
                    raise
        except CyxtrainError:
            # Else all connections of this rank stand: the watch will hear what has happened.
            if not roll.board.lost:
                raise
        return reads

    def _readable(self) -> list[int]:
        """Returns whose memory this rank can read.

        Raises:
            RendezvousError: CYXTRAIN_TRANSPORT asks for that, and the kernel does not let us.
        """
        table, own = self._meeting.table, self._meeting.table[self._rank]
        readable = []
        for peer, entry in enumerate(table):
            if peer == self._rank or entry.machine != own.machine or own.transport not in ("auto", "cma"):
                continue
            linked = self._meeting.sockets[Role.COLLECTIVES][peer].family not in (socket.AF_INET, socket.AF_INET6)
            if linked and PeerMemory(entry.process.pid).can_be_read(entry.memory):
                readable.append(peer)
            elif own.transport == "cma":
                raise RendezvousError(
                    f"CYXTRAIN_TRANSPORT=cma, and rank {self._names[self._rank]} cannot read the memory of rank "
                    f"{self._names[peer]}: both must be processes of the same user, and containers must allow ptrace. "
                    "Leave CYXTRAIN_TRANSPORT away: then the ring takes what there is.",
                    rank=self._names[peer],
                )
        return readable

    def _wait(self, seconds: float, roll: Membership) -> None:
        """Serves the door for a moment; raises what has gone wrong."""
        assert self._meeting.door is not None
        assert self._meeting.selector is not None
        for key, _ in self._meeting.selector.select(seconds):
            key.data()
        self._meeting.door.expire(time.monotonic())
        roll.look()  # first: who closes its connections has said why before
        if self._failure is not None:
            raise self._failure
        if roll.deadline.passed():
            raise self._missing(roll)

    def _call(self, peer: int, role: Role, roll: Membership) -> socket.socket:
        who, claim = f"rank {self._names[self._rank]}", replace(self._own, role=role, to_rank=peer)
        table = self._meeting.table
        # What is said beside the data stays on TCP, whose kernel timers it needs.
        near = role is not Role.CONTROL and bool(table[peer].unix) and table[peer].machine == table[self._rank].machine
        return call(table[peer], self._names[peer], who, claim, self._key, roll, near=near)

    def _judge(self, claim: Claim) -> str:
        """Returns why a process that knows the secret may not come in; "" where it may."""
        own, name = self._own, self._names[self._rank]
        if claim.run != own.run or claim.generation != own.generation:
            return f"it belongs to another run, or to an earlier life of this one, than rank {name}"
        if not claim.to_place or claim.to_rank != own.rank:
            return f"it means to call rank {claim.to_rank}, and has reached rank {own.rank}"
        if claim.rank >= claim.world_size:
            return f"there is no rank {claim.rank} in a world of {claim.world_size}"
        theirs = RankRecord(claim.world_size, checksums=claim.checksums, protocol=claim.protocol)
        caller = self._names[claim.rank] if claim.rank < len(self._names) else claim.rank
        reason = misfit(caller, theirs, name, RankRecord(own.world_size, checksums=own.checksums))
        if reason:
            self._failure = RendezvousError(reason, rank=caller)
            return reason
        if (claim.rank, claim.role) not in self._awaited:
            return f"rank {caller} is taken: another process has joined as rank {caller} already"
        return ""

    def _admit(self, claim: Claim, sock: socket.socket) -> None:
        self._awaited.discard((claim.rank, claim.role))
        self._meeting.sockets[claim.role][claim.rank] = sock
        if claim.role is Role.CONTROL:
            self._notice_end_of(claim.rank)

    def _notice_end_of(self, peer: int) -> None:
        """Sees to it that the end of a rank that is here already is noticed while others are awaited."""
        selector, sock = self._meeting.selector, self._meeting.sockets[Role.CONTROL][peer]
        assert selector is not None

        def look() -> None:
            try:
                is_end = not sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                is_end = True
            selector.unregister(sock)  # it speaks already: the watch will listen
            if is_end:
                self._failure = ended(self._names[peer])

        selector.register(sock, selectors.EVENT_READ, look)

    def _missing(self, roll: Membership) -> RendezvousError:
        missing = sorted({peer for peer, _ in self._awaited})
        if not missing:
            unmet = roll.unmet()
            who = " and ".join(f"rank {name}" for name in unmet)
            return RendezvousError(
                f"Joining timed out after {roll.deadline.seconds:g} s: {who} did not connect with all others, and rank "
                f"{self._names[self._rank]} did. "
                "Look at their output; across machines, firewalls must allow TCP between all ranks.",
                rank=unmet[0] if unmet else None,
            )
        names = [self._names[peer] for peer in missing]
        assert self._meeting.door is not None
        unproven = [peer for peer in missing if self._meeting.door.unproven[peer]]
        hint = "across machines, firewalls must allow TCP between all ranks"
        if unproven:
            hint = (
                f"somebody came as rank {self._names[unproven[0]]} and did not know the secret: "
                "CYXTRAIN_SECRET must be the same on every rank"
            )
        return RendezvousError(
            f"Joining timed out after {roll.deadline.seconds:g} s: {', '.join(f'rank {name}' for name in names)} did "
            f"not connect to rank {self._names[self._rank]}. Look at the output of the missing ranks; {hint}.",
            rank=names[0],
        )


def _key(options: RingOptions, first: RankRecord) -> bytes:
    """Returns the secret of the run: the environment's, else the one that rank 0 made."""
    return bytes.fromhex(first.key) if options.secret_bytes is None else options.secret_bytes


def own_record(rank: int, world_size: int, meeting: Meeting, options: RingOptions) -> RankRecord:
    """Returns what a rank says of itself.

    Args:
        rank: Which.
        world_size: How many ranks it looks for.
        meeting: That listens.
        options: Of the ring.
    """
    assert meeting.listener is not None
    host, port = meeting.listener.getsockname()[:2]
    near = b"" if meeting.near is None else os.fsencode(meeting.near.getsockname())
    return RankRecord(
        world_size=world_size,
        process=this_process(str(host)),
        host=str(host),
        port=int(port),
        unix=near.decode("ascii").replace("\0", "@"),
        memory=open_to_reading() if near and options.transport in ("auto", "cma") else "",
        transport=options.transport,
        room=room_for_ranks(),
        cores=count_usable_cores(),
        has_secret=options.secret is not None,
        checksums=options.checksums,
        heartbeat_timeout_seconds=options.heartbeat_timeout_seconds,
        devices=options.devices,
        run=secrets.token_hex(16) if rank == 0 else "",
        key=secrets.token_hex(32) if rank == 0 and options.secret is None else "",
    )
