"""A group: who is in it, and its collectives on tensors, which `engine.py` runs.

A group is immutable: its ranks never change, and its generation distinguishes its frames from a later group's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.ring.engine import Engine
from cyxtrain.ring.messages import ANY_SOURCE, Mailbox, Message
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.rendezvous.directory import Directory
from cyxtrain.ring.rendezvous.mesh import Mesh, connect
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.rendezvous import rendezvous
from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import even_spans
from cyxtrain.ring.schedules.kernels import Combiner, Reduction, memory_of
from cyxtrain.ring.schedules.reduction import Buffers, ReductionPlan, Stage
from cyxtrain.ring.schedules.summation import Span, is_latency_bound
from cyxtrain.ring.shared_memory.staged import StagedCopy, StagedReduction
from cyxtrain.ring.wire.frames import MAX_DIMENSIONS, NO_ROOT, Kind, Operation, dtype_code
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
from cyxtrain.ring.wire.persistent import SmallReduction

_Prepared = SmallReduction | StagedCopy | StagedReduction


class Group:
    """One rank of a group: who is in it, and collectives on tensors. Its `engine` runs them.

    All ranks call a collective in the same order, with the same shapes, dtypes and reductions. It runs in the calling
    thread. The first error is final: every later call raises it again.
    """

    def __init__(self, mesh: Mesh, timeout: timedelta, options: RingOptions, registry: GroupRegistry) -> None:
        self.directory = mesh.directory
        self.rank = mesh.rank
        self.world_size = len(mesh.directory.global_ranks)
        self.engine = Engine(mesh, timeout, options, registry)
        self.failure = self.engine.failure
        self.persistent = self.engine.persistent
        self._options = options
        self._registry = registry

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

        All of these ranks call it; they need no store. This group is left, but keeps its listeners: if
        the call fails, call it again, with a directory of a later generation. Ranks that call it early wait at most
        `timeout` for ranks that are still in this generation, or have failed and not called it again.

        Raises:
            ConfigError: This rank is not in the directory; the directory is not of a later generation; or the group was
                made without `RingOptions.keeps_listening`, or has been left. Nothing has changed.
            CyxtrainError: The errors of `mesh.connect`.
        """
        self._check_next(directory)
        name = self.global_rank(self.rank)
        rank = directory.global_ranks.index(name)
        self.engine.leave(keeps_listening=True)
        old_mesh = self.engine.mesh
        if old_mesh.listeners is None:
            raise CyxtrainError(
                f"rank {name} cannot begin generation {directory.generation}: a thread of its old one still runs. "
                "Start all ranks again."
            )
        mesh = Mesh(directory, rank)
        if len(directory.global_ranks) > 1:
            mesh = connect(directory, rank, old_mesh.listeners, self._options, Deadline(timeout.total_seconds()))
            old_mesh.listeners = None
        return Group(mesh, self.engine.timeout, self._options, self._registry)

    def _check_next(self, directory: Directory) -> None:
        """Raise ConfigError if this rank cannot begin a generation with a directory."""
        name = self.global_rank(self.rank)
        keeps_listening = self._options.keeps_listening and self.engine.mesh.listeners is not None
        if not keeps_listening or name not in directory.global_ranks:
            raise ConfigError(
                f"rank {name} cannot begin generation {directory.generation} with ranks {directory.global_ranks}: it "
                "must be one of them, and its group made with RingOptions(keeps_listening=True), and not followed by "
                "another."
            )
        if directory.generation <= self.directory.generation:
            raise ConfigError(
                f"a group of generation {directory.generation} cannot follow one of generation "
                f"{self.directory.generation}: make its directory with Directory.without."
            )

    def global_rank(self, rank: int) -> int:
        """Return a rank's rank in the world."""
        return self.directory.global_ranks[rank]

    def leave(self) -> None:
        """Leave with a goodbye, unless the group has failed. Idempotent."""
        self.engine.leave()

    # Collectives.

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
        """Reduce in place, on all ranks. Cost: see the table in docs/ring.md.

        If it raises, the elements are undefined: some may be partial sums.
        """
        # Four ways, in order: small reductions, here without a flat view, which takes longer to make; small ones of
        # memory that is not plain, and staged ones, both in `_run_prepared`; all others are sent, by a plan.
        if has_plain_memory(tensor):
            with self.engine.lock:
                small = self.persistent.find(Kind.ALL_REDUCE, tensor, reduction)
                if small is not None:
                    address = tensor.data_ptr()
                    self.engine.run_persistent(small.operation, small.run_at(address, address), timeout)
                    return
        flat = flat_view_of(check_target(tensor))
        memory = memory_of(flat)
        with self.engine.lock:
            if self._run_prepared(Kind.ALL_REDUCE, tensor, memory, memory, timeout, reduction):
                copy_back(flat, tensor)
                return
            operation, plan = self._plan(Kind.ALL_REDUCE, tensor, flat, reduction)
            stages = plan.stages(lambda spans: self.engine.selector.all_gather(spans, flat.element_size()))
            self.engine.run(operation, stages, timeout)
            copy_back(flat, tensor)
            self.engine.staged.create_after(self, Kind.ALL_REDUCE, tensor, reduction, timeout)

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
            prepared = self.engine.staged.find(kind, tensor, reduction, root)
        if prepared is None:
            return False
        self.engine.run_persistent(prepared.operation, prepared.run(source, target), timeout)
        return True

    def reduce(self, tensor: Tensor, reduction: Reduction, dst: int, timeout: timedelta | None = None) -> None:
        """Reduce in place on rank `dst`, bitwise identical to `all_reduce`; other ranks' tensors do not change."""
        flat = flat_copy_of(check_target(tensor))
        memory = memory_of(flat)
        with self.engine.lock:
            if not self._run_prepared(Kind.REDUCE, tensor, memory, memory, timeout, reduction, root=dst):
                operation, plan = self._plan(Kind.REDUCE, tensor, flat, reduction, dst)
                rank = self.rank
                stages = plan.stages(lambda spans: algorithms.gather(rank, self.world_size, spans, dst, spans[rank]))
                self.engine.run(operation, stages, timeout)
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
        with self.engine.lock:
            if self._run_prepared(Kind.REDUCE_SCATTER, output, *memories, timeout, reduction):
                copy_back(target, output)
                return
            flat = source.clone()
            operation, plan = self._plan(Kind.REDUCE_SCATTER, output, flat, reduction)
            stages = plan.by_doubling() if plan.is_latency_bound else plan.by_chunks(spans)
            self.engine.run(operation, stages, timeout)
            write(flat[slice(*spans[self.rank])], output)
            self.engine.staged.create_after(self, Kind.REDUCE_SCATTER, output, reduction, timeout)

    def _reduce_scatter_uneven(
        self, output: Tensor, source: Tensor, reduction: Reduction, timeout: timedelta | None, sizes: Sequence[int]
    ) -> None:
        flat = source.clone()
        check_target(output)
        with self.engine.lock:
            operation, plan = self._plan(Kind.REDUCE_SCATTER, output, flat, reduction, shape=_shape_of_parts(sizes))
            stages = plan.stages(lambda spans: self.engine.selector.all_gather(spans, flat.element_size()))
            self.engine.run(operation, stages, timeout)
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
        combiner = Combiner(reduction, flat, self.engine.scratch, use_numpy=use_numpy)
        operation = self._operation(kind, tensor, reduction, dst, shape)
        return operation, ReductionPlan(reduction, flat, combiner, self.engine.scratch, self.engine.selector)

    def broadcast(self, tensor: Tensor, src: int, timeout: timedelta | None = None) -> None:
        """Copy the tensor of rank `src` to all."""
        flat = flat_view_of(check_target(tensor))
        memory = memory_of(flat)
        with self.engine.lock:
            if not self._run_prepared(Kind.BROADCAST, tensor, memory, memory, timeout, root=src):
                operation = self._operation(Kind.BROADCAST, tensor, root=src)
                schedule = self.engine.selector.broadcast(flat.numel(), src, flat.element_size())
                stage = Stage(schedule, Buffers(memory, memory, flat.element_size()))
                self.engine.run(operation, [stage], timeout)
            copy_back(flat, tensor)
            self.engine.staged.create_after(self, Kind.BROADCAST, tensor, Reduction.NONE, timeout)

    def share_descriptor(self, descriptor: int, timeout: timedelta | None = None) -> int:
        """Return rank 0's file descriptor on every rank; see `segment.Ranks`."""
        return self.engine.share_descriptor(descriptor, timeout)

    def all_gather(self, gathered: Tensor, tensor: Tensor, timeout: timedelta | None = None) -> None:
        """Copy the tensor of every rank into the flat `gathered` of all."""
        spans = even_spans(tensor.numel(), self.world_size)
        own = gathered[slice(*spans[self.rank])]
        source = flat_view_of(tensor)
        memory = memory_of(gathered)
        with self.engine.lock:
            if source.data_ptr() != own.data_ptr():
                own.copy_(source)
            if not self._run_prepared(Kind.ALL_GATHER, tensor, memory, memory, timeout):
                operation = self._operation(Kind.ALL_GATHER, tensor)
                schedule = self.engine.selector.all_gather(spans, gathered.element_size())
                stage = Stage(schedule, Buffers(memory, memory, gathered.element_size()))
                self.engine.run(operation, [stage], timeout)
            self.engine.staged.create_after(self, Kind.ALL_GATHER, tensor, Reduction.NONE, timeout)

    def gather(self, gathered: Tensor, tensor: Tensor, dst: int, timeout: timedelta | None = None) -> None:
        """Copy the tensor of every rank into the flat `gathered` of rank `dst`."""
        source = flat_view_of(tensor)
        count = source.numel()
        spans = even_spans(count, self.world_size)
        schedule = algorithms.gather(self.rank, self.world_size, spans, dst, (0, count))
        buffers = Buffers(memory_of(source), memory_of(gathered), source.element_size())
        with self.engine.lock:
            operation = self._operation(Kind.GATHER, tensor, root=dst)
            self.engine.run(operation, [Stage(schedule, buffers)], timeout)
        if self.rank == dst:
            gathered[slice(*spans[dst])] = source

    def scatter(self, output: Tensor, flat: Tensor, src: int, timeout: timedelta | None = None) -> None:
        """Copy to each rank its part of the `flat` of rank `src`."""
        target = flat_view_of(check_target(output))
        count = target.numel()
        spans = even_spans(count, self.world_size)
        schedule = algorithms.scatter(self.rank, self.world_size, spans, src, (0, count))
        buffers = Buffers(memory_of(flat), memory_of(target), target.element_size())
        with self.engine.lock:
            operation = self._operation(Kind.SCATTER, output, root=src)
            self.engine.run(operation, [Stage(schedule, buffers)], timeout)
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
                f"all_to_all: rank {self.global_rank(self.rank)} sends {end - begin} elements to itself and "
                f"receives {last - first} from itself; both must be the same."
            )
        schedule = algorithms.all_to_all(self.rank, self.world_size, send, receive)
        buffers = Buffers(memory_of(source), memory_of(target), source.element_size())
        with self.engine.lock:
            # Ranks may send different amounts, so the shape is not compared.
            operation = self._operation(Kind.ALL_TO_ALL, source, shape=())
            self.engine.run(operation, [Stage(schedule, buffers)], timeout)
        target[first:last] = source[begin:end]

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait until all ranks have called it."""
        nothing = Buffers(memoryview(bytearray()), memoryview(bytearray()), 1)
        stage = Stage(algorithms.dissemination_barrier(self.rank, self.world_size), nothing)
        with self.engine.lock:
            self.engine.run(self._operation(Kind.BARRIER, None), [stage], timeout)

    def message(self, flat: Tensor, peer: int, tag: int, *, receiving: bool) -> tuple[Mailbox, Message]:
        """Start a send or recv of a flat tensor, which is kept until it is done."""
        mailbox = self.engine.mailbox
        lowest = ANY_SOURCE if receiving else 0
        if not lowest <= peer < self.world_size:
            raise ConfigError(f"rank {peer} is not in this group of {self.world_size}.")
        if peer == self.rank or mailbox is None:
            raise ConfigError(f"rank {self.global_rank(self.rank)} cannot send to or receive from itself.")
        dtype = dtype_code(flat.dtype)
        operation = Operation(Kind.MESSAGE, 0, Reduction.NONE, dtype, tuple(flat.shape), tag, self.directory.generation)
        if self.failure.error is not None:
            raise self.failure.call_error(operation.describe())
        message = Message(operation, peer, memory_of(flat))
        error: CyxtrainError | None = None
        try:
            if receiving:
                mailbox.post_receive(message)
            else:
                mailbox.post_send(message)
        except CyxtrainError:
            error = self.failure.call_error(operation.describe())
        # Raised here, its context is the exception that the caller is handling.
        if error is not None:
            raise error
        return mailbox, message

    def _operation(
        self,
        kind: Kind,
        tensor: Tensor | None,
        reduction: Reduction = Reduction.NONE,
        root: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Operation:
        """Return the next collective, with its number; the caller holds the lock until it has run."""
        name = self._root_name(root)
        code = 0
        if tensor is not None:
            code = dtype_code(check_tensor(tensor).dtype)
            if shape is None:
                shape = tuple(tensor.shape)
        number = self.engine.sequence + 1
        return Operation(kind, number, reduction, code, shape or (), name, self.directory.generation)

    def _root_name(self, root: int | None) -> int:
        """Return a root's rank in the world, as headers name it; refuse a root that is not in the group."""
        if root is None:
            return NO_ROOT
        if not 0 <= root < self.world_size:
            raise ConfigError(f"rank {root} is not in this group of {self.world_size}.")
        return self.directory.global_ranks[root]


def _shape_of_parts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a shape for the header: ranks must agree on all sizes, and a header has room for a few."""
    if len(sizes) <= MAX_DIMENSIONS:
        return tuple(sizes)
    digest = zlib.crc32(repr(list(sizes)).encode())
    return (sum(sizes), digest)
