"""Collectives by way of shared memory: each rank copies its elements to its row, and takes there what others have.

Two copies that stay in a cache take less time than the kernel needs to move the bytes, so elements go there in windows.
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
from cyxtrain.ring.shared_memory.meeting import Meeting
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
        """Return what does a collective of a tensor of this dtype and shape; None, on every rank: it is not staged."""
        if self._segment is None:
            return None
        key = kind, tensor.dtype, tensor.shape, reduction, root
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
            self._segment = make_segment(ranks, [2 * WINDOW_BYTES], timeout)

    def _is_staged(self, kind: Kind, tensor: Tensor, reduction: Reduction) -> bool:
        persistent, count, item_bytes = self._persistent, tensor.numel(), tensor.element_size()
        if kind is Kind.REDUCE_SCATTER:
            count *= persistent.selector.world_size
        if kind is Kind.REDUCE or not persistent.can_meet or not persistent.selector.is_staged(count, item_bytes):
            return False
        if kind in (Kind.BROADCAST, Kind.ALL_GATHER):
            return True
        if reduction is Reduction.AVG and not tensor.is_floating_point():
            return False  # integers are divided differently
        return added_by_numpy(reduction, tensor.dtype) is not None

    def _make(
        self, segment: SharedMemorySegment, kind: Kind, tensor: Tensor, reduction: Reduction, root: int | None
    ) -> StagedCopy | StagedReduction:
        selector, count = self._persistent.selector, tensor.numel()
        rank, world_size = selector.rank, selector.world_size
        name = NO_ROOT if root is None else self._global_ranks[root]
        header = self._persistent.header(reduction, tensor.dtype, tuple(tensor.shape), 0, name, kind)
        what = xxh3_64_intdigest(header.identity()) >> 1  # a word has a sign
        meeting = Meeting(header, selector, segment.counters(0), what)
        size = count * tensor.element_size()
        if kind is Kind.BROADCAST:
            if rank == root:
                return StagedCopy(meeting, segment, rank, size, 0, {})
            assert root is not None
            return StagedCopy(meeting, segment, rank, size, None, {root: 0})
        if kind is Kind.ALL_GATHER:
            places = {other: other * size for other in range(world_size) if other != rank}
            return StagedCopy(meeting, segment, rank, size, rank * size, places)
        array = added_by_numpy(reduction, tensor.dtype)
        assert array is not None
        if kind is Kind.ALL_REDUCE:
            return StagedReduction(meeting, selector, segment, array, chunks(count, world_size))
        return StagedReduction(meeting, selector, segment, array, even_spans(count, world_size), scatters=True)


class StagedCopy:
    """A collective that brings bytes of ranks to others.

    `first` is where the `size` bytes of this rank begin in its source; None: it has none. `places` are where those of
    other ranks begin in its target, by rank.
    """

    def __init__(
        self,
        meeting: Meeting,
        segment: SharedMemorySegment,
        rank: int,
        size: int,
        first: int | None,
        places: Mapping[int, int],
    ) -> None:
        self.header = meeting.header
        self._meeting = meeting
        self._size, self._first = size, first
        rows = [memoryview(row) for row in segment.rows(0, np.uint8, 2 * WINDOW_BYTES)]
        self._own = rows[rank]
        self._taken = [(rows[other], place) for other, place in places.items()]

    def run(self, source: memoryview, target: memoryview) -> Iterator[Exchange]:
        """Do it, from the bytes of `source` to those of `target`; yield each exchange with other ranks.

        Windows alternate between two places of a row: while some ranks copy from one, others copy to the other.
        """
        starts = range(0, self._size, WINDOW_BYTES)
        for number, start in enumerate(starts):
            length = min(self._size - start, WINDOW_BYTES)
            window = slice(number % 2 * WINDOW_BYTES, number % 2 * WINDOW_BYTES + length)
            if self._first is not None:
                self._own[window] = source[self._first + start : self._first + start + length]
            yield from self._meeting.all_here()
            for row, place in self._taken:
                target[place + start : place + start + length] = row[window]
        for _ in range(2 - len(starts) % 2):
            yield from self._meeting.all_here()
        yield from self._meeting.answer()


class StagedReduction:
    """A collective that reduces elements of all ranks; `parts` are what each rank reduces, by rank.

    A window has the same piece of every part, so that each sum is that of the whole. All ranks take all sums, unless it
    `scatters`: then each takes its own.
    """

    def __init__(
        self,
        meeting: Meeting,
        selector: AlgorithmSelector,
        segment: SharedMemorySegment,
        array: type[np.number[Any]],
        parts: Spans,
        *,
        scatters: bool = False,
    ) -> None:
        self.header = meeting.header
        self._meeting = meeting
        self._windows: list[_Window] = []
        rank, words, item_bytes = selector.rank, segment.counters(0), np.dtype(array).itemsize
        count = parts[-1][1]
        longest = WINDOW_BYTES // selector.world_size // EVEN_BYTES * EVEN_BYTES // item_bytes
        made: dict[tuple[int, ...], SharedMemoryReduce] = {}
        for start in range(0, max(end - first for first, end in parts), longest):
            pieces = [(min(first + start, end), min(first + start + longest, end)) for first, end in parts]
            lengths = tuple(end - first for first, end in pieces)
            places = neighbouring(lengths)
            if lengths not in made:
                rows = segment.rows(0, array, sum(lengths))
                made[lengths] = SharedMemoryReduce(meeting, selector, rows, words, spans=places, count=count)
            moves = [_slices(*each, 0, item_bytes) for each in zip(places, pieces, strict=True)]
            taken = [_slices(places[rank], pieces[rank], parts[rank][0], item_bytes)] if scatters else moves
            own = memoryview(made[lengths].own).cast("B")
            self._windows.append(_Window(made[lengths], own, moves, taken))

    def run(self, source: memoryview, target: memoryview) -> Iterator[Exchange]:
        """Do it, from the bytes of `source` to those of `target`; yield each exchange with other ranks."""
        for reduction, own, brought, taken in self._windows:
            for place, piece in brought:
                own[place] = source[piece]
            yield from reduction.reduce()
            for place, piece in taken:
                target[piece] = own[place]
        yield from self._meeting.answer()


class _Window(NamedTuple):
    """A part of a reduction: the bytes of this rank's row, and what is copied there and back, as (row, elements)."""

    reduction: SharedMemoryReduce
    own: memoryview
    brought: list[tuple[slice, slice]]
    taken: list[tuple[slice, slice]]


def _slices(place: Span, piece: Span, first: int, item_bytes: int) -> tuple[slice, slice]:
    """Return the bytes of a place, and those of a piece behind the element `first`."""
    return (
        slice(place[0] * item_bytes, place[1] * item_bytes),
        slice((piece[0] - first) * item_bytes, (piece[1] - first) * item_bytes),
    )
