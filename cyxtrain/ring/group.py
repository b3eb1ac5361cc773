"""Collectives on tensors: numbering, error handling and shutdown.

A group is immutable: its ranks never change, and its generation distinguishes its frames from a later group's.
How it notices that a rank has died: `monitoring/monitor.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.errors import ConfigError, CyxtrainError, DistributedTrainingError, PeerLostError, PeerSilentError
from cyxtrain.ring.collective_thread import CollectiveThread, is_worth_it
from cyxtrain.ring.executor import Executor, SingleRankExecutor
from cyxtrain.ring.messages import ANY_SOURCE, Mailbox, Message
from cyxtrain.ring.monitoring.activity import CurrentActivity
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.monitoring.heartbeat import Heartbeat
from cyxtrain.ring.monitoring.monitor import PeerMonitor
from cyxtrain.ring.rendezvous.handshake import Role
from cyxtrain.ring.rendezvous.rendezvous import RendezvousResult, rendezvous
from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import FEW_RANKS, even_spans
from cyxtrain.ring.schedules.kernels import Combiner, Reduction, Scratch, memory_of
from cyxtrain.ring.schedules.reduction import Buffers, ReductionPlan, Stage
from cyxtrain.ring.schedules.selector import SEGMENT_BYTES, AlgorithmSelector
from cyxtrain.ring.schedules.summation import Span, is_latency_bound
from cyxtrain.ring.shared_memory.staged import StagedCollectives, StagedCopy, StagedReduction
from cyxtrain.ring.wire.frames import MAX_DIMENSIONS, NO_ROOT, Kind, Numbered, Operation, dtype_code, in_call
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.wire.payload import (
    check_target,
    check_tensor,
    copy_back,
    flat_copy_of,
    flat_view_of,
    has_plain_memory,
    overlap,
    write,
)
from cyxtrain.ring.wire.persistent import PersistentHeader, PersistentOps, Rounds, SmallReduction

_LEAVE_SECONDS = 1.0
"""How long `leave` waits for another thread's collective."""


class Connections:
    """Links, mailbox, monitor and executor of a group of several ranks; it owns the `result` of the rendezvous.

    `describe` returns what this rank is doing.
    """

    def __init__(
        self,
        result: RendezvousResult,
        rank: int,
        global_ranks: Sequence[int],
        options: RingOptions,
        describe: Callable[[], str],
    ) -> None:
        self.rendezvous_result = result
        self.scratch = Scratch(SEGMENT_BYTES)
        sockets = result.sockets
        self.selector = _selector(result, rank)
        machines, room = [entry.machine for entry in result.table], [entry.room for entry in result.table]
        self.overlaps = is_worth_it(options.communication, machines, room)
        sums = result.checksums if options.checksums else None
        self.links, self.message_links = (
            {peer: Link(sock, global_ranks[peer], sums) for peer, sock in sockets[role].items()}
            for role in (Role.COLLECTIVES, Role.MESSAGES)
        )
        controls = {global_ranks[peer]: sock for peer, sock in sockets[Role.CONTROL].items()}
        others = {global_ranks[peer]: result.table[peer].process for peer in self.links}
        own = result.table[rank].process
        heartbeat = Heartbeat(own, others, options.heartbeat_timeout_seconds, time.monotonic())
        links = (*self.links.values(), *self.message_links.values())
        self.monitor = PeerMonitor(global_ranks[rank], controls, heartbeat, result, links, describe)
        self.mailbox = Mailbox(self.message_links, self.monitor)
        self.executor = Executor(self.links, self.mailbox, self.monitor)

    @property
    def transport(self) -> str:
        """How collectives reach the other ranks: "unix", "tcp", or "unix within a machine, tcp between"."""
        found = {link.transport for link in self.links.values()}
        return found.pop() if len(found) == 1 else "unix within a machine, tcp between"

    def abandon(self) -> None:
        """Close everything without a goodbye, in a forked child."""
        self.monitor.abandon()
        self.rendezvous_result.abandon()

    def close(self, collectives: int) -> None:
        """Say goodbye, unless the group has failed, and close everything; `collectives`: how many it has done."""
        self.monitor.leave(collectives)
        self.mailbox.close()
        self.rendezvous_result.close()


class Group:
    """One rank of a group: collectives on tensors, numbering, error handling and shutdown.

    All ranks call a collective in the same order, with the same shapes, dtypes and reductions. It runs in the calling
    thread. The first error is final: every later call raises it again. A world of one binds no port and starts no
    thread. The arguments are those of `RingProcessGroup`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        join_timeout: timedelta,
        generation: int = 0,
        global_ranks: Sequence[int] | None = None,
        options: RingOptions | None = None,
        registry: GroupRegistry | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._generation = generation
        self.sequence = 0
        """How many collectives this group has begun."""
        self._lock = threading.RLock()
        self._left = False
        self._global_ranks = tuple(range(world_size)) if global_ranks is None else tuple(global_ranks)
        self._registry = registry or GroupRegistry()
        self._created_at = time.monotonic()
        self._activity, options = CurrentActivity(), options or RingOptions()
        connections = self._connect(store, join_timeout, options) if world_size > 1 else None
        self._connections = connections
        self._monitor = None if connections is None else connections.monitor
        self._collective_thread: CollectiveThread | None = None
        self._scratch = Scratch(0) if connections is None else connections.scratch
        self._selector = AlgorithmSelector(rank, world_size, (rank,)) if connections is None else connections.selector
        self._executor = SingleRankExecutor() if connections is None else connections.executor
        self.persistent = PersistentOps({} if connections is None else connections.links, self._selector, generation)
        self._staged = StagedCollectives(self.persistent, self._global_ranks)
        self._registry.add(self)

    def _connect(self, store: Store, timeout: timedelta, options: RingOptions) -> Connections:
        rank, ranks, failure = self.rank, self._global_ranks, self._registry.await_peer_failure
        result = rendezvous(store, rank, ranks, timeout, options, self._generation, failure)
        try:
            return Connections(result, rank, ranks, options, self._activity.describe)
        except BaseException:
            result.close()
            raise

    def exclusive(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which no other thread's collective runs."""
        return self._lock

    def global_rank(self, rank: int) -> int:
        """Return a rank's rank in the world."""
        return self._global_ranks[rank]

    def collective_thread(self, *, asynchronous: bool) -> CollectiveThread | None:
        """Return the thread that makes a call for the caller; None: the caller makes it."""
        self._activity.thread = threading.get_ident()
        overlaps = self._connections is not None and self._connections.overlaps
        if self._collective_thread is None and asynchronous and not self._left and overlaps:
            with self._lock:
                self._collective_thread = self._collective_thread or CollectiveThread()
        collective_thread = self._collective_thread
        if collective_thread is None or collective_thread.is_current or not (asynchronous or collective_thread.busy):
            return None
        return collective_thread

    @property
    def reported_devices(self) -> list[tuple[str, str]]:
        """Machine and description of accelerators, by rank; empty in a world of one."""
        table = [] if self._connections is None else self._connections.rendezvous_result.table
        return [(entry.machine, entry.devices) for entry in table]

    @property
    def transport(self) -> str:
        """How collectives reach other ranks; see `Connections`. Alone: "none"."""
        return "none" if self._connections is None else self._connections.transport

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
        """Reduce in place, on all ranks. Cost: see the table in docs/ring.md."""
        flat = tensor if has_plain_memory(tensor) else flat_view_of(check_target(tensor))
        memory = memory_of(flat)
        with self._lock:
            if not self._run_prepared(Kind.ALL_REDUCE, tensor, memory, memory, timeout, reduction):
                operation, plan = self._plan(Kind.ALL_REDUCE, tensor, flat_view_of(flat), reduction)
                stages = plan.stages(lambda spans: self._selector.all_gather(spans, flat.element_size()))
                self._executor.run(operation, stages, timeout or self.timeout)
            copy_back(flat, tensor)
            self._staged.create_after(self, Kind.ALL_REDUCE, tensor, reduction, timeout)

    def _run_prepared(
        self,
        kind: Kind,
        tensor: Tensor,
        source: memoryview,
        target: memoryview,
        timeout: timedelta | None,
        reduction: Reduction = Reduction.NONE,
        root: int | None = None,
    ) -> bool:
        """Do a small reduction, or a collective by way of shared memory; return whether this is one of them."""
        self._check_root(root)
        prepared: SmallReduction | StagedCopy | StagedReduction | None
        prepared = self.persistent.find(kind, tensor, reduction, self._root_name(root))
        if prepared is None:
            prepared = self._staged.find(kind, tensor, reduction, root)
        if prepared is None:
            return False
        self.run_persistent(prepared.header, prepared.run(source, target), timeout)
        return True

    def run_persistent(self, header: PersistentHeader, rounds: Rounds, timeout: timedelta | None = None) -> None:
        """Run a persistent operation. Cost: its exchanges, see `PersistentHeader`."""
        with self._lock:
            header.sequence = self.sequence + 1
            self._begin(header)
            self._executor.run_persistent(header, rounds, timeout or self.timeout)

    def reduce(self, tensor: Tensor, reduction: Reduction, dst: int, timeout: timedelta | None = None) -> None:
        """Reduce in place on rank `dst`, bitwise identical to `all_reduce`; other ranks' tensors do not change."""
        flat = flat_copy_of(check_target(tensor))
        memory = memory_of(flat)
        with self._lock:
            if not self._run_prepared(Kind.REDUCE, tensor, memory, memory, timeout, reduction, root=dst):
                operation, plan = self._plan(Kind.REDUCE, tensor, flat, reduction, dst)
                rank, size = self.rank, self.world_size
                stages = plan.stages(lambda spans: algorithms.gather(rank, size, spans, dst, spans[rank]))
                self._executor.run(operation, stages, timeout or self.timeout)
        if self.rank == dst:
            copy_back(flat, tensor)

    def reduce_scatter(
        self,
        output: Tensor,
        source: Tensor,
        reduction: Reduction,
        timeout: timedelta | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Reduce the flat `source`; each rank gets its part, bitwise identical to `all_reduce`.

        `sizes` are those of the parts, by rank; None: all are as long as the output.
        """
        if sizes is not None and len(set(sizes)) > 1:
            self._reduce_scatter_uneven(output, source, reduction, timeout, sizes)
            return
        spans = even_spans(check_target(output).numel(), self.world_size)
        target = flat_view_of(output)
        if overlap(target, source):
            target = torch.empty_like(target)
        with self._lock:
            memories = memory_of(source), memory_of(target)
            if self._run_prepared(Kind.REDUCE_SCATTER, output, *memories, timeout, reduction):
                copy_back(target, output)
                return
            flat = source.clone()
            operation, plan = self._plan(Kind.REDUCE_SCATTER, output, flat, reduction)
            stages = plan.by_doubling() if plan.is_few else plan.by_chunks(spans)
            self._executor.run(operation, stages, timeout or self.timeout)
            write(flat[slice(*spans[self.rank])], output)
            self._staged.create_after(self, Kind.REDUCE_SCATTER, output, reduction, timeout)

    def _reduce_scatter_uneven(
        self, output: Tensor, source: Tensor, reduction: Reduction, timeout: timedelta | None, sizes: Sequence[int]
    ) -> None:
        flat, end = source.clone(), sum(sizes[: self.rank + 1])
        check_target(output)
        # Ranks must agree on all sizes; a header holds only a few.
        shape = tuple(sizes) if len(sizes) <= MAX_DIMENSIONS else (sum(sizes), zlib.crc32(repr(list(sizes)).encode()))
        with self._lock:
            operation, plan = self._plan(Kind.REDUCE_SCATTER, output, flat, reduction, shape=shape)
            stages = plan.stages(lambda spans: self._selector.all_gather(spans, flat.element_size()))
            self._executor.run(operation, stages, timeout or self.timeout)
        write(flat[end - sizes[self.rank] : end], output)

    def _plan(
        self,
        kind: Kind,
        tensor: Tensor,
        flat: Tensor,
        reduction: Reduction,
        dst: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> tuple[Operation, ReductionPlan]:
        """Number a reduction of `flat`; an unsupported dtype is refused before."""
        # Where every rank sums all elements they must keep the same one of two NaNs, wherever their memory begins.
        use_numpy = not is_latency_bound(self.world_size, flat.numel(), flat.element_size())
        combiner = Combiner(reduction, flat, self._scratch, use_numpy=use_numpy)
        operation = self._operation(kind, tensor, reduction, dst, shape)
        return operation, ReductionPlan(reduction, flat, combiner, self._scratch, self._selector)

    def broadcast(self, tensor: Tensor, src: int, timeout: timedelta | None = None) -> None:
        """Copy the tensor of rank `src` to all."""
        flat = flat_view_of(check_target(tensor))
        memory = memory_of(flat)
        with self._lock:
            if not self._run_prepared(Kind.BROADCAST, tensor, memory, memory, timeout, root=src):
                operation = self._operation(Kind.BROADCAST, tensor, root=src)
                schedule = self._selector.broadcast(flat.numel(), src, flat.element_size())
                stage = Stage(schedule, Buffers(memory, memory, flat.element_size()))
                self._executor.run(operation, [stage], timeout or self.timeout)
            copy_back(flat, tensor)
            self._staged.create_after(self, Kind.BROADCAST, tensor, Reduction.NONE, timeout)

    def share_descriptor(self, descriptor: int, timeout: timedelta | None = None) -> int:
        """Return rank 0's file descriptor on every rank; see `segment.Ranks`. Call it within `exclusive`."""
        with self._lock:
            operation = Operation(Kind.BROADCAST, self.sequence, generation=self._generation)
            return self._executor.share_descriptor(operation, descriptor, 0, timeout or self.timeout)

    def all_gather(self, gathered: Tensor, tensor: Tensor, timeout: timedelta | None = None) -> None:
        """Copy the tensor of every rank into the flat `gathered` of all."""
        spans = even_spans(tensor.numel(), self.world_size)
        own, source = gathered[slice(*spans[self.rank])], flat_view_of(tensor)
        memory = memory_of(gathered)
        with self._lock:
            if source.data_ptr() != own.data_ptr():
                own.copy_(source)
            if not self._run_prepared(Kind.ALL_GATHER, tensor, memory, memory, timeout):
                operation = self._operation(Kind.ALL_GATHER, tensor)
                schedule = self._selector.all_gather(spans, gathered.element_size())
                stage = Stage(schedule, Buffers(memory, memory, gathered.element_size()))
                self._executor.run(operation, [stage], timeout or self.timeout)
            self._staged.create_after(self, Kind.ALL_GATHER, tensor, Reduction.NONE, timeout)

    def gather(self, gathered: Tensor, tensor: Tensor, dst: int, timeout: timedelta | None = None) -> None:
        """Copy the tensor of every rank into the flat `gathered` of rank `dst`."""
        source = flat_view_of(tensor)
        count = source.numel()
        spans = even_spans(count, self.world_size)
        schedule = algorithms.gather(self.rank, self.world_size, spans, dst, (0, count))
        buffers = Buffers(memory_of(source), memory_of(gathered), source.element_size())
        with self._lock:
            operation = self._operation(Kind.GATHER, tensor, root=dst)
            self._executor.run(operation, [Stage(schedule, buffers)], timeout or self.timeout)
        if self.rank == dst:
            gathered[slice(*spans[dst])] = source

    def scatter(self, output: Tensor, flat: Tensor, src: int, timeout: timedelta | None = None) -> None:
        """Copy to each rank its part of the `flat` of rank `src`."""
        target = flat_view_of(check_target(output))
        count = target.numel()
        spans = even_spans(count, self.world_size)
        schedule = algorithms.scatter(self.rank, self.world_size, spans, src, (0, count))
        buffers = Buffers(memory_of(flat), memory_of(target), target.element_size())
        with self._lock:
            operation = self._operation(Kind.SCATTER, output, root=src)
            self._executor.run(operation, [Stage(schedule, buffers)], timeout or self.timeout)
        if self.rank == src:
            target.copy_(flat[slice(*spans[src])])
        copy_back(target, output)

    def all_to_all(
        self,
        target: Tensor,
        receive: Sequence[Span],
        source: Tensor,
        send: Sequence[Span],
        timeout: timedelta | None = None,
    ) -> None:
        """Send `send[r]` of the flat source to each rank r, and receive from it into `receive[r]`."""
        (begin, end), (first, last) = send[self.rank], receive[self.rank]
        if end - begin != last - first:
            raise ConfigError(
                f"all_to_all: rank {self._global_ranks[self.rank]} sends {end - begin} elements to itself and "
                f"receives {last - first} from itself; both must be the same."
            )
        schedule = algorithms.all_to_all(self.rank, self.world_size, send, receive)
        buffers = Buffers(memory_of(source), memory_of(target), source.element_size())
        with self._lock:
            # Ranks may send different amounts, so the shape is not compared.
            operation = self._operation(Kind.ALL_TO_ALL, source, shape=())
            self._executor.run(operation, [Stage(schedule, buffers)], timeout or self.timeout)
        target[first:last] = source[begin:end]

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait until all ranks have called it."""
        nothing = Buffers(memoryview(bytearray()), memoryview(bytearray()), 1)
        stage = Stage(algorithms.dissemination_barrier(self.rank, self.world_size), nothing)
        with self._lock:
            self._executor.run(self._operation(Kind.BARRIER, None), [stage], timeout or self.timeout)

    def message(self, flat: Tensor, peer: int, tag: int, *, receiving: bool) -> tuple[Mailbox, Message]:
        """Start a send or recv of a flat tensor, which is kept until it is done."""
        if peer == self.rank or self._connections is None:
            raise ConfigError(f"rank {self._global_ranks[self.rank]} cannot send to or receive from itself.")
        if not ANY_SOURCE <= peer < self.world_size:
            raise ConfigError(f"rank {peer} is not in this group of {self.world_size}.")
        operation = Operation(
            Kind.MESSAGE, 0, Reduction.NONE, dtype_code(flat.dtype), tuple(flat.shape), tag, self._generation
        )
        self._raise_failure(operation)
        message = Message(operation, peer, memory_of(flat))
        mailbox = self._connections.mailbox
        failure: CyxtrainError | None = None
        try:
            (mailbox.post_receive if receiving else mailbox.post_send)(message)
        except CyxtrainError as error:
            self._connections.monitor.is_raised = True
            failure = in_call(error, operation.describe())
        if failure is not None:
            raise failure  # here, so that its context is the exception that the caller is handling
        return mailbox, message

    def _operation(
        self,
        kind: Kind,
        tensor: Tensor | None,
        reduction: Reduction = Reduction.NONE,
        root: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Operation:
        """Number the next collective; the caller holds the lock until it has run."""
        self._check_root(root)
        code = 0 if tensor is None else dtype_code(check_tensor(tensor).dtype)
        if shape is None:
            shape = () if tensor is None else tuple(tensor.shape)
        name = self._root_name(root)
        self._begin(operation := Operation(kind, self.sequence + 1, reduction, code, shape, name, self._generation))
        return operation

    def _root_name(self, root: int | None) -> int:
        """Return a root's rank in the world, as headers name it."""
        return NO_ROOT if root is None else self._global_ranks[root]

    def _check_root(self, root: int | None) -> None:
        if root is not None and not 0 <= root < self.world_size:
            raise ConfigError(f"rank {root} is not in this group of {self.world_size}.")

    def _begin(self, operation: Numbered) -> None:
        """Make an operation the current one, unless the group has failed."""
        self._raise_failure(operation)
        self.sequence += 1
        self._executor.spin_before_blocking = self._collective_thread is None or not self._collective_thread.is_current
        self._activity.latest = operation

    def _raise_failure(self, operation: Numbered) -> None:
        """Raise the group's error, if it has failed: a later result could only be wrong."""
        if self._monitor is not None and self._monitor.failure is not None:
            self._monitor.is_raised = True
            raise in_call(self._monitor.failure, operation.describe())

    @property
    def raised_failure(self) -> CyxtrainError | None:
        """The error that ended this group, once this rank's program has seen it; else None."""
        return self._monitor.failure if self._monitor is not None and self._monitor.is_raised else None

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Set what is called once, in any thread, when the group fails; if it has failed already, call it now."""
        if self._monitor is not None:
            self._monitor.call_on_failure(function)

    def failure(self, during: str, seconds: float = 0.0) -> CyxtrainError | None:
        """Return the error that ended this group, as this rank raises it; wait for it at most `seconds`."""
        monitor = self._monitor
        failure = None if monitor is None else monitor.await_failure(seconds) if seconds else monitor.failure
        if monitor is None or failure is None:
            return None
        monitor.is_raised = True
        return in_call(failure, during)

    def leave(self) -> None:
        """Leave with a goodbye, unless the group has failed. Idempotent."""
        if self._collective_thread is not None:
            self._collective_thread.close(_LEAVE_SECONDS)
        if not self._lock.acquire(timeout=_LEAVE_SECONDS):
            self.fail("it left while another of its threads was in a collective.")
            self._lock.acquire()
        try:
            left, self._left, self._staged = self._left, True, StagedCollectives(self.persistent, self._global_ranks)
            if self._connections is not None and not left:
                peer_failure = self._registry.peer_failure(self._created_at)
                if peer_failure is not None:  # the cause: a goodbye would be reported instead
                    self._connections.monitor.fail(peer_failure)
                self._connections.close(self.sequence)
        finally:
            self._lock.release()

    def peer_failure(self, since: float) -> CyxtrainError | None:
        """Return the error of a group that lost a rank, if it is still open or failed after `since`."""
        monitor, lost = self._monitor, (PeerLostError, PeerSilentError, DistributedTrainingError)
        if monitor is None or not isinstance(monitor.failure, lost):
            return None
        return None if self._left and monitor.failed_at < since else monitor.failure

    def abandon(self) -> None:
        """Close all connections without a goodbye, as a forked child does."""
        self._lock = threading.RLock()  # another thread of the parent may have held the old one
        self._left = True
        self._collective_thread, self._staged = None, StagedCollectives(self.persistent, self._global_ranks)
        if self._connections is not None:
            self._connections.abandon()

    def fail(self, reason: str | CyxtrainError) -> None:
        """End the group because of an error of this rank, and tell all ranks why."""
        if self._monitor is not None:
            rank = self._global_ranks[self.rank]
            error = reason if isinstance(reason, CyxtrainError) else None
            self._monitor.is_raised = True
            self._monitor.fail(error or PeerLostError(f"rank {rank} has ended: {reason}", rank=rank))


def _selector(result: RendezvousResult, rank: int) -> AlgorithmSelector:
    machines = [entry.machine for entry in result.table]
    ranks, cores = range(len(machines)), min(entry.cores for entry in result.table)
    are_together = len(set(machines)) == 1
    return AlgorithmSelector(
        rank,
        len(machines),
        ring=tuple(sorted(ranks, key=lambda other: (machines.index(machines[other]), other))),
        shares_memory=result.all_unix and len(ranks) <= FEW_RANKS,
        oversubscribed=are_together and len(ranks) > max(2, cores),
        core_per_rank=are_together and len(ranks) <= cores,
    )
