"""What runs the calls of one rank of a group, from the first one until the group fails or is left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

from cyxtrain.config import RingOptions
from cyxtrain.errors import CyxtrainError, DistributedTrainingError, PeerLostError, PeerSilentError
from cyxtrain.ring.collective_thread import CollectiveThread, is_worth_it
from cyxtrain.ring.executor import Executor, SingleRankExecutor
from cyxtrain.ring.messages import Mailbox
from cyxtrain.ring.monitoring.activity import CurrentActivity
from cyxtrain.ring.monitoring.failure import GroupFailure
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.monitoring.monitor import PeerMonitor
from cyxtrain.ring.rendezvous.handshake import Role
from cyxtrain.ring.rendezvous.mesh import Mesh
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.schedules.algorithms import FEW_RANKS
from cyxtrain.ring.schedules.kernels import Scratch
from cyxtrain.ring.schedules.reduction import Stage
from cyxtrain.ring.schedules.selector import SEGMENT_BYTES, AlgorithmSelector
from cyxtrain.ring.shared_memory.staged import StagedCollectives
from cyxtrain.ring.wire.frames import Kind, Numbered, Operation
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.wire.persistent import PersistentOperation, PersistentOps, Rounds

_LEAVE_SECONDS = 1.0
"""How long `leave` waits for another thread's collective."""
_LOST_RANK_ERRORS = (PeerLostError, PeerSilentError, DistributedTrainingError)


class Engine:
    """Runs numbered operations, one at a time, until the group fails or is left; owns the `mesh`.

    A world of one binds no port, starts no thread and cannot fail: it has no links, no monitor and no mailbox.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta, options: RingOptions, registry: GroupRegistry) -> None:
        self.mesh = mesh
        self.timeout = timeout
        """How long a call may take that does not set its own timeout."""
        self.lock = threading.RLock()
        """Held from the numbering of an operation until it has run; also by callers that run several in a row."""
        self.sequence = 0
        """How many collectives have begun."""
        self.failure = GroupFailure()
        self.monitor: PeerMonitor | None = None
        self.mailbox: Mailbox | None = None
        self.links: dict[int, Link] = {}
        """The links for collectives, by rank in the group."""
        self.scratch = Scratch(0)
        self.selector = AlgorithmSelector(mesh.rank, 1, (mesh.rank,))
        self._executor: Executor | SingleRankExecutor = SingleRankExecutor()
        self._activity = CurrentActivity()
        self._uses_thread = False
        self._thread: CollectiveThread | None = None
        self._has_left = False
        self._registry = registry
        self._created_at = time.monotonic()
        if len(mesh.directory.global_ranks) > 1:
            try:
                self._start(options)
            except BaseException:
                mesh.close()
                raise
        self.persistent = PersistentOps(self.links, self.selector, mesh.directory.generation)
        self.staged = StagedCollectives(self.persistent, mesh.directory.global_ranks)
        registry.add(self)

    def _start(self, options: RingOptions) -> None:
        """Start the links, the monitor, the mailbox and the executor of a group of several ranks."""
        records = self.mesh.directory.records
        machines = [record.machine for record in records]
        self.selector = _selector(records, self.mesh.rank, all_unix=self.mesh.all_unix)
        self.scratch = Scratch(SEGMENT_BYTES)
        self._uses_thread = is_worth_it(options.communication, machines, [record.room for record in records])
        self.links = _links(self.mesh, Role.COLLECTIVES, options)
        message_links = _links(self.mesh, Role.MESSAGES, options)
        links = (*self.links.values(), *message_links.values())
        self.monitor = PeerMonitor(self.mesh, links, self._activity.describe)
        self.failure = self.monitor.failure
        self.mailbox = Mailbox(message_links, self.monitor)
        self._executor = Executor(self.links, self.mailbox, self.monitor)

    @property
    def transport(self) -> str:
        """How collectives reach other ranks: "unix", "tcp", "unix within a machine, tcp between", or "none"."""
        transports = {link.transport for link in self.links.values()}
        if len(transports) > 1:
            return "unix within a machine, tcp between"
        return transports.pop() if transports else "none"

    # Calls.

    def thread_for(self, *, asynchronous: bool) -> CollectiveThread | None:
        """Return the thread that makes a call for the caller; None if the caller makes it."""
        self._activity.thread = threading.get_ident()
        if asynchronous and self._thread is None:
            self._start_thread()
        thread = self._thread
        if thread is None or thread.is_current:
            return None
        # A call must not overtake those that wait in the thread's queue.
        if asynchronous or thread.busy:
            return thread
        return None

    def _start_thread(self) -> None:
        """Start the collective thread, unless the group has been left or is faster without one."""
        if self._has_left or not self._uses_thread:
            return
        with self.lock:
            if self._thread is None:
                self._thread = CollectiveThread()

    def run(self, operation: Operation, stages: Iterable[Stage], timeout: timedelta | None) -> None:
        """Run an operation that has the next number; the caller holds the lock."""
        self._begin(operation)
        self._executor.run(operation, stages, timeout or self.timeout)

    def run_persistent(self, operation: PersistentOperation, rounds: Rounds, timeout: timedelta | None = None) -> None:
        """Number and run a persistent operation. Cost: its exchanges, see `PersistentOperation`."""
        with self.lock:
            operation.sequence = self.sequence + 1
            self._begin(operation)
            self._executor.run_persistent(operation, rounds, timeout or self.timeout)

    def _begin(self, operation: Numbered) -> None:
        """Make an operation the current one, unless the group has failed."""
        # A later result could only be wrong.
        if self.failure.error is not None:
            raise self.failure.call_error(operation.describe())
        self.sequence += 1
        self._executor.spin_before_blocking = self._thread is None or not self._thread.is_current
        self._activity.latest = operation

    def share_descriptor(self, descriptor: int, timeout: timedelta | None) -> int:
        """Return rank 0's file descriptor on every rank, right after a broadcast, under its number."""
        with self.lock:
            operation = Operation(Kind.BROADCAST, self.sequence, generation=self.mesh.directory.generation)
            return self._executor.share_descriptor(operation, descriptor, 0, timeout or self.timeout)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let no collective run within; raise CyxtrainError if one runs, or waits in the collective thread."""
        thread = self._thread
        if (thread is not None and thread.busy) or not self.lock.acquire(blocking=False):
            raise CyxtrainError(
                f"rank {self.mesh.global_rank} cannot replace its group while a collective of it runs: "
                f"{self._activity.describe()}."
            )
        try:
            yield
        finally:
            self.lock.release()

    # The end, by a failure or by leaving.

    def fail(self, reason: str | CyxtrainError) -> None:
        """End the group because of an error of this rank, and tell all ranks why."""
        if self.monitor is None:
            return
        if not isinstance(reason, CyxtrainError):
            rank = self.mesh.global_rank
            reason = PeerLostError(f"rank {rank} has ended: {reason}", rank=rank)
        self.failure.is_raised = True
        self.monitor.fail(reason)

    def await_failure(self, seconds: float) -> None:
        """Wait until the group has failed, at most `seconds`."""
        if self.monitor is not None and seconds > 0:
            self.monitor.await_failure(seconds)

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Call a function once, in any thread, when the group fails; at once if it has failed already."""
        if self.monitor is not None:
            self.monitor.call_on_failure(function)

    def peer_failure(self, since: float) -> CyxtrainError | None:
        """Return the error of a group that lost a rank, unless it failed before `since` and this rank has left it."""
        is_past = self._has_left and self.failure.at < since
        if is_past or not isinstance(self.failure.error, _LOST_RANK_ERRORS):
            return None
        return self.failure.error

    def leave(self, *, keeps_listening: bool = False) -> None:
        """Leave with a goodbye, unless the group has failed. Idempotent."""
        if self._thread is not None:
            self._thread.close(_LEAVE_SECONDS)
        if not self.lock.acquire(timeout=_LEAVE_SECONDS):
            self.fail("it left while another of its threads was in a collective.")
            self.lock.acquire()
        try:
            if not self._has_left:
                self._has_left = True
                self._disconnect()
            if not keeps_listening:
                self.mesh.close()
        finally:
            self.lock.release()

    def _disconnect(self) -> None:
        """Send a goodbye, unless the group has failed, and close all but the listeners of the mesh."""
        # Without its staged collectives, the group lets go of their shared memory.
        self.staged = StagedCollectives(self.persistent, self.mesh.directory.global_ranks)
        if self.monitor is None or self.mailbox is None:
            return
        peer_failure = self._registry.peer_failure(self._created_at)
        # The other ranks should see the cause, not a goodbye.
        if peer_failure is not None:
            self.monitor.fail(peer_failure)
        thread_has_ended = self.monitor.leave(self.sequence)
        self.mailbox.close()
        if thread_has_ended:
            self.mesh.disconnect()
        else:
            self.mesh.close()  # the thread still serves the listeners

    def abandon(self) -> None:
        """Close all connections without a goodbye, as a forked child does."""
        self.lock = threading.RLock()  # another thread of the parent may have held the old one
        self._has_left = True
        self._thread = None
        self.staged = StagedCollectives(self.persistent, self.mesh.directory.global_ranks)
        if self.monitor is not None:
            self.monitor.abandon()
            self.mesh.abandon()


def _links(mesh: Mesh, role: Role, options: RingOptions) -> dict[int, Link]:
    checksums = mesh.checksums if options.checksums else None
    names = mesh.directory.global_ranks
    return {peer: Link(sock, names[peer], checksums) for peer, sock in mesh.sockets[role].items()}


def _selector(records: Sequence[RankRecord], rank: int, *, all_unix: bool) -> AlgorithmSelector:
    world_size = len(records)
    machines = [record.machine for record in records]
    cores = min(record.cores for record in records)
    are_together = len(set(machines)) == 1
    return AlgorithmSelector(
        rank,
        world_size,
        ring=_ordered_by_machine(machines),
        shares_memory=all_unix and world_size <= FEW_RANKS,
        oversubscribed=are_together and world_size > max(2, cores),
        core_per_rank=are_together and world_size <= cores,
    )


def _ordered_by_machine(machines: Sequence[str]) -> tuple[int, ...]:
    """Return all ranks, ordered by machine; machines come in the order of their first ranks."""
    return tuple(sorted(range(len(machines)), key=lambda rank: (machines.index(machines[rank]), rank)))
