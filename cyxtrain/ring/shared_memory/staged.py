"""Collectives through shared memory: each rank copies its elements to its row, and reads the rows of the others.

Elements are copied in windows that stay in a cache: two such copies take less time than the kernel needs to move the
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from xxhash import xxh3_64_intdigest

from cyxtrain.ring.schedules.algorithms import even_spans, neighbouring
from cyxtrain.ring.schedules.kernels import Reduction, added_by_numpy
from cyxtrain.ring.schedules.selector import WINDOW_BYTES, AlgorithmSelector
from cyxtrain.ring.schedules.summation import Span, Spans, chunks
from cyxtrain.ring.shared_memory.barrier import SharedMemoryBarrier
from cyxtrain.ring.shared_memory.reduce import SharedMemoryReduce
from cyxtrain.ring.shared_memory.segment import Ranks, SharedMemorySegment, make_segment
from cyxtrain.ring.wire.frames import NO_ROOT, Kind
from cyxtrain.ring.wire.persistent import Exchange, PersistentOps, keep

EVEN_BYTES = 1 << 12
"""A window has a multiple of these bytes of each part: where NumPy's vectors end decides which of two NaNs stays."""


class StagedCollectives:
    """The staged collectives of one group; their memory is made after the first one that could be staged."""

    def __init__(self, persistent: PersistentOps, global_ranks: Sequence[int]) -> None:
        self._persistent = persistent
        self._global_ranks = global_ranks
        self._segment: SharedMemorySegment | None = None
        self._was_tried = False
        self._kept: dict[tuple[Any, ...], StagedCopy | StagedReduction] = {}

    def find(
        self, kind: Kind, tensor: Tensor, reduction: Reduction = Reduction.NONE, root: int | None = None
    ) -> StagedCopy | StagedReduction | None:
        """Return the staged collective of a tensor of this dtype and shape; None, on all ranks, if it is not staged."""
        if self._segment is None:
            return None
        key = (kind, tensor.dtype, tensor.shape, reduction, root)
        found = self._kept.get(key)
        if found is None and self._is_staged(kind, tensor, reduction):
            found = self._make(self._segment, kind, tensor, reduction, root)
            keep(self._kept, key, found)
        return found

    def create_after(
        self, ranks: Ranks, kind: Kind, tensor: Tensor, reduction: Reduction, timeout: timedelta | None
    ) -> None:
        """Create the segment, once, after a collective that could have used it: all ranks are in step then."""
        if not self._was_tried and self._is_staged(kind, tensor, reduction):
            self._was_tried = True
            # Twice a window: `StagedCopy` alternates between two.
            self._segment = make_segment(ranks, [2 * WINDOW_BYTES], timeout)

    def _is_staged(self, kind: Kind, tensor: Tensor, reduction: Reduction) -> bool:
        persistent = self._persistent
        if kind is Kind.REDUCE or not persistent.can_share_memory:
            return False
        count = tensor.numel()
        if kind is Kind.REDUCE_SCATTER:
            count *= persistent.selector.world_size
        if not persistent.selector.is_staged(count, tensor.element_size()):
            return False
        if kind in (Kind.BROADCAST, Kind.ALL_GATHER):
            return True
        # `divide` truncates integers, and the division in shared memory would not.
        if reduction is Reduction.AVG and not tensor.is_floating_point():
            return False
        return added_by_numpy(reduction, tensor.dtype) is not None

    def _make(
        self, segment: SharedMemorySegment, kind: Kind, tensor: Tensor, reduction: Reduction, root: int | None
    ) -> StagedCopy | StagedReduction:
        selector = self._persistent.selector
        rank = selector.rank
        world_size = selector.world_size
        root_name = NO_ROOT if root is None else self._global_ranks[root]
        operation = self._persistent.operation(reduction, tensor.dtype, tuple(tensor.shape), 0, root_name, kind)
        digest = xxh3_64_intdigest(operation.identity()) >> 1  # a word has a sign
        barrier = SharedMemoryBarrier(operation, selector, segment.counters(0), digest)
        count = tensor.numel()
        size = count * tensor.element_size()
        if kind is Kind.BROADCAST and rank == root:
            return StagedCopy(barrier, segment, rank, size, 0, {})
        if kind is Kind.BROADCAST:
            assert root is not None
            return StagedCopy(barrier, segment, rank, size, None, {root: 0})
        if kind is Kind.ALL_GATHER:
            places = {other: other * size for other in range(world_size) if other != rank}
            return StagedCopy(barrier, segment, rank, size, rank * size, places)
        array = added_by_numpy(reduction, tensor.dtype)
        assert array is not None
        if kind is Kind.ALL_REDUCE:
            return StagedReduction(barrier, selector, segment, array, chunks(count, world_size))
        return StagedReduction(barrier, selector, segment, array, even_spans(count, world_size), scatters=True)


class StagedCopy:
    """A collective that brings bytes of ranks to others.

    `first` is where the `size` bytes of this rank begin in its source; None if it sends none. `places` is where the
    bytes of other ranks begin in its target, by rank.
    """

    def __init__(
        self,
        barrier: SharedMemoryBarrier,
        segment: SharedMemorySegment,
        rank: int,
        size: int,
        first: int | None,
        places: Mapping[int, int],
    ) -> None:
        self.operation = barrier.operation
        self._barrier = barrier
        self._size = size
        self._first = first
        rows = [memoryview(row) for row in segment.rows(0, np.uint8, 2 * WINDOW_BYTES)]
        self._own = rows[rank]
        self._others = [(rows[other], place) for other, place in places.items()]

    def run(self, source: memoryview, target: memoryview) -> Iterator[Exchange]:
        """Copy from the bytes of `source` to the bytes of `target`; yield each exchange with other ranks.

        Windows alternate between two places of a row: while some ranks copy from one, others copy to the other.
        """
        starts = range(0, self._size, WINDOW_BYTES)
        for number, start in enumerate(starts):
            length = min(self._size - start, WINDOW_BYTES)
            begin = number % 2 * WINDOW_BYTES
            window = slice(begin, begin + length)
            if self._first is not None:
                first = self._first + start
                self._own[window] = source[first : first + length]
            yield from self._barrier.arrive()
            for row, place in self._others:
                target[place + start : place + start + length] = row[window]
        # At least once, as the others may still read this rank's window; an even number of times in all.
        for _ in range(2 - len(starts) % 2):
            yield from self._barrier.arrive()
        yield from self._barrier.answer_probes()


class StagedReduction:
    """A collective that reduces elements of all ranks; `parts` has the part that each rank reduces, by rank.

    A window takes the next few elements of each part, not of the tensor: so the same rank reduces an element, in the
    same order, whatever the windows are. If it `scatters`, each rank takes the sums of its own part; otherwise, all
    ranks take all.
    """

    def __init__(
        self,
        barrier: SharedMemoryBarrier,
        selector: AlgorithmSelector,
        segment: SharedMemorySegment,
        array: type[np.number[Any]],
        parts: Spans,
        *,
        scatters: bool = False,
    ) -> None:
        self.operation = barrier.operation
        self._barrier = barrier
        self._windows: list[_Window] = []
        rank = selector.rank
        words = segment.counters(0)
        item_bytes = np.dtype(array).itemsize
        count = parts[-1][1]
        longest_part = max(end - first for first, end in parts)
        longest = WINDOW_BYTES // selector.world_size // EVEN_BYTES * EVEN_BYTES // item_bytes
        reductions: dict[tuple[int, ...], SharedMemoryReduce] = {}
        for start in range(0, longest_part, longest):
            pieces = _pieces_of(parts, start, longest)
            lengths = tuple(end - first for first, end in pieces)
            places = neighbouring(lengths)
            # Windows of the same lengths share a reduction.
            if lengths not in reductions:
                rows = segment.rows(0, array, sum(lengths))
                reductions[lengths] = SharedMemoryReduce(barrier, selector, rows, words, spans=places, count=count)
            own = memoryview(reductions[lengths].own).cast("B")
            copied = _slices(places, pieces, item_bytes)
            taken = copied
            # The target has only this rank's part, so its elements are counted from there.
            if scatters:
                part_begin, _ = parts[rank]
                begin, end = pieces[rank]
                taken = _slices([places[rank]], [(begin - part_begin, end - part_begin)], item_bytes)
            self._windows.append(_Window(reductions[lengths], own, copied, taken))

    def run(self, source: memoryview, target: memoryview) -> Iterator[Exchange]:
        """Reduce from the bytes of `source` to the bytes of `target`; yield each exchange with other ranks."""
        for reduction, own, copied, taken in self._windows:
            for place, piece in copied:
                own[place] = source[piece]
            yield from reduction.reduce()
            # No third barrier: each rank now reads only its own row, which others write after its next arrival.
            for place, piece in taken:
                target[piece] = own[place]
        yield from self._barrier.answer_probes()


class _Window(NamedTuple):
    """A part of a reduction: the bytes of this rank's row, and the copies there and back, as (row, elements)."""

    reduction: SharedMemoryReduce
    own: memoryview
    copied: list[tuple[slice, slice]]
    taken: list[tuple[slice, slice]]


def _pieces_of(parts: Spans, start: int, longest: int) -> list[Span]:
    """Return a piece of every part: at most `longest` elements that begin `start` elements after the part does."""
    pieces = []
    for first, end in parts:
        begin = min(first + start, end)
        pieces.append((begin, min(begin + longest, end)))
    return pieces


def _slices(places: Sequence[Span], pieces: Sequence[Span], item_bytes: int) -> list[tuple[slice, slice]]:
    """Return the bytes of each place in a row, with the bytes of the piece that belongs there."""
    slices = []
    for (begin, end), (first, last) in zip(places, pieces, strict=True):
        place = slice(begin * item_bytes, end * item_bytes)
        piece = slice(first * item_bytes, last * item_bytes)
        slices.append((place, piece))
    return slices
