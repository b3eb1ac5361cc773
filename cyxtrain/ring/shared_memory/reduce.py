"""Reductions in shared memory: each rank reduces its chunk of every rank's row, and writes the result to all rows.

All ranks wait for each other before and after. With a core per rank each publishes a progress counter in the memory and
looks at the others'; otherwise they exchange empty frames.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4, for who reduces what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from cyxtrain.ring.schedules.algorithms import chunks, ring_order, tree
from cyxtrain.ring.schedules.kernels import Reduction, added_by_numpy, lasting, silent_numpy
from cyxtrain.ring.schedules.selector import LONGEST_STAGED_BYTES, AlgorithmSelector, Path, is_latency_bound
from cyxtrain.ring.shared_memory.segment import Ranks, SharedMemorySegment, make_segment
from cyxtrain.ring.wire.payload import is_finite
from cyxtrain.ring.wire.persistent import FINITE, Exchange, PersistentHeader, PersistentOps, keep, publish

_PIECE_BYTES = 1 << 18
"""Bytes reduced at once: the same elements of a few ranks stay in a processor's second-level cache."""


class SharedMemoryReduce:
    """The sum or mean over ranks of a row of shared memory, bitwise identical to `Group.all_reduce`.

    `rows` and the words of progress counters are given by rank. The `header` has no payload. `what` distinguishes
    reductions that share counters. If it `checks`, each rank checks its chunk of the result for NaN and infinities.
    """

    def __init__(
        self,
        header: PersistentHeader,
        selector: AlgorithmSelector,
        rows: Sequence[Any],
        counters: Sequence[memoryview],
        what: int = 0,
        *,
        checks: bool = False,
    ) -> None:
        rank, world_size = selector.rank, selector.world_size
        self.header = header
        self.own = own = rows[rank]
        self._own_bytes = memoryview(own).cast("B")
        others = [peer for peer in range(world_size) if peer != rank]
        # Of the other ranks; empty: ranks exchange frames.
        self.counters = [header.counter(rank, peer, counters) for peer in others] if selector.uses_counters else []
        self._words, self._published = counters, counters[rank]
        self._what = what
        is_power = world_size & (world_size - 1) == 0  # both round alike then, and to multiply is twice as fast
        divide: tuple[np.ufunc, float] = (np.multiply, 1 / world_size) if is_power else (np.true_divide, world_size)
        self._divide, by = divide
        self._by = own.dtype.type(by) if header.reduction is Reduction.AVG else None
        # As recursive doubling adds, and as a ring does: PyTorch and NumPy keep different ones of two NaNs.
        is_few = is_latency_bound(world_size, own.size, own.itemsize)
        self._add: Callable[..., object] = torch.add if is_few else np.add
        self._pieces = [_piece(parts, rank, is_few) for parts in _cut(rows, chunks(own.size, world_size)[rank])]
        with lasting():
            self._totals = [torch.from_numpy(total) for _, total, _ in self._pieces] if checks else []
        self._checks = checks
        self.is_finite = True  # whether the latest result is, if ranks check it; the same on all

    def run(self, memory: memoryview) -> Iterator[Exchange]:
        """Copy elements to the row, reduce, and copy the result back; yield each exchange with other ranks."""
        self._own_bytes[:] = memory
        yield from self.in_place()
        memory[:] = self._own_bytes

    def in_place(self) -> Iterator[Exchange]:
        """Reduce this rank's chunk of every row; yield each exchange with other ranks."""
        yield from self._barrier()
        with silent_numpy():
            for steps, total, copies in self._pieces:
                for one, other, into in steps:
                    self._add(one, other, out=into)
                if self._by is not None:
                    self._divide(total, self._by, total)
                for copy in copies:
                    copy[...] = total
        if self._checks:
            self._published[FINITE] = all(map(is_finite, self._totals))
        yield from self._barrier()
        if self._checks:
            self.is_finite = all(words[FINITE] for words in self._words)
        if self.counters:
            sequence = self.header.sequence
            asked = tuple(counter.probe_frame for counter in self.counters if counter.has_asked(sequence))
            if asked:
                yield Exchange((), asked)

    def _barrier(self) -> tuple[Exchange, ...]:
        """Return the exchanges to wait for, until all ranks are as far as this one; none: they are."""
        if not self.counters:
            return self.header.barrier
        count = publish(self._published, self._what)
        missing = tuple(counter for counter in self.counters if not counter.shows(count))
        return (Exchange((), missing),) if missing else ()


def _cut(rows: Sequence[Any], span: tuple[int, int]) -> Iterator[list[Any]]:
    """Cut a span out of all rows, in pieces that stay in a cache."""
    longest = _PIECE_BYTES // rows[0].itemsize
    for first in range(span[0], span[1], longest):
        yield [row[first : min(first + longest, span[1])] for row in rows]


def _piece(parts: Sequence[Any], rank: int, is_few: bool) -> tuple[list[tuple[Any, Any, Any]], Any, list[Any]]:
    """Return how a piece is reduced: (one, other, into) additions; the total; where the total is copied."""
    if is_few:
        with lasting():
            terms = [torch.from_numpy(part) for part in parts]
        order = tree(len(parts))
        total = order[-1][0]
        steps = [(terms[into], terms[source], terms[into]) for into, source in order]
    else:  # around a ring each rank puts its own first, and the last one keeps the sum
        *order, (first, total) = ring_order(rank, len(parts))
        steps = [(parts[source], parts[into], parts[into]) for into, source in order]
        steps.append((parts[total], parts[first], parts[total]))
    return steps, parts[total], [part for other, part in enumerate(parts) if other != total]


class StagedReductions:
    """The staged all_reduces of one group; their segment is made after the first all_reduce that could use it.

    From 16 KiB to some MiB two copies, which stay in a cache, take less time than the kernel needs to move the bytes. A
    core writes slowly where another core has read; so the rank that reads a chunk also writes it.
    """

    def __init__(self, persistent: PersistentOps) -> None:
        self._persistent = persistent
        self._segment: SharedMemorySegment | None = None
        self._was_tried = False
        self._kept: dict[tuple[torch.dtype, torch.Size, Reduction], SharedMemoryReduce] = {}

    def find(self, tensor: Tensor, reduction: Reduction) -> SharedMemoryReduce | None:
        """Return what reduces a tensor of this dtype and shape; None, on every rank: it is not staged."""
        if self._segment is None:
            return None
        key = tensor.dtype, tensor.shape, reduction
        found = self._kept.get(key)
        if found is None:
            array = self._array_of(tensor, reduction)
            if array is None:
                return None
            header = self._persistent.header(reduction, tensor.dtype, tuple(tensor.shape), 0)
            assert header is not None  # a segment exists only if there is one
            what = xxh3_64_intdigest(header.identity()) >> 1  # a word has a sign
            rows, counters = self._segment.rows(0, array, tensor.numel()), self._segment.counters(0)
            found = SharedMemoryReduce(header, self._persistent.selector, rows, counters, what)
            keep(self._kept, key, found)
        return found

    def create_after(self, ranks: Ranks, tensor: Tensor, reduction: Reduction, timeout: timedelta | None) -> None:
        """Create the segment, once, after an all_reduce that could have used it: all ranks are in step then."""
        if not self._was_tried and self._array_of(tensor, reduction) is not None:
            self._was_tried = True
            self._segment = make_segment(ranks, [LONGEST_STAGED_BYTES], timeout)

    def _array_of(self, tensor: Tensor, reduction: Reduction) -> type[np.number[Any]] | None:
        """Return NumPy's type of a tensor's elements; None: such a tensor is not staged."""
        if not self._persistent.has_peers or (reduction is Reduction.AVG and not tensor.is_floating_point()):
            return None  # integers are divided differently
        is_staged = self._persistent.selector.path(tensor.numel(), tensor.element_size()) is Path.STAGED
        return added_by_numpy(reduction, tensor.dtype) if is_staged else None
