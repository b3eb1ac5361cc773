"""All_reduces that pass through memory that the ranks of one machine have in common.

From 16 KiB to some MiB it is quicker to copy elements there and back, both of which stay in a cache, than to have
them read or sent by the kernel. What is read by another core, and then written again by the one that wrote it before,
takes four to twenty times as long to write as anything else; here whoever reads also writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from cyxtrain.ring.shared_memory.row_reduction import RowReduction
from cyxtrain.ring.shared_memory.segment import SharedMemorySegment, make_shared_memory
from cyxtrain.ring.wire.frames import Reduction
from cyxtrain.ring.wire.kernels import added_by_numpy
from cyxtrain.ring.wire.persistent import Exchange, PersistentHeader, PersistentOps, keep
from cyxtrain.ring.wire.transfers import SHORT_BYTES

if TYPE_CHECKING:
    from cyxtrain.ring.group import Group

LONGEST_BYTES = 4 << 20
"""Up to this size all of it stays in a cache, or nearly; beyond, two copies more take longer than the kernel."""


class SharedMemoryReduce:
    """An all_reduce of some shape, dtype and reduction. Cost: two copies of all bytes, and that of a `SharedMean`.

    Args:
        announcement: Of no bytes.
        reduction: Of the rows of all ranks.
    """

    def __init__(self, announcement: PersistentHeader, reduction: RowReduction) -> None:
        self.announcement = announcement
        self._reduction = reduction
        self._own = memoryview(reduction.own).cast("B")

    def rounds(self, memory: memoryview) -> Iterator[Exchange]:
        """Reduces the elements that lie in some memory, in place; gives way for each exchange with others."""
        self._own[:] = memory
        yield from self._reduction.rounds()
        memory[:] = self._own


class SharedMemoryReductions:
    """The all_reduces of one group that pass through memory in common; it is made after the first that could have.

    Args:
        ready: Of the group.
    """

    def __init__(self, ready: PersistentOps) -> None:
        self._ready = ready
        self._memory: SharedMemorySegment | None = None
        self._was_tried = False
        self._passages: dict[tuple[torch.dtype, torch.Size, Reduction], SharedMemoryReduce] = {}

    def of(self, tensor: Tensor, reduction: Reduction) -> SharedMemoryReduce | None:
        """Returns how this tensor passes; None: it does not, on any rank.

        It follows from what all ranks must have alike: not from how the tensor of this one lies in memory.
        """
        if self._memory is None:
            return None
        key = tensor.dtype, tensor.shape, reduction
        passage = self._passages.get(key)
        if passage is None:
            passage = self._prepared(tensor, reduction, self._memory)
            if passage is not None:
                keep(self._passages, key, passage)
        return passage

    def make_after(self, group: Group, tensor: Tensor, reduction: Reduction, timeout: timedelta | None) -> None:
        """Makes the memory, once, after an all_reduce that could have passed: all ranks come here together then."""
        if not self._was_tried and self._array_of(tensor, reduction) is not None:
            self._was_tried = True
            self._memory = make_shared_memory(group, [LONGEST_BYTES], timeout)

    def _array_of(self, tensor: Tensor, reduction: Reduction) -> type[np.number[Any]] | None:
        """Returns NumPy's type of the elements of a tensor that may pass; None: it may not."""
        if not SHORT_BYTES < tensor.numel() * tensor.element_size() <= LONGEST_BYTES:
            return None
        if reduction is Reduction.AVG and not tensor.is_floating_point():
            return None  # whole numbers are divided otherwise
        return added_by_numpy(reduction, tensor.dtype) if self._ready.may_share_memory else None

    def _prepared(self, tensor: Tensor, reduction: Reduction, memory: SharedMemorySegment) -> SharedMemoryReduce | None:
        array = self._array_of(tensor, reduction)
        if array is None:
            return None
        announcement = self._ready.announcement(reduction, tensor.dtype, tuple(tensor.shape), 0)
        assert announcement is not None  # memory in common is only where there is one
        what = xxh3_64_intdigest(announcement.identity()) >> 1  # a word has a sign
        rows, words = memory.rows(0, array, tensor.numel()), memory.words(0)
        return SharedMemoryReduce(announcement, RowReduction(announcement, self._ready.routes, rows, words, what))
