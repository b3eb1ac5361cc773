"""One rank's connections with all others of a directory: three per pair, for collectives, messages and control.

Each rank connects to the lower ranks and accepts the higher ones; both sides authenticate. A rank that is connected to
all others sends them its directory: who has all of them knows that all ranks are connected, and that none will choose
another algorithm than the rest and hang. A rank that fails reports the cause at the store that the directory comes
from; without a store it sends the cause to those that it is connected to.

Cost per rank: three sockets to each other rank and one listening socket.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from dataclasses import replace

from cyxtrain.config import RingOptions
from cyxtrain.errors import CyxtrainError, RendezvousError, error_from_facts, exhausted, reason_of, reported
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import ClosedError, dial_once, socket_address
from cyxtrain.ring.rendezvous.directory import Directory
from cyxtrain.ring.rendezvous.handshake import PEER_ROLES, HandshakeError, Hello, RefusedError, Role
from cyxtrain.ring.rendezvous.listen import Listeners
from cyxtrain.ring.rendezvous.membership import EXAMINE_SECONDS, Membership
from cyxtrain.ring.rendezvous.record import RankRecord, cannot_join, ended, refuse_ended
from cyxtrain.ring.wire.checksums import Checksums
from cyxtrain.ring.wire.frames import Control, FrameError, control_frame, take_control_frame
from cyxtrain.ring.wire.link import POLL_SECONDS, Deadline

_PEEK_BYTES = 1 << 16
_EXPLAIN_SECONDS = 0.1
"""How long a rank whose connection has ended waits for the cause, which arrives at the store or another connection."""
_PROOFS = 3
"""Rejected proofs after which a rank reports that the secrets differ."""


class Mesh:
    """The connections of a rank, and the `listeners` that refuse all further ones; it owns both.

    A world of one has none; and the next generation takes over the listeners.
    """

    def __init__(self, directory: Directory, rank: int, listeners: Listeners | None = None) -> None:
        self.directory = directory
        self.rank = rank
        self.listeners = listeners
        self.sockets: dict[Role, dict[int, socket.socket]] = {role: {} for role in PEER_ROLES}
        self.all_unix = False
        """Whether Unix sockets connect all ranks for collectives."""
        self.checksums = Checksums(directory.secret, directory.run)

    def disconnect(self) -> None:
        """Close the connections, and keep the listeners. Idempotent."""
        for connected in self.sockets.values():
            for sock in connected.values():
                sock.close()

    def close(self) -> None:
        """Close the connections and the listeners. Idempotent."""
        self.disconnect()
        if self.listeners is not None:
            self.listeners.close()
            self.listeners = None

    def abandon(self) -> None:
        """Close every socket in a forked child, without affecting the parent, which shares them."""
        self.disconnect()
        if self.listeners is not None:
            self.listeners.abandon()


def connect(
    directory: Directory,
    rank: int,
    listeners: Listeners,
    options: RingOptions,
    deadline: Deadline,
    membership: Membership | None = None,
) -> Mesh:
    """Connect a rank with all others of a directory; all call it. The listeners stay open if that fails.

    With a `membership` ranks report failures at its store; without one, over the connections that there are.

    Raises:
        RendezvousError: A rank has ended, did not connect before the deadline, has another directory, or has failed.
        CyxtrainError: What another rank has reported.
    """
    mesh = Mesh(directory, rank, listeners)
    connector = _Connector(mesh, listeners, options, deadline, membership)
    try:
        connector.connect_all()
    except BaseException as error:
        connector.give_up(error)
        raise
    return mesh


class _Connector:
    """Connects one rank with all others, once all of them listen."""

    def __init__(
        self,
        mesh: Mesh,
        listeners: Listeners,
        options: RingOptions,
        deadline: Deadline,
        membership: Membership | None,
    ) -> None:
        directory, rank = mesh.directory, mesh.rank
        self._mesh = mesh
        self._listeners = listeners
        self._records = directory.records
        self._names = directory.names
        self._rank = rank
        self._options = options
        self._deadline = deadline
        self._membership = membership
        self._examine_deadline = Deadline(0.0)
        world_size = len(self._names)
        self._own = Hello(directory.run, directory.generation, Role.CONTROL, rank, world_size, options.checksums)
        self._awaited = {(other, role) for other in range(rank + 1, world_size) for role in PEER_ROLES}
        self._failure: CyxtrainError | None = None
        name = f"rank {self._names[rank]}"
        self._listeners.serve(name, directory.secret, self._authorize, self._accept)

    @property
    def _acceptor(self) -> Acceptor:
        """Owned by the listeners, to avoid a reference cycle."""
        assert self._listeners.acceptor is not None
        return self._listeners.acceptor

    def connect_all(self) -> None:
        """Connect to the lower ranks, accept the higher ones, and wait until all ranks are connected."""
        mesh = self._mesh
        for peer in range(self._rank):
            for role in PEER_ROLES:
                mesh.sockets[role][peer] = self._dial(peer, role)
            self._watch_control(peer)
        while self._awaited:
            self._wait(POLL_SECONDS)
        sockets = mesh.sockets[Role.COLLECTIVES]
        mesh.all_unix = mesh.directory.compare(self._rank, sockets, mesh.checksums, self._deadline, self._explain)
        if not self._options.keeps_listening:
            self._listeners.close_unix()
        self._unwatch_controls()

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks why this one fails, then close the connections."""
        failure = error if isinstance(error, CyxtrainError) else cannot_join(self._names[self._rank], error)
        if self._membership is not None:
            self._membership.report_failure(failure)
        else:
            frame = control_frame(Control.ABORT, failure.to_facts(), self._mesh.checksums)
            for sock in self._mesh.sockets[Role.CONTROL].values():
                with contextlib.suppress(OSError):
                    sock.send(frame)
        self._unwatch_controls()
        self._mesh.disconnect()

    def _explain(self, has_ended: bool) -> None:
        """Raise why comparing fails, if another group tells it; if a rank `has_ended`, also if a rank reports it.

        That the store has ended is no cause: rank 0 may have all directories, and have left.
        """
        if self._membership is not None:
            self._membership.check_groups()
        self._acceptor.serve(0.0)  # a control connection that ends now is noticed by nobody else
        if not has_ended and self._failure is None:
            return
        try:
            self._await_cause()
        except CyxtrainError:
            if self._membership is None or not self._membership.store.lost:
                raise

    def _await_cause(self) -> None:
        """Give the rank that knows why the rendezvous fails a moment to report it."""
        Deadline(min(_EXPLAIN_SECONDS, self._deadline.left())).poll_until(self._check)
        self._check_processes()

    def _wait(self, seconds: float) -> None:
        """Poll once: serve connections, and raise the error if the rendezvous has failed."""
        self._acceptor.serve(seconds)
        self._check()
        if self._deadline.passed():
            raise self._missing()

    def _check(self) -> None:
        """Raise the error because of which connecting has failed, if it has."""
        if self._membership is not None:
            self._membership.check()  # first: a rank that closes its connections has already reported why
        else:
            self._acceptor.serve(0.0)
            if self._examine_deadline.passed():
                self._check_processes()
        failure = self._failure or self._acceptor.failure
        if failure is not None:
            raise failure

    def _check_processes(self) -> None:
        """Raise the error for a rank whose process has ended."""
        self._examine_deadline = Deadline(EXAMINE_SECONDS)
        refuse_ended(self._records[self._rank], dict(zip(self._names, self._records, strict=True)))

    def _dial(self, peer: int, role: Role) -> socket.socket:
        """Connect to a rank, first at its Unix socket if it is on this machine.

        Raises RendezvousError if it cannot be reached, or refuses us.
        """
        record, name, who = self._records[peer], self._names[peer], f"rank {self._names[self._rank]}"
        hello, key = replace(self._own, role=role, to_rank=peer), self._mesh.directory.secret
        # Control stays on TCP, whose kernel timers it needs.
        is_near = bool(record.unix) and record.machine == self._records[self._rank].machine
        unix = role is not Role.CONTROL and is_near
        rejected = 0
        while True:
            where = f"rank {name} at {record.unix if unix else f'{record.host}:{record.port}'}"
            try:
                return dial_once(socket_address(record, unix=unix), hello, key, self._deadline, self._check)
            except ClosedError as closed:
                self._await_cause()
                # Closed before it had our proof, or when the proof was late: bad luck, try again.
                rejected += closed.proven
                if rejected == _PROOFS or self._deadline.passed():
                    raise _closed(where, who, name, rejected) from None
            except (RefusedError, HandshakeError) as error:
                raise _refused(where, who, name, error) from None
            except OSError as error:
                if exhausted(error):
                    raise
                if unix and record.transport != "unix":
                    unix = False  # they share a kernel but not a network namespace: two containers, say
                    continue
                self._await_cause()
                raise RendezvousError(
                    f"{who} cannot reach {where} ({reason_of(error)}). Has rank {name} ended? Across machines, "
                    "firewalls must allow TCP between all ranks.",
                    rank=name,
                ) from None

    def _authorize(self, hello: Hello) -> str | None:
        """Return why a process that knows the secret is refused; "" if it is not; None: it has to wait."""
        own, name = self._own, self._names[self._rank]
        if hello.run == own.run and hello.generation > own.generation and self._options.keeps_listening:
            return None
        if hello.run != own.run or hello.generation != own.generation:
            return f"it belongs to another run than rank {name}, or to an earlier incarnation of this run"
        if own.generation and (hello.world_size, hello.to_rank) != (own.world_size, own.rank):
            self._failure = self._mesh.directory.other_ranks(self._rank)
            return str(self._failure)
        if not hello.to_place or hello.to_rank != own.rank:
            return f"it connected to rank {hello.to_rank} and reached rank {own.rank}"
        if hello.rank >= hello.world_size:
            return f"there is no rank {hello.rank} in a world of {hello.world_size}"
        peer_record = RankRecord(hello.world_size, checksums=hello.checksums, protocol=hello.protocol)
        caller = self._names[hello.rank] if hello.rank < len(self._names) else hello.rank
        reason = peer_record.why_incompatible(caller, RankRecord(own.world_size, checksums=own.checksums), name)
        if reason:
            self._failure = RendezvousError(reason, rank=caller)
            return reason
        if (hello.rank, hello.role) not in self._awaited:
            return f"rank {caller} is taken: another process has joined as rank {caller} already"
        return ""

    def _accept(self, hello: Hello, sock: socket.socket) -> None:
        self._awaited.discard((hello.rank, hello.role))
        self._mesh.sockets[hello.role][hello.rank] = sock
        if hello.role is Role.CONTROL:
            self._watch_control(hello.rank)

    def _watch_control(self, peer: int) -> None:
        """Notice that a connected rank ends, or reports why it fails, while others are awaited."""
        selector, sock = self._listeners.selector, self._mesh.sockets[Role.CONTROL][peer]

        def on_data() -> None:
            try:
                received = sock.recv(_PEEK_BYTES, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            selector.unregister(sock)  # the peer has already started sending frames: the monitor will read them
            name = self._names[peer]
            failure = self._reported_in(bytearray(received), name) if received else ended(name)
            self._failure = self._failure or failure

        selector.register(sock, selectors.EVENT_READ, on_data)

    def _reported_in(self, received: bytearray, peer: int) -> CyxtrainError | None:
        """Return the error that the first control frame of a peer reports; None: it reports none."""
        with contextlib.suppress(FrameError):  # the monitor names the link
            frame = take_control_frame(received, self._mesh.checksums)
            if frame is not None and frame[0] is Control.ABORT:
                return error_from_facts(frame[1] | {"message": reported(frame[1].get("message"), peer)})
        return None

    def _unwatch_controls(self) -> None:
        for sock in self._mesh.sockets[Role.CONTROL].values():
            with contextlib.suppress(KeyError):
                self._listeners.selector.unregister(sock)

    def _missing(self) -> RendezvousError:
        """Return the error for a deadline that has passed."""
        timed_out = f"Joining timed out after {self._deadline.seconds:.3g} s"
        missing = sorted({peer for peer, _ in self._awaited})
        own = self._records[self._rank]
        global_ranks = [self._names[peer] for peer in missing]
        unauthenticated = [self._names[peer] for peer in missing if self._acceptor.unauthenticated[peer]]
        hint = "across machines, firewalls must allow TCP between all ranks"
        if unauthenticated:
            hint = (
                f"a process that claimed to be rank {unauthenticated[0]} did not know the secret: CYXTRAIN_SECRET must "
                "be the same on every rank"
            )
        return RendezvousError(
            f"{timed_out}: {', '.join(f'rank {name}' for name in global_ranks)} did not connect to rank "
            f"{self._names[self._rank]} at {own.host}:{own.port}. Look at the output of the missing ranks; "
            f"{hint}.",
            rank=global_ranks[0],
        )


def _closed(where: str, who: str, name: int, rejected: int) -> RendezvousError:
    """Return the error for a rank that closes the connection, each time or after so many proofs."""
    text = f"{where} closes every connection of {who}."
    if rejected == _PROOFS:
        text = (
            f"{where} rejected the proof of {who}: the two were most likely started with different secrets. Set "
            f"CYXTRAIN_SECRET to the same value on every rank, or look at the output of rank {name}."
        )
    return RendezvousError(text, rank=name)


def _refused(where: str, who: str, name: int, error: RefusedError | HandshakeError) -> RendezvousError:
    """Return the error for a rank that refuses another one, or is no rank of this run."""
    text = f"{where} refused {who}: {error}."
    if isinstance(error, HandshakeError):
        text = (
            f"{where}: what answers there is not rank {name} of this run ({error}). Does another program, or an old "
            "process of this job, use that port?"
        )
    return RendezvousError(text, rank=name)
