"""Gradient buckets in shared memory, which the ranks of one machine average in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cyxtrain.environment import torch_compat
from cyxtrain.ring.group import Group
from cyxtrain.ring.mean_weight import MeanWeight
from cyxtrain.ring.schedules.kernels import Reduction, added_by_numpy, lasting
from cyxtrain.ring.shared_memory.meeting import Meeting
from cyxtrain.ring.shared_memory.reduce import SharedMemoryReduce
from cyxtrain.ring.shared_memory.segment import make_segment
from cyxtrain.ring.wire.persistent import Exchange
from cyxtrain.ring.work import CallOptions, collective, timeout_of


class SharedGradientBuffer:
    """A flat `tensor` in shared memory, averaged over ranks in place with the bits of `Group.all_reduce`."""

    def __init__(self, group: Group, reduction: SharedMemoryReduce) -> None:
        self._group = group
        self._reduction = reduction
        with lasting():
            self.tensor = torch.from_numpy(reduction.own)
        self._address = self.tensor.data_ptr()
        self._version = -1.0

    @property
    def description(self) -> str:
        """Its reduction, as errors describe it."""
        return self._reduction.meeting.header.describe()

    @property
    def is_known_finite(self) -> bool:
        """Whether all ranks found the latest mean finite, and PyTorch knows of no change since.

        It knows of none by `.data`, `.numpy()` or `torch.amp.GradScaler.unscale_`.
        """
        return self._reduction.is_finite and torch_compat.version_of(self.tensor) == self._version

    def divide_by(self, weight: MeanWeight, count: int) -> None:
        """Make the first `count` elements of the next average a mean over weights, not over ranks."""
        self._reduction.divide_by(weight, count)

    @collective("all_reduce", tensors=0, inputs=lambda self: [self.tensor])
    def all_reduce(self, opts: CallOptions) -> Any:
        """Average over ranks, like torch.distributed.all_reduce with AVG, and return PyTorch's work.

        Cost: two meetings of all ranks; each reads and writes its chunk of every rank's elements once.
        """
        self._group.run_persistent(self._reduction.meeting.header, self._rounds(), timeout_of(opts))
        return [self.tensor]

    def _rounds(self) -> Iterator[Exchange]:
        has_moved = self.tensor.data_ptr() != self._address  # as share_memory() moves what a user finds in .grad
        if has_moved:
            self._reduction.own[...] = self.tensor.numpy()
        yield from self._reduction.in_place()
        if has_moved:
            self.tensor.copy_(torch.from_numpy(self._reduction.own))
        self._version = torch_compat.version_of(self.tensor)


def make_gradient_buffers(group: Group, kinds: Sequence[tuple[int, torch.dtype]]) -> list[SharedGradientBuffer | None]:
    """Return zeroed buffers in shared memory, of these numbers of elements and dtypes. All ranks call it.

    None for each that cannot be, on every rank: not all ranks are connected by Unix sockets, they are many, there is no
    room, or NumPy has no such dtype. Cost: two small collectives, and one or two descriptors for all of them.
    """
    persistent = group.persistent
    can_share = persistent.can_meet and persistent.selector.shares_memory
    sizes = [count * dtype.itemsize for count, dtype in kinds]
    with group.exclusive():
        segment = make_segment(group, sizes) if can_share and any(sizes) else None
    buffers: list[SharedGradientBuffer | None] = [None] * len(kinds)
    if segment is None:
        return buffers
    for place, (count, dtype) in enumerate(kinds):
        array = added_by_numpy(Reduction.AVG, dtype) if count and dtype.is_floating_point else None
        # Each is numbered: of two alike, one rank could start the one, and another rank the other.
        header = persistent.header(Reduction.AVG, dtype, (count,), 0, root=next(persistent.numbers))
        if array is not None:
            rows, words = segment.rows(place, array, count), segment.counters(place)
            meeting = Meeting(header, persistent.selector, words)
            reduction = SharedMemoryReduce(meeting, persistent.selector, rows, words, checks=True)
            buffers[place] = SharedGradientBuffer(group, reduction)
    return buffers
