"""Reductions in shared memory: each rank reduces its part of every rank's row, and writes the result to all rows.

All ranks wait for each other before and after.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4, for the part of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cyxtrain.ring.mean_weight import MeanWeight
from cyxtrain.ring.schedules.kernels import Reduction, lasting, silent_numpy
from cyxtrain.ring.schedules.selector import AlgorithmSelector
from cyxtrain.ring.schedules.summation import RowSum, Span, chunks, is_latency_bound, summation_order
from cyxtrain.ring.shared_memory.barrier import SharedMemoryBarrier
from cyxtrain.ring.wire.payload import is_finite
from cyxtrain.ring.wire.persistent import FINITE, WEIGHT, Exchange

_PIECE_BYTES = 1 << 18
"""Bytes reduced at once: the same elements of a few ranks stay in a processor's second-level cache."""


class SharedMemoryReduce:
    """The sum or mean over ranks of a row of shared memory, bitwise identical to `Group.all_reduce`.

    `rows` and the `words` of progress counters are given by rank. `spans` has the part that each rank reduces, by rank;
    without it, parts are even. `count` is the number of elements of the whole reduction, if the rows are a part of it.
    If it `checks`, each rank checks its part of the result for NaN and infinities. With a `row_sum`, ranks have as many
    `rows` as that says, the first of each receives the result, and their order and divisor are those of the `row_sum`.
    """

    def __init__(
        self,
        barrier: SharedMemoryBarrier,
        selector: AlgorithmSelector,
        rows: Sequence[Any],
        words: Sequence[memoryview],
        *,
        spans: Sequence[Span] = (),
        count: int = 0,
        checks: bool = False,
        row_sum: RowSum | None = None,
    ) -> None:
        rank = selector.rank
        world_size = selector.world_size
        self.barrier = barrier
        count = count or rows[0].size
        # Recursive doubling adds with PyTorch, and a ring with NumPy: they keep different ones of two NaNs.
        self._uses_torch = row_sum is None and is_latency_bound(world_size, count, rows[0].itemsize)
        if row_sum is None:
            order = summation_order(world_size, count, rows[0].itemsize, rank)
            row_sum = RowSum((1,) * world_size, order, world_size)
        # the row of each rank that receives the result
        self._firsts = [sum(row_sum.num_rows[:each]) for each in range(world_size)]
        self._order = row_sum.additions
        self.own = rows[self._firsts[rank]]
        self._rank = rank
        self._rows = rows
        self._words = words
        self._weights = [each.cast("B").cast("d") for each in words]  # the same memory, as float64
        self._checks = checks
        self._averages = barrier.operation.reduction is Reduction.AVG
        self._divide, self._divisor = _division(self.own.dtype, row_sum.divisor)
        spans = spans or chunks(self.own.size, world_size)
        self._span = spans[rank]
        self._add: Callable[..., object] = torch.add if self._uses_torch else np.add
        self._cut_at(0)
        self.weight: MeanWeight | None = None
        """This rank's weight in the next reduction; None: elements become their mean over ranks."""
        self.is_finite = True
        """Whether the latest result is finite, if ranks check it; the same on all."""

    def _cut_at(self, num_weighted: int) -> None:
        """Cut this rank's part into pieces, with a border at element `num_weighted`: those before it are weighted."""
        self._num_weighted = num_weighted
        first, end = self._span
        middle = min(max(first, num_weighted), end)
        weighted = _cut(self._rows, (first, middle))
        others = _cut(self._rows, (middle, end))
        self._pieces = [self._piece(parts) for parts in weighted + others]
        self._num_weighted_pieces = len(weighted)
        self._totals: list[torch.Tensor] = []
        if self._checks:
            with lasting():
                self._totals = [torch.from_numpy(piece.total) for piece in self._pieces]

    def _piece(self, parts: Sequence[Any]) -> _Piece:
        """Return the piece that sums the parts of all rows."""
        leaf, _ = self._order[-1]
        terms = parts
        if self._uses_torch:
            with lasting():
                terms = [torch.from_numpy(part) for part in parts]
        additions = [(terms[into], terms[source]) for into, source in self._order]
        return _Piece(additions, parts[leaf], [parts[first] for first in self._firsts if first != leaf])

    def divide_by(self, weight: MeanWeight, count: int) -> None:
        """Make the first `count` elements of the next result a mean over weights, not over ranks."""
        if count != self._num_weighted:
            self._cut_at(count)
        self.weight = weight

    def in_place(self) -> Iterator[Exchange]:
        """Reduce this rank's part of every row, as a whole operation; yield each exchange with other ranks."""
        yield from self.reduce()
        yield from self.barrier.answer_probes()

    def reduce(self) -> Iterator[Exchange]:
        """Reduce this rank's part of every row; yield each exchange with other ranks."""
        weight = self.weight
        self.weight = None
        if weight is not None:
            self._weights[self._rank][WEIGHT] = float(weight.value)
        yield from self.barrier.arrive()
        factor = None
        if weight is not None:
            of_all_ranks = [words[WEIGHT] for words in self._weights]
            factor = self.own.dtype.type(weight.factor_of_weights(of_all_ranks))
        self._sum_pieces(factor)
        if self._checks:
            self._words[self._rank][FINITE] = all(map(is_finite, self._totals))
        yield from self.barrier.arrive()
        if self._checks:
            self.is_finite = all(words[FINITE] for words in self._words)

    def _sum_pieces(self, factor: Any) -> None:
        """Sum or average each piece, multiply the weighted ones by a `factor`, and copy the totals to all rows."""
        with silent_numpy():
            for number, piece in enumerate(self._pieces):
                total = piece.total
                for into, source in piece.additions:
                    self._add(into, source, out=into)
                if self._averages:
                    self._divide(total, self._divisor, total)
                if factor is not None and number < self._num_weighted_pieces:
                    np.multiply(total, factor, total)
                for copy in piece.copies:
                    copy[...] = total


def _division(dtype: Any, divisor: int) -> tuple[np.ufunc, Any]:
    """Return the function and the operand that divide elements by a whole number."""
    is_power_of_two = divisor & (divisor - 1) == 0
    # Multiplication is twice as fast, and rounds like division by a power of two.
    if is_power_of_two:
        return np.multiply, dtype.type(1 / divisor)
    return np.true_divide, dtype.type(divisor)


def _cut(rows: Sequence[Any], span: Span) -> list[list[Any]]:
    """Cut a span out of all rows, in pieces that stay in a cache."""
    first, end = span
    longest = _PIECE_BYTES // rows[0].itemsize
    pieces = []
    for begin in range(first, end, longest):
        piece = slice(begin, min(begin + longest, end))
        pieces.append([row[piece] for row in rows])
    return pieces


class _Piece(NamedTuple):
    """A piece of all rows."""

    additions: list[tuple[Any, Any]]  # they sum it
    total: Any  # where they leave the sum
    copies: list[Any]  # the places to copy it to
