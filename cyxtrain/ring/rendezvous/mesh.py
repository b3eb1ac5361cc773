"""One rank's connections with all others of a directory: for collectives, messages and control.

A rank connects in three phases (`_Connector.connect_all`): it dials the lower ranks, awaits the higher ones, and
compares its directory with all others. Both sides of a connection authenticate. A rank that has received the digests of
all others knows that all ranks are connected, and that none will choose another algorithm than the rest and hang. A
rank that fails reports the cause at the store that the directory comes from; without a store it sends the cause to the
ranks that it is connected to.

Cost per rank: three sockets to each other rank and one listening socket.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import selectors
import socket
from dataclasses import replace

from cyxtrain.config import RingOptions
from cyxtrain.errors import CyxtrainError, RendezvousError, exhausted, reason_of
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import ClosedError, dial_once, socket_address
from cyxtrain.ring.rendezvous.directory import Directory
from cyxtrain.ring.rendezvous.handshake import PEER_ROLES, HandshakeError, Hello, RefusedError, Role, place_of
from cyxtrain.ring.rendezvous.listen import Listeners
from cyxtrain.ring.rendezvous.membership import EXAMINE_SECONDS, Membership
from cyxtrain.ring.rendezvous.record import RankRecord, cannot_join_error, check_alive, ended_error
from cyxtrain.ring.wire.checksums import Checksums
from cyxtrain.ring.wire.frames import Control, FrameError, abort_error, control_frame, take_control_frame
from cyxtrain.ring.wire.link import POLL_SECONDS, Deadline

_PEEK_BYTES = 1 << 17
"""More than the longest control frame has."""
_CAUSE_SECONDS = 0.1
"""How long a rank whose connection has ended waits for the cause, which arrives at the store or another connection."""
_MAX_REJECTED_PROOFS = 3
"""After so many, a rank reports that the secrets differ."""


class Mesh:
    """The connections of a rank, and the `listeners` that refuse all further ones; it owns both.

    A world of one has neither. The next generation takes over the listeners. `rank` is the rank in the directory.
    """

    def __init__(self, directory: Directory, rank: int, listeners: Listeners | None = None) -> None:
        self.directory = directory
        self.rank = rank
        self.global_rank = directory.global_ranks[rank]
        """The launcher's number of this rank, which errors name."""
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

    With a `membership` ranks report failures at its store; without one, over the connections that they have.

    Raises:
        RendezvousError: A rank has ended, has failed, did not connect in time, or has a different directory.
        CyxtrainError: The error that another rank has reported.
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
    """Connects one rank with all others, once all of them listen. Its methods are in the order of the phases."""

    def __init__(
        self, mesh: Mesh, listeners: Listeners, options: RingOptions, deadline: Deadline, membership: Membership | None
    ) -> None:
        directory = mesh.directory
        rank = mesh.rank
        world_size = len(directory.global_ranks)
        self._mesh = mesh
        self._listeners = listeners
        self._records = directory.records
        self._global_ranks = directory.global_ranks
        self._rank = rank
        self._name = f"rank {mesh.global_rank}"
        self._options = options
        self._deadline = deadline
        self._membership = membership
        self._own = Hello(directory.run, directory.generation, Role.CONTROL, rank, world_size, options.checksums)
        self._awaited = set(itertools.product(range(rank + 1, world_size), PEER_ROLES))
        """The connections that higher ranks have not made yet, as (rank, role)."""
        self._incomplete: set[int] = set()
        """The ranks whose first control frame has not arrived completely."""
        self._failure: CyxtrainError | None = None
        """Why this rank cannot join, as another rank's hello or control connection shows; `_check` raises it."""
        self._examine_deadline = Deadline(0.0)
        self._listeners.serve(self._name, directory.secret, self._authorize, self._accept)

    @property
    def _acceptor(self) -> Acceptor:
        """Owned by the listeners, to avoid a reference cycle."""
        assert self._listeners.acceptor is not None
        return self._listeners.acceptor

    def connect_all(self) -> None:
        """Connect with all other ranks, and wait until they are connected, too."""
        self._dial_lower_ranks()
        self._await_higher_ranks()
        self._compare_directories()
        if not self._options.keeps_listening:
            self._listeners.close_unix()
        self._unwatch_controls()

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks why this one fails, then close the connections."""
        if not isinstance(error, CyxtrainError):
            error = cannot_join_error(self._mesh.global_rank, error)
        if self._membership is not None:
            self._membership.report_failure(error)
        else:
            self._send_abort(error)
        self._unwatch_controls()
        self._mesh.disconnect()

    def _send_abort(self, error: CyxtrainError) -> None:
        frame = control_frame(Control.ABORT, error.to_facts(), self._mesh.checksums)
        for sock in self._mesh.sockets[Role.CONTROL].values():
            with contextlib.suppress(OSError):
                sock.send(frame)

    # Phase 1: dial the lower ranks. Connections of higher ranks are accepted from now on, whenever this rank waits.

    def _dial_lower_ranks(self) -> None:
        for peer in range(self._rank):
            for role in PEER_ROLES:
                self._mesh.sockets[role][peer] = self._dial(peer, role)
            self._watch_control(peer)

    def _dial(self, peer: int, role: Role) -> socket.socket:
        """Connect to a rank, first at its Unix socket if it is on this machine.

        Raises RendezvousError if it cannot be reached, or refuses us.
        """
        record = self._records[peer]
        hello = replace(self._own, role=role, to_rank=peer)
        is_near = bool(record.unix) and record.machine == self._records[self._rank].machine
        unix = is_near and role is not Role.CONTROL  # control needs the kernel timers of TCP
        rejected_proofs = 0
        while True:
            address = socket_address(record, unix=unix)
            where = f"rank {self._global_ranks[peer]} at {place_of(address[1])}"
            try:
                return dial_once(address, hello, self._mesh.directory.secret, self._deadline, self._check)
            except ClosedError as closed:
                self._check_for_cause()
                # It may have closed the connection before it had our proof, or because the proof was late: try again.
                rejected_proofs += closed.proven
                if rejected_proofs == _MAX_REJECTED_PROOFS or self._deadline.passed():
                    raise self._closed_error(peer, where, rejected_proofs) from None
            except (RefusedError, HandshakeError) as error:
                raise self._refused_error(peer, where, error) from None
            except OSError as error:
                if exhausted(error):
                    raise
                if not unix or record.transport == "unix":
                    self._check_for_cause()
                    raise self._unreachable_error(peer, where, error) from None
                unix = False  # they share a kernel but not a network namespace, as two containers may

    def _closed_error(self, peer: int, where: str, rejected_proofs: int) -> RendezvousError:
        """Return the error for a rank that closes every connection, or has rejected too many proofs."""
        global_rank = self._global_ranks[peer]
        text = f"{where} closes every connection of {self._name}."
        if rejected_proofs == _MAX_REJECTED_PROOFS:
            text = (
                f"{where} rejected the proof of {self._name}: the two were most likely started with different secrets. "
                "Set CYXTRAIN_SECRET to the same value on every rank, or look at the output of "
                f"rank {global_rank}."
            )
        return RendezvousError(text, rank=global_rank)

    def _refused_error(self, peer: int, where: str, error: RefusedError | HandshakeError) -> RendezvousError:
        """Return the error for a rank that refuses this one, or for another program at its address."""
        global_rank = self._global_ranks[peer]
        text = f"{where} refused {self._name}: {error}."
        if isinstance(error, HandshakeError):
            text = (
                f"{where}: what answers there is not rank {global_rank} of this run ({error}). Does another program, "
                "or an old process of this job, use that port?"
            )
        return RendezvousError(text, rank=global_rank)

    def _unreachable_error(self, peer: int, where: str, error: OSError) -> RendezvousError:
        global_rank = self._global_ranks[peer]
        return RendezvousError(
            f"{self._name} cannot reach {where} ({reason_of(error)}). Has rank {global_rank} ended? Across machines, "
            "firewalls must allow TCP between all ranks.",
            rank=global_rank,
        )

    # Phase 2: await the higher ranks. The acceptor calls `_authorize` and `_accept`.

    def _await_higher_ranks(self) -> None:
        while self._awaited:
            self._serve(POLL_SECONDS)
            self._check()
            if self._deadline.passed():
                raise self._missing_error()

    def _authorize(self, hello: Hello) -> str | None:
        """Return why a process that knows the secret is refused; "" to accept it, None to let it wait."""
        own = self._own
        if hello.run == own.run and hello.generation > own.generation and self._options.keeps_listening:
            return None
        if hello.run != own.run or hello.generation != own.generation:
            return f"it belongs to another run than {self._name}, or to an earlier incarnation of this run"
        return self._authorize_peer(hello)

    def _authorize_peer(self, hello: Hello) -> str:
        """Authorize a process of this run and generation. If it was started differently, this rank fails, too."""
        own = self._own
        # Each rank of a later generation brings its own directory.
        if own.generation and (hello.world_size, hello.to_rank) != (own.world_size, own.rank):
            self._failure = self._mesh.directory.other_ranks_error(self._rank)
            return str(self._failure)
        if not hello.to_place or hello.to_rank != own.rank:
            return f"it connected to rank {hello.to_rank} and reached rank {own.rank}"
        if hello.rank >= hello.world_size:
            return f"there is no rank {hello.rank} in a world of {hello.world_size}"
        caller = hello.rank
        if caller < len(self._global_ranks):  # not if it was started for a larger world
            caller = self._global_ranks[caller]
        caller_record = RankRecord(hello.world_size, checksums=hello.checksums, protocol=hello.protocol)
        own_record = RankRecord(own.world_size, checksums=own.checksums)
        incompatible = caller_record.why_incompatible(caller, own_record, self._mesh.global_rank)
        if incompatible:
            self._failure = RendezvousError(incompatible, rank=caller)
            return incompatible
        if (hello.rank, hello.role) not in self._awaited:
            return f"rank {caller} is taken: another process has joined as rank {caller} already"
        return ""

    def _accept(self, hello: Hello, sock: socket.socket) -> None:
        self._awaited.discard((hello.rank, hello.role))
        self._mesh.sockets[hello.role][hello.rank] = sock
        if hello.role is Role.CONTROL:
            self._watch_control(hello.rank)

    def _missing_error(self) -> RendezvousError:
        """Return the error for a deadline that has passed."""
        missing = sorted({peer for peer, _ in self._awaited})
        missing_ranks = ", ".join(f"rank {self._global_ranks[peer]}" for peer in missing)
        unauthenticated = [peer for peer in missing if self._acceptor.unauthenticated[peer]]
        own = self._records[self._rank]
        hint = "across machines, firewalls must allow TCP between all ranks"
        if unauthenticated:
            hint = (
                f"a process that claimed to be rank {self._global_ranks[unauthenticated[0]]} did not know the secret: "
                "CYXTRAIN_SECRET must be the same on every rank"
            )
        return RendezvousError(
            f"Joining timed out after {self._deadline.seconds:.3g} s: {missing_ranks} did not connect to rank "
            f"{self._mesh.global_rank} at {own.host}:{own.port}. Look at the output of the missing ranks; {hint}.",
            rank=self._global_ranks[missing[0]],
        )

    # Phase 3: this rank is connected to all others; the comparison tells it that they are, too.

    def _compare_directories(self) -> None:
        mesh = self._mesh
        sockets = mesh.sockets[Role.COLLECTIVES]
        mesh.all_unix = mesh.directory.compare(
            self._rank, sockets, mesh.checksums, self._deadline, self._check_comparison
        )

    def _check_comparison(self, has_ended: bool) -> None:
        """Raise the reason why ranks cannot compare directories, if there is one.

        Another group has lost a rank, a control connection has ended, or, if a rank `has_ended`, a rank reports why.
        """
        if self._membership is not None:
            self._membership.check_groups()
        self._serve(0.0)  # nobody else notices a control connection that ends now
        if not has_ended and self._failure is None:
            return
        try:
            self._check_for_cause()
        except CyxtrainError:
            # The end of the store is not a cause: rank 0 may have all directories, and have left.
            if self._membership is None or not self._membership.store.lost:
                raise

    # In each phase: what this rank does while it waits, and why it may fail.

    def _serve(self, seconds: float) -> None:
        """Serve connections for up to `seconds`, then look again at control frames that were incomplete."""
        self._acceptor.serve(seconds)
        for peer in list(self._incomplete):
            self._look_at_control_frame(peer)

    def _check(self) -> None:
        """Raise the error that has made connecting fail, if any."""
        if self._membership is not None:
            self._membership.check()  # first: a rank that closes its connections has already reported why
        else:
            self._serve(0.0)
            if self._examine_deadline.passed():
                self._check_processes()
        failure = self._failure or self._acceptor.failure
        if failure is not None:
            raise failure

    def _check_for_cause(self) -> None:
        """Raise the error of the rank that knows why a connection has ended, which has a moment to report it."""
        Deadline(min(_CAUSE_SECONDS, self._deadline.left())).poll_until(self._check)
        self._check_processes()

    def _check_processes(self) -> None:
        """Raise the error for a rank whose process has ended."""
        self._examine_deadline = Deadline(EXAMINE_SECONDS)
        check_alive(self._records[self._rank], dict(zip(self._global_ranks, self._records, strict=True)))

    def _watch_control(self, peer: int) -> None:
        """Notice that a connected rank ends, or reports why it fails, while others are awaited."""
        sock = self._mesh.sockets[Role.CONTROL][peer]
        on_data = functools.partial(self._on_control_data, peer, sock)
        self._listeners.selector.register(sock, selectors.EVENT_READ, on_data)

    def _on_control_data(self, peer: int, sock: socket.socket) -> None:
        # Its data is not taken, so the selector would report it again and again.
        self._listeners.selector.unregister(sock)
        self._incomplete.add(peer)
        self._look_at_control_frame(peer)

    def _look_at_control_frame(self, peer: int) -> None:
        """Note why a connected rank fails, if it has ended or its first control frame says so."""
        sock = self._mesh.sockets[Role.CONTROL][peer]
        try:
            # Peek, as a rank that has all connections already sends frames that the monitor must read.
            received = sock.recv(_PEEK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        global_rank = self._global_ranks[peer]
        error: CyxtrainError | None = None
        if not received:
            error = ended_error(global_rank)
        else:
            # The monitor will name the sender of an invalid frame.
            with contextlib.suppress(FrameError):
                frame = take_control_frame(bytearray(received), self._mesh.checksums)
                if frame is None:
                    return
                kind, facts = frame
                if kind is Control.ABORT:
                    error = abort_error(facts, global_rank)
        self._incomplete.discard(peer)
        self._failure = self._failure or error

    def _unwatch_controls(self) -> None:
        for sock in self._mesh.sockets[Role.CONTROL].values():
            with contextlib.suppress(KeyError):
                self._listeners.selector.unregister(sock)
