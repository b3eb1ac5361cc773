"""All_reduces that pass through memory that the ranks of one machine have in common.

From 16 KiB to some MiB it is quicker to copy elements there and back, both of which stay in a cache, than to have
them read or sent by the kernel. What is read by another core, and then written again by the one that wrote it before,
takes four to twenty times as long to write as anything else; here whoever reads also writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from cyxtrain.ring.algorithms import FEW_RANKS
from cyxtrain.ring.combining import added_by_numpy
from cyxtrain.ring.common import CommonMemory, make_common_memory
from cyxtrain.ring.frames import Reduction
from cyxtrain.ring.ready import MAX_READY, Announcement, Exchange, ReadyReductions
from cyxtrain.ring.rows import RowReduction
from cyxtrain.ring.transfers import SHORT_BYTES

if TYPE_CHECKING:
    from cyxtrain.ring.group import Group

_LONGEST_BYTES = 4 << 20
"""Up to this size all of it stays in a cache, or nearly; beyond, two copies more take longer than the kernel."""


class Passage:
    """An all_reduce of some shape, dtype and reduction.

    Args:
        announcement: Of no bytes.
        own: This rank's row.
        reduction: Of the rows of all ranks.
    """

    def __init__(self, announcement: Announcement, own: Any, reduction: RowReduction) -> None:
        self.announcement = announcement
        self._address, self._bytes = own.ctypes.data, own.nbytes
        self._reduction = reduction

    def rounds(self, flat: Tensor) -> Iterator[Exchange]:
        """Reduces a flat tensor, in place; gives way for each exchange with others."""
        ctypes.memmove(self._address, flat.data_ptr(), self._bytes)
        yield from self._reduction.rounds()
        ctypes.memmove(flat.data_ptr(), self._address, self._bytes)


class Passages:
    """The all_reduces of one group that pass through memory in common; it is made after the first that could have.

    Args:
        ready: Of the group.
        rank: This rank.
        world_size: How many there are.
    """

    def __init__(self, ready: ReadyReductions, rank: int, world_size: int) -> None:
        self._ready = ready
        self._rank, self._world_size = rank, world_size
        self._memory: CommonMemory | None = None
        self._place = 0
        self._is_made = False
        self._passages: dict[tuple[torch.dtype, torch.Size, Reduction], Passage] = {}

    def of(self, tensor: Tensor, reduction: Reduction) -> Passage | None:
        """Returns how this tensor passes; None: it does not, on any rank.

        It follows from what all ranks must have alike: not from how the tensor of this one lies in memory.
        """
        if self._memory is None:
            return None
        key = tensor.dtype, tensor.shape, reduction
        passage = self._passages.get(key)
        if passage is None and self._may_pass(tensor, reduction):
            passage = self._prepared(tensor, reduction, self._memory)
            if len(self._passages) >= MAX_READY:
                del self._passages[next(iter(self._passages))]
            self._passages[key] = passage
        return passage

    def make_after(self, group: Group, tensor: Tensor, reduction: Reduction) -> None:
        """Makes the memory, once, after an all_reduce that could have passed: all ranks come here together then."""
        if not self._is_made and self._may_pass(tensor, reduction):
            self._is_made = True
            self._memory = make_common_memory(group, [_LONGEST_BYTES], signs=1)
            if self._memory is not None:
                self._place = self._memory.place(_LONGEST_BYTES)

    def _may_pass(self, tensor: Tensor, reduction: Reduction) -> bool:
        size, routes = tensor.numel() * tensor.element_size(), self._ready.routes
        if not SHORT_BYTES < size <= _LONGEST_BYTES or not routes.direct or self._world_size > FEW_RANKS:
            return False
        is_exact = reduction is Reduction.SUM or tensor.is_floating_point()  # whole numbers are divided otherwise
        return self._ready.announces and is_exact and added_by_numpy(reduction, tensor.dtype) is not None

    def _prepared(self, tensor: Tensor, reduction: Reduction, memory: CommonMemory) -> Passage:
        array = added_by_numpy(reduction, tensor.dtype)
        announcement = self._ready.announcement(reduction, tensor.dtype, tuple(tensor.shape), 0)
        assert array is not None
        assert announcement is not None
        rows = memory.rows(array, tensor.numel(), self._place)
        words = memory.words(0) if self._ready.routes.shows else None
        what = xxh3_64_intdigest(announcement.identity()) >> 1  # a word has a sign
        row_reduction = RowReduction(announcement, self._rank, rows, words, what)
        return Passage(announcement, rows[self._rank], row_reduction)
