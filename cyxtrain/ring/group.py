"""Collectives on tensors: numbering, error handling and shutdown.

A group is immutable: its ranks never change, and its generation distinguishes its frames from a later group's.
How it notices that a rank has died: `monitoring/monitor.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.errors import ConfigError, CyxtrainError, DistributedTrainingError, PeerLostError, PeerSilentError
from cyxtrain.ring.collective_thread import CollectiveThread
from cyxtrain.ring.connections import Connections
from cyxtrain.ring.executor import SingleRankExecutor
from cyxtrain.ring.messages import ANY_SOURCE, Mailbox, Message
from cyxtrain.ring.monitoring.activity import CurrentActivity
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.rendezvous.directory import Directory
from cyxtrain.ring.rendezvous.mesh import Mesh, connect
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.rendezvous import rendezvous
from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import even_spans
from cyxtrain.ring.schedules.kernels import Combiner, Reduction, Scratch, memory_of
from cyxtrain.ring.schedules.reduction import Buffers, ReductionPlan, Stage
from cyxtrain.ring.schedules.selector import AlgorithmSelector
from cyxtrain.ring.schedules.summation import Span, is_latency_bound
from cyxtrain.ring.shared_memory.staged import StagedCollectives, StagedCopy, StagedReduction
from cyxtrain.ring.wire.frames import MAX_DIMENSIONS, NO_ROOT, Kind, Numbered, Operation, dtype_code, in_call
from cyxtrain.ring.wire.link import Deadline
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
from cyxtrain.ring.wire.persistent import PersistentOperation, PersistentOps, Rounds, SmallReduction

_LEAVE_SECONDS = 1.0
"""How long `leave` waits for another thread's collective."""


class Group:
    """One rank of a group: collectives on tensors, numbering, error handling and shutdown.

    All ranks call a collective in the same order, with the same shapes, dtypes and reductions. It runs in the calling
    thread. The first error is final: every later call raises it again. A world of one binds no port and starts no
    thread. It owns the `mesh`.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta, options: RingOptions, registry: GroupRegistry) -> None:
        self._mesh = mesh
        self.directory = mesh.directory
        self.rank = mesh.rank
        self.world_size = len(mesh.directory.global_ranks)
        self.timeout = timeout
        self._generation = mesh.directory.generation
        self.sequence = 0
        """How many collectives this group has begun."""
        self._lock = threading.RLock()
        self._left = False
        self._global_ranks = mesh.directory.global_ranks
        self._options = options
        self._registry = registry
        self._created_at = time.monotonic()
        self._activity = CurrentActivity()
        connections = self._connect() if self.world_size > 1 else None
        self._connections = connections
        self._monitor = None if connections is None else connections.monitor
        self._collective_thread: CollectiveThread | None = None
        self._scratch = Scratch(0) if connections is None else connections.scratch
        self._selector = AlgorithmSelector(self.rank, 1, (self.rank,)) if connections is None else connections.selector
        self._executor = SingleRankExecutor() if connections is None else connections.executor
        links = {} if connections is None else connections.links
        self.persistent = PersistentOps(links, self._selector, self._generation)
        self._staged = StagedCollectives(self.persistent, self._global_ranks)
        self._registry.add(self)

    def _connect(self) -> Connections:
        try:
            return Connections(self._mesh, self._options, self._activity.describe)
        except BaseException:
            self._mesh.close()
            raise

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        join_timeout: timedelta,
        generation: int = 0,
        global_ranks: Sequence[int] | None = None,
        options: RingOptions | None = None,
        registry: GroupRegistry | None = None,
    ) -> Group:
        """Return a group of ranks that find each other through a store; the arguments are `RingProcessGroup`'s."""
        names = tuple(range(world_size) if global_ranks is None else global_ranks)
        options, registry = options or RingOptions(), registry or GroupRegistry()
        if world_size == 1:
            mesh = Mesh(Directory((RankRecord(1, devices=options.devices),), names, generation), rank)
        else:
            mesh = rendezvous(store, rank, names, join_timeout, options, generation, registry.await_peer_failure)
        return cls(mesh, timeout, options, registry)

    def next_generation(self, directory: Directory, timeout: timedelta) -> Group:
        """Return the group of the ranks of `directory`, which is made of this group's by `Directory.without`.

        All of these ranks call it; they need no store. This group is left, as by `leave`, but keeps its listeners: if
        it fails, it can be called again, with a directory of a later generation. Ranks that call it earlier wait for
        those that are still in this generation, or have failed and not called it again, for at most `timeout`.

        Raises:
            ConfigError: This rank is not in the directory; the directory is not of a later generation; or the group was
                made without `RingOptions.keeps_listening`, or has been left. Nothing has changed.
            CyxtrainError: The errors of `mesh.connect`.
        """
        name, listeners = self._global_ranks[self.rank], self._mesh.listeners
        if listeners is None or not (self._options.keeps_listening and name in directory.global_ranks):
            raise ConfigError(
                f"rank {name} cannot begin generation {directory.generation} with ranks {directory.global_ranks}: it "
                "must be one of them, and its group made with RingOptions(keeps_listening=True), and not followed by "
                "another."
            )
        if directory.generation <= self._generation:
            raise ConfigError(
                f"a group of generation {directory.generation} cannot follow one of generation {self._generation}: "
                "make its directory by Directory.without."
            )
        rank = directory.global_ranks.index(name)
        self.leave(keeps_listening=True)
        if self._mesh.listeners is None:
            raise CyxtrainError(
                f"rank {name} cannot begin generation {directory.generation}: its old one does not end. Start all "
                "ranks again."
            )
        mesh = Mesh(directory, rank)
        if len(directory.global_ranks) > 1:
            mesh = connect(directory, rank, listeners, self._options, Deadline(timeout.total_seconds()))
            self._mesh.listeners = None
        return Group(mesh, self.timeout, self._options, self._registry)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let no collective run within; raise CyxtrainError if one runs, or waits in the collective thread."""
        thread = self._collective_thread
        if (thread is not None and thread.busy) or not self._lock.acquire(blocking=False):
            raise CyxtrainError(
                f"rank {self._global_ranks[self.rank]} cannot replace its group while a collective of it runs: "
                f"{self._activity.describe()}."
            )
        try:
            yield
        finally:
            self._lock.release()

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
    def transport(self) -> str:
        """How collectives reach other ranks; see `Connections`. Alone: "none"."""
        return "none" if self._connections is None else self._connections.transport

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
        """Reduce in place, on all ranks. Cost: see the table in docs/ring.md.

        If it raises, the elements are undefined: some may be partial sums.
        """
        if has_plain_memory(tensor):  # a small one is done in less time than the preparation of others takes
            with self._lock:
                small = self.persistent.find(Kind.ALL_REDUCE, tensor, reduction)
                if small is not None:
                    address = tensor.data_ptr()
                    self.run_persistent(small.header, small.run_at(address, address), timeout)
                    return
        flat = flat_view_of(check_target(tensor))
        memory = memory_of(flat)
        with self._lock:
            is_prepared = self._run_prepared(Kind.ALL_REDUCE, tensor, memory, memory, timeout, reduction)
            if not is_prepared:
                operation, plan = self._plan(Kind.ALL_REDUCE, tensor, flat, reduction)
                stages = plan.stages(lambda spans: self._selector.all_gather(spans, flat.element_size()))
                self._executor.run(operation, stages, timeout or self.timeout)
            copy_back(flat, tensor)
            if not is_prepared:
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

    def run_persistent(self, header: PersistentOperation, rounds: Rounds, timeout: timedelta | None = None) -> None:
        """Run a persistent operation. Cost: its exchanges, see `PersistentOperation`."""
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

    def leave(self, *, keeps_listening: bool = False) -> None:
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
                self._connections.disconnect(self.sequence)
            if not keeps_listening:
                self._mesh.close()
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
