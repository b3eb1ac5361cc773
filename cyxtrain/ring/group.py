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
from cyxtrain.ring.executor import Executor, SingleRankExecutor
from cyxtrain.ring.messages import ANY_SOURCE, Mailbox, Message
from cyxtrain.ring.monitoring.activity import CurrentActivity
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.monitoring.monitor import PeerMonitor
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
from cyxtrain.ring.wire.link import Deadline, Link
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
_LOST_RANK_ERRORS = (PeerLostError, PeerSilentError, DistributedTrainingError)
_Prepared = SmallReduction | StagedCopy | StagedReduction


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
        self._collective_thread: CollectiveThread | None = None
        self._connections: Connections | None = None
        self._monitor: PeerMonitor | None = None
        self._scratch = Scratch(0)
        self._selector = AlgorithmSelector(self.rank, 1, (self.rank,))
        self._executor: Executor | SingleRankExecutor = SingleRankExecutor()
        links: dict[int, Link] = {}
        if self.world_size > 1:
            links = self._connect()
        self.persistent = PersistentOps(links, self._selector, self._generation)
        self._staged = StagedCollectives(self.persistent, self._global_ranks)
        self._registry.add(self)

    def _connect(self) -> dict[int, Link]:
        """Make the connections of a group of several ranks; return the links of its collectives."""
        try:
            connections = Connections(self._mesh, self._options, self._activity.describe)
        except BaseException:
            self._mesh.close()
            raise
        self._connections = connections
        self._monitor = connections.monitor
        self._scratch = connections.scratch
        self._selector = connections.selector
        self._executor = connections.executor
        return connections.links

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
        if global_ranks is None:
            global_ranks = range(world_size)
        names = tuple(global_ranks)
        options = options or RingOptions()
        registry = registry or GroupRegistry()
        if world_size > 1:
            mesh = rendezvous(store, rank, names, join_timeout, options, generation, registry.await_peer_failure)
        else:
            record = RankRecord(1, devices=options.devices)
            mesh = Mesh(Directory((record,), names, generation), rank)
        return cls(mesh, timeout, options, registry)

    def next_generation(self, directory: Directory, timeout: timedelta) -> Group:
        """Return a group of the ranks in `directory`, which `Directory.without` made from this group's directory.

        All of these ranks call it; they need no store. This group is left, as by `leave`, but keeps its listeners: if
        the call fails, call it again, with a directory of a later generation. Ranks that call it early wait at most
        `timeout` for ranks that are still in this generation, or have failed and not called it again.

        Raises:
            ConfigError: This rank is not in the directory; the directory is not of a later generation; or the group was
                made without `RingOptions.keeps_listening`, or has been left. Nothing has changed.
            CyxtrainError: The errors of `mesh.connect`.
        """
        name = self._global_ranks[self.rank]
        self._check_next(directory, name)
        rank = directory.global_ranks.index(name)
        self.leave(keeps_listening=True)
        listeners = self._mesh.listeners
        if listeners is None:
            raise CyxtrainError(
                f"rank {name} cannot begin generation {directory.generation}: a thread of its old one still runs. "
                "Start all ranks again."
            )
        mesh = Mesh(directory, rank)
        if len(directory.global_ranks) > 1:
            mesh = connect(directory, rank, listeners, self._options, Deadline(timeout.total_seconds()))
            self._mesh.listeners = None
        return Group(mesh, self.timeout, self._options, self._registry)

    def _check_next(self, directory: Directory, name: int) -> None:
        """Refuse a directory with which this rank, `name` in the world, cannot begin a generation."""
        keeps_listening = self._options.keeps_listening and self._mesh.listeners is not None
        if not keeps_listening or name not in directory.global_ranks:
            raise ConfigError(
                f"rank {name} cannot begin generation {directory.generation} with ranks {directory.global_ranks}: it "
                "must be one of them, and its group made with RingOptions(keeps_listening=True), and not followed by "
                "another."
            )
        if directory.generation <= self._generation:
            raise ConfigError(
                f"a group of generation {directory.generation} cannot follow one of generation {self._generation}: "
                "make its directory with Directory.without."
            )

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
        """Return the thread that makes a call for the caller; None if the caller makes it."""
        self._activity.thread = threading.get_ident()
        if asynchronous and self._collective_thread is None:
            self._start_collective_thread()
        thread = self._collective_thread
        if thread is None or thread.is_current:
            return None
        # A call must not overtake those that wait in the thread's queue.
        if asynchronous or thread.busy:
            return thread
        return None

    def _start_collective_thread(self) -> None:
        """Start the thread, unless the group has been left or is faster without one."""
        if self._left or self._connections is None or not self._connections.overlaps:
            return
        with self._lock:
            if self._collective_thread is None:
                self._collective_thread = CollectiveThread()

    @property
    def transport(self) -> str:
        """How collectives reach other ranks; see `Connections`. With one rank: "none"."""
        return "none" if self._connections is None else self._connections.transport

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
        """Reduce in place, on all ranks. Cost: see the table in docs/ring.md.

        If it raises, the elements are undefined: some may be partial sums.
        """
        # A small reduction takes less time than the preparation of the others.
        if has_plain_memory(tensor):
            with self._lock:
                small = self.persistent.find(Kind.ALL_REDUCE, tensor, reduction)
                if small is not None:
                    address = tensor.data_ptr()
                    self.run_persistent(small.header, small.run_at(address, address), timeout)
                    return
        flat = flat_view_of(check_target(tensor))
        memory = memory_of(flat)
        with self._lock:
            if self._run_prepared(Kind.ALL_REDUCE, tensor, memory, memory, timeout, reduction):
                copy_back(flat, tensor)
                return
            operation, plan = self._plan(Kind.ALL_REDUCE, tensor, flat, reduction)
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
        """Do a small reduction, or a collective through shared memory; return whether this is one of them."""
        prepared: _Prepared | None = self.persistent.find(kind, tensor, reduction, self._root_name(root))
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
                rank = self.rank
                stages = plan.stages(lambda spans: algorithms.gather(rank, self.world_size, spans, dst, spans[rank]))
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

        `sizes` has the number of elements in each rank's part; None: all parts have as many as the output.
        """
        if sizes is not None and len(set(sizes)) > 1:
            self._reduce_scatter_uneven(output, source, reduction, timeout, sizes)
            return
        spans = even_spans(check_target(output).numel(), self.world_size)
        target = flat_view_of(output)
        if overlap(target, source):
            target = torch.empty_like(target)
        memories = (memory_of(source), memory_of(target))
        with self._lock:
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
        flat = source.clone()
        check_target(output)
        with self._lock:
            operation, plan = self._plan(Kind.REDUCE_SCATTER, output, flat, reduction, shape=_shape_of_parts(sizes))
            stages = plan.stages(lambda spans: self._selector.all_gather(spans, flat.element_size()))
            self._executor.run(operation, stages, timeout or self.timeout)
        first = sum(sizes[: self.rank])
        write(flat[first : first + sizes[self.rank]], output)

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
        # If every rank sums all elements, all must keep the same one of two NaNs: NumPy chooses it by the address.
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
        own = gathered[slice(*spans[self.rank])]
        source = flat_view_of(tensor)
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
        begin, end = send[self.rank]
        first, last = receive[self.rank]
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
            if receiving:
                mailbox.post_receive(message)
            else:
                mailbox.post_send(message)
        except CyxtrainError as error:
            self._connections.monitor.is_raised = True
            failure = in_call(error, operation.describe())
        # Raised here, its context is the exception that the caller is handling.
        if failure is not None:
            raise failure
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
        name = self._root_name(root)
        code = 0
        if tensor is not None:
            code = dtype_code(check_tensor(tensor).dtype)
            if shape is None:
                shape = tuple(tensor.shape)
        operation = Operation(kind, self.sequence + 1, reduction, code, shape or (), name, self._generation)
        self._begin(operation)
        return operation

    def _root_name(self, root: int | None) -> int:
        """Return a root's rank in the world, as headers name it; refuse a root that is not in the group."""
        if root is None:
            return NO_ROOT
        if not 0 <= root < self.world_size:
            raise ConfigError(f"rank {root} is not in this group of {self.world_size}.")
        return self._global_ranks[root]

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
        """The error that ended this group, once this rank's program has seen it; otherwise None."""
        monitor = self._monitor
        return monitor.failure if monitor is not None and monitor.is_raised else None

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Call a function once, in any thread, when the group fails; at once if it has failed already."""
        if self._monitor is not None:
            self._monitor.call_on_failure(function)

    def failure(self, during: str, seconds: float = 0.0) -> CyxtrainError | None:
        """Return the error that ended this group, as this rank raises it; wait for it at most `seconds`."""
        monitor = self._monitor
        if monitor is None:
            return None
        failure = monitor.await_failure(seconds) if seconds else monitor.failure
        if failure is None:
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
            if not self._left:
                self._left = True
                self._disconnect()
            if not keeps_listening:
                self._mesh.close()
        finally:
            self._lock.release()

    def _disconnect(self) -> None:
        # Without its staged collectives, the group lets go of their shared memory.
        self._staged = StagedCollectives(self.persistent, self._global_ranks)
        if self._connections is None:
            return
        peer_failure = self._registry.peer_failure(self._created_at)
        # The other ranks should see the cause, not a goodbye.
        if peer_failure is not None:
            self._connections.monitor.fail(peer_failure)
        self._connections.disconnect(self.sequence)

    def peer_failure(self, since: float) -> CyxtrainError | None:
        """Return the error of a group that lost a rank, if it is still open or failed after `since`."""
        monitor = self._monitor
        if monitor is None or not isinstance(monitor.failure, _LOST_RANK_ERRORS):
            return None
        if self._left and monitor.failed_at < since:
            return None
        return monitor.failure

    def abandon(self) -> None:
        """Close all connections without a goodbye, as a forked child does."""
        self._lock = threading.RLock()  # another thread of the parent may have held the old one
        self._left = True
        self._collective_thread = None
        self._staged = StagedCollectives(self.persistent, self._global_ranks)
        if self._connections is not None:
            self._connections.abandon()

    def fail(self, reason: str | CyxtrainError) -> None:
        """End the group because of an error of this rank, and tell all ranks why."""
        if self._monitor is None:
            return
        if not isinstance(reason, CyxtrainError):
            rank = self._global_ranks[self.rank]
            reason = PeerLostError(f"rank {rank} has ended: {reason}", rank=rank)
        self._monitor.is_raised = True
        self._monitor.fail(reason)


def _shape_of_parts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a shape for the header: ranks must agree on all sizes, and a header has room for a few."""
    if len(sizes) <= MAX_DIMENSIONS:
        return tuple(sizes)
    digest = zlib.crc32(repr(list(sizes)).encode())
    return (sum(sizes), digest)
