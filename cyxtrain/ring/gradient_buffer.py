"""Gradient buckets in shared memory, which the ranks of one machine average in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cyxtrain.environment import torch_compat
from cyxtrain.ring.group import Group
from cyxtrain.ring.mean_weight import MeanWeight
from cyxtrain.ring.schedules.kernels import Reduction, added_by_numpy, lasting
from cyxtrain.ring.schedules.summation import RowSum
from cyxtrain.ring.shared_memory.barrier import SharedMemoryBarrier
from cyxtrain.ring.shared_memory.reduce import SharedMemoryReduce
from cyxtrain.ring.shared_memory.segment import make_segment
from cyxtrain.ring.wire.persistent import Exchange
from cyxtrain.ring.work import CallOptions, collective, timeout_of


class SharedGradientBuffer:
    """A flat `tensor` in shared memory, averaged over ranks in place with the bits of `Group.all_reduce`.

    If ranks add up several `rows` each, in an order of their own, `tensor` is the first of this rank's, and receives
    the mean.
    """

    def __init__(self, group: Group, reduction: SharedMemoryReduce, rows: Sequence[Any]) -> None:
        self._group = group
        self._reduction = reduction
        with lasting():
            self.rows = [torch.from_numpy(row) for row in rows]
        self.tensor = self.rows[0]
        self._address = self.tensor.data_ptr()
        self._version = -1.0

    @property
    def description(self) -> str:
        """Its reduction, as errors describe it."""
        return self._reduction.barrier.operation.describe()

    @property
    def is_known_finite(self) -> bool:
        """Whether all ranks found the latest mean finite, and PyTorch has counted no change since.

        PyTorch does not count changes by `.data`, `.numpy()` or `torch.amp.GradScaler.unscale_`.
        """
        return self._reduction.is_finite and torch_compat.version_of(self.tensor) == self._version

    def divide_by(self, weight: MeanWeight, count: int) -> None:
        """Make the first `count` elements of the next average a mean over weights, not over ranks."""
        self._reduction.divide_by(weight, count)

    @collective("all_reduce", num_tensors=0, inputs=lambda self: [self.tensor])
    def all_reduce(self, opts: CallOptions) -> Any:
        """Average over ranks, like torch.distributed.all_reduce with AVG, and return PyTorch's Work.

        Cost: two barriers of all ranks; each reads and writes its chunk of every rank's elements once.
        """
        self._group.engine.run_persistent(self._reduction.barrier.operation, self._rounds(), timeout_of(opts))
        return [self.tensor]

    def _rounds(self) -> Iterator[Exchange]:
        # A user who calls share_memory() on a .grad moves the tensor out of this memory.
        has_moved = self.tensor.data_ptr() != self._address
        if has_moved:
            self._reduction.own[...] = self.tensor.numpy()
        yield from self._reduction.in_place()
        if has_moved:
            self.tensor.copy_(torch.from_numpy(self._reduction.own))
        self._version = torch_compat.version_of(self.tensor)


def make_gradient_buffers(
    group: Group, kinds: Sequence[tuple[int, torch.dtype]], row_sum: RowSum | None = None
) -> list[SharedGradientBuffer | None]:
    """Return zeroed buffers in shared memory, of these numbers of elements and dtypes. All ranks call it.

    A buffer that cannot be shared is None on every rank: Unix sockets do not connect all ranks, there are too many
    ranks, too little memory, or NumPy cannot add the dtype. Cost: two small collectives, and one or two descriptors for
    all of them. With a `row_sum`, each rank has the rows that it says.
    """
    persistent = group.persistent
    selector = persistent.selector
    buffers: list[SharedGradientBuffer | None] = [None] * len(kinds)
    num_rows = _num_rows(selector.world_size, row_sum)
    sizes = [count * max(num_rows) * dtype.itemsize for count, dtype in kinds]
    if not any(sizes) or not persistent.can_share_memory or not selector.shares_memory:
        return buffers
    with group.engine.lock:
        segment = make_segment(group, sizes)
    if segment is None:
        return buffers
    for place, (count, dtype) in enumerate(kinds):
        # Two buffers of the same size need different numbers: otherwise two ranks could unnoticed start one each.
        operation = persistent.operation(Reduction.AVG, dtype, (count,), 0, root=next(persistent.numbers))
        array = added_by_numpy(Reduction.AVG, dtype)
        if array is None or count == 0 or not dtype.is_floating_point:
            continue
        memory = segment.rows(place, array, count * max(num_rows))
        rows = [row for own, num_own in zip(memory, num_rows, strict=True) for row in _cut(own, count, num_own)]
        words = segment.counters(place)
        barrier = SharedMemoryBarrier(operation, selector, words)
        reduction = SharedMemoryReduce(barrier, selector, rows, words, checks=True, row_sum=row_sum)
        own_rows = _cut(memory[selector.rank], count, num_rows[selector.rank])
        buffers[place] = SharedGradientBuffer(group, reduction, own_rows)
    return buffers


def _num_rows(world_size: int, row_sum: RowSum | None) -> Sequence[int]:
    """Return how many rows each rank has, by rank."""
    return [1] * world_size if row_sum is None else row_sum.num_rows


def _cut(memory: Any, count: int, num_rows: int) -> list[Any]:
    """Return the rows of a rank's memory, each of `count` elements."""
    return [memory[number * count : (number + 1) * count] for number in range(num_rows)]
