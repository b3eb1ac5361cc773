"""Reductions in shared memory: each rank reduces its part of every rank's row, and writes the result to all rows.

All ranks wait for each other before and after.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4, for who reduces what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cyxtrain.ring.mean_weight import MeanWeight
from cyxtrain.ring.schedules.kernels import Reduction, lasting, silent_numpy
from cyxtrain.ring.schedules.selector import AlgorithmSelector
from cyxtrain.ring.schedules.summation import Addition, Span, chunks, is_latency_bound, summation_order
from cyxtrain.ring.shared_memory.meeting import Meeting
from cyxtrain.ring.wire.payload import is_finite
from cyxtrain.ring.wire.persistent import FINITE, WEIGHT, Exchange

_PIECE_BYTES = 1 << 18
"""Bytes reduced at once: the same elements of a few ranks stay in a processor's second-level cache."""


class SharedMemoryReduce:
    """The sum or mean over ranks of a row of shared memory, bitwise identical to `Group.all_reduce`.

    `rows` and the words of progress counters are given by rank. `spans` are what each rank reduces, by rank: even
    parts, unless given. `count` is how many elements are reduced, if these rows are a part of them. If it `checks`,
    each rank checks its part of the result for NaN and infinities.
    """

    def __init__(
        self,
        meeting: Meeting,
        selector: AlgorithmSelector,
        rows: Sequence[Any],
        words: Sequence[memoryview],
        *,
        spans: Sequence[Span] = (),
        count: int = 0,
        checks: bool = False,
    ) -> None:
        rank, world_size = selector.rank, selector.world_size
        self.meeting = meeting
        self.own = own = rows[rank]
        self._words = words
        self._rows, self._span = rows, (spans or chunks(own.size, world_size))[rank]
        is_power = world_size & (world_size - 1) == 0  # both round alike then, and to multiply is twice as fast
        divide: tuple[np.ufunc, float] = (np.multiply, 1 / world_size) if is_power else (np.true_divide, world_size)
        self._divide, by = divide
        self._by = own.dtype.type(by) if meeting.header.reduction is Reduction.AVG else None
        count = count or own.size
        self._order = summation_order(world_size, count, own.itemsize, rank)
        # As recursive doubling adds, and as a ring does: PyTorch and NumPy keep different ones of two NaNs.
        self._uses_torch = is_latency_bound(world_size, count, own.itemsize)
        self._add: Callable[..., object] = torch.add if self._uses_torch else np.add
        self._rank, self._checks = rank, checks
        self._cut_at(0)
        self._own_words = words[rank]
        self._weights = [each.cast("B").cast("d") for each in words]  # the same memory, as numbers
        # this rank's in the next reduction; None: elements become their mean over ranks
        self.weight: MeanWeight | None = None
        self.is_finite = True  # whether the latest result is, if ranks check it; the same on all

    def _cut_at(self, num_weighted: int) -> None:
        """Divide the first elements by the ranks' weights, when they are given, and not by the number of ranks."""
        self._num_weighted = num_weighted
        first, end = self._span
        middle = min(max(first, num_weighted), end)
        weighted, others = [*_cut(self._rows, (first, middle))], [*_cut(self._rows, (middle, end))]
        self._pieces = [_Piece(each, self._order, uses_torch=self._uses_torch) for each in (*weighted, *others)]
        self._weighted_pieces = len(weighted)
        with lasting():
            self._totals = [torch.from_numpy(piece.total) for piece in self._pieces] if self._checks else []

    def divide_by(self, weight: MeanWeight, count: int) -> None:
        """Make the first `count` elements of the next result a mean over weights, not over ranks."""
        if count != self._num_weighted:
            self._cut_at(count)
        self.weight = weight

    def in_place(self) -> Iterator[Exchange]:
        """Reduce this rank's part of every row, in an operation of its own; yield each exchange with other ranks."""
        yield from self.reduce()
        yield from self.meeting.answer()

    def reduce(self) -> Iterator[Exchange]:
        """Reduce this rank's part of every row; yield each exchange with other ranks."""
        weight = self.weight
        self.weight = None
        if weight is not None:
            self._weights[self._rank][WEIGHT] = float(weight.value)
        yield from self.meeting.all_here()
        factor = None
        if weight is not None:
            of_all_ranks = [words[WEIGHT] for words in self._weights]
            factor = self.own.dtype.type(weight.factor_of_weights(of_all_ranks))
        with silent_numpy():
            for number, piece in enumerate(self._pieces):
                total = piece.total
                for into, source in piece.additions:
                    self._add(into, source, out=into)
                if self._by is not None:
                    self._divide(total, self._by, total)
                if number < self._weighted_pieces and factor is not None:
                    np.multiply(total, factor, total)
                for copy in piece.copies:
                    copy[...] = total
        if self._checks:
            self._own_words[FINITE] = all(map(is_finite, self._totals))
        yield from self.meeting.all_here()
        if self._checks:
            self.is_finite = all(words[FINITE] for words in self._words)


def _cut(rows: Sequence[Any], span: tuple[int, int]) -> Iterator[list[Any]]:
    """Cut a span out of all rows, in pieces that stay in a cache."""
    longest = _PIECE_BYTES // rows[0].itemsize
    for first in range(span[0], span[1], longest):
        yield [row[first : min(first + longest, span[1])] for row in rows]


class _Piece:
    """A piece of all rows: the additions that sum it, where its total then is, and where the total is copied."""

    def __init__(self, parts: Sequence[Any], order: Sequence[Addition], *, uses_torch: bool) -> None:
        leaf, _ = order[-1]
        terms = parts
        if uses_torch:
            with lasting():
                terms = [torch.from_numpy(part) for part in parts]
        self.additions = [(terms[into], terms[source]) for into, source in order]
        self.total = parts[leaf]
        self.copies = [part for other, part in enumerate(parts) if other != leaf]
