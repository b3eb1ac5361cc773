"""Means of what lies in memory that the ranks of one machine have in common (`rows.py`): gradients are put there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cyxtrain.environment import torch_compat
from cyxtrain.ring.collective_arguments import timeout_of
from cyxtrain.ring.group import Group
from cyxtrain.ring.shared_memory.row_reduction import RowReduction
from cyxtrain.ring.shared_memory.segment import make_shared_memory
from cyxtrain.ring.wire.frames import Reduction
from cyxtrain.ring.wire.kernels import added_by_numpy
from cyxtrain.ring.wire.payload import lasting
from cyxtrain.ring.wire.persistent import Exchange, PersistentHeader
from cyxtrain.ring.work import CallOptions, collective


class SharedMean:
    """The mean over ranks of elements that each rank has in memory that all have in common, in place.

    Bits are those of `Group.all_reduce`.

    Args:
        group: Of the ranks.
        announcement: Of no bytes.
        reduction: Of the rows of all ranks.

    Attributes:
        tensor: This rank's elements. While a reduction is under way nobody touches them.
    """

    def __init__(self, group: Group, announcement: PersistentHeader, reduction: RowReduction) -> None:
        self._group = group
        self._announcement = announcement
        self._reduction = reduction
        with lasting():
            self.tensor = torch.from_numpy(reduction.own)
        self._address = self.tensor.data_ptr()
        self._version = -1.0

    @property
    def is_known_finite(self) -> bool:
        """Whether each rank has found its part of the latest mean finite, and PyTorch knows of no change here since.

        It knows of none by `.data`, `.numpy()` or `torch.amp.GradScaler.unscale_`.
        """
        return self._reduction.is_finite and torch_compat.version_of(self.tensor) == self._version

    @collective("all_reduce", tensors=0, inputs=lambda self: [self.tensor])
    def all_reduce(self, opts: CallOptions) -> Any:
        """Averages over ranks, as torch.distributed.all_reduce does with AVG, and returns PyTorch's work.

        Cost: two meetings of all, see `PersistentHeader`; each reads and writes its part of everybody's elements once.
        """
        self._group.take_rounds(self._announcement, self._rounds(), timeout_of(opts))
        return [self.tensor]

    def _rounds(self) -> Iterator[Exchange]:
        has_moved = self.tensor.data_ptr() != self._address  # as share_memory() moves what a user finds in .grad
        if has_moved:
            self._reduction.own[...] = self.tensor.numpy()
        yield from self._reduction.rounds()
        if has_moved:
            self.tensor.copy_(torch.from_numpy(self._reduction.own))
        self._version = torch_compat.version_of(self.tensor)


def make_shared_means(group: Group, kinds: Sequence[tuple[int, torch.dtype]]) -> list[SharedMean | None]:
    """Returns zeros in memory that all ranks have in common, to be averaged; all ranks call it.

    None, on every rank: they have none in common, because not all can read each other's memory, or there is no room;
    they are many; or the elements are none that NumPy averages.

    Args:
        group: Of the ranks.
        kinds: How many elements, and of which dtype, in each.

    Cost: two small collectives, and one or two descriptors for all of them.
    """
    ready = group.ready
    sizes = [count * dtype.itemsize for count, dtype in kinds]
    common = make_shared_memory(group, sizes) if ready.may_share_memory and any(sizes) else None
    if common is None:
        return [None for _ in kinds]
    means: list[SharedMean | None] = []
    for place, (count, dtype) in enumerate(kinds):
        array = added_by_numpy(Reduction.AVG, dtype) if count and dtype.is_floating_point else None
        # Each has its number: of two that are alike, one rank could begin with the one, and another with the other.
        announcement = ready.announcement(Reduction.AVG, dtype, (count,), 0, root=next(ready.numbers))
        if array is None or announcement is None:
            means.append(None)
            continue
        rows, words = common.rows(place, array, count), common.words(place)
        means.append(SharedMean(group, announcement, RowReduction(announcement, ready.routes, rows, words, looks=True)))
    return means
