"""The reduction of what each rank has in its row of memory that all have in common.

What a rank's neighbours can reach need not travel: each rank reduces its part of everybody's elements, and puts the
result where each rank wants it. All ranks must have come so far twice. Where each has a core, every rank shows there
how far it is, and looks at the others; elsewhere they tell each other, by empty frames.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4, for who reduces what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cyxtrain.ring.schedules.algorithms import chunks, ring_order, tree
from cyxtrain.ring.schedules.selector import AlgorithmSelector, few
from cyxtrain.ring.wire.frames import Reduction
from cyxtrain.ring.wire.kernels import silent_numpy
from cyxtrain.ring.wire.payload import is_finite, lasting
from cyxtrain.ring.wire.persistent import SAYS, Exchange, PersistentHeader, show

_PIECE_BYTES = 1 << 18
"""What is reduced at once: the same elements of a few ranks stay in a processor's second cache."""


class RowReduction:
    """Sum or mean over ranks, in place, of elements that each rank has in a row of memory in common.

    Bits are those of `Group.all_reduce`.

    Args:
        announcement: Of no bytes.
        routes: Of this rank.
        rows: By rank, its elements.
        words: By rank, where it shows how far it is (`ProgressCounter`).
        what: Tells this reduction from others that show their progress in the same words.
        looks: Whether each rank is to say of its part of the result whether it is finite.

    Attributes:
        own: This rank's elements.
        is_finite: Whether the latest result is, where ranks look; the same on all.
        signs: Of the other ranks; none: the ranks tell each other by frames.
    """

    def __init__(
        self,
        announcement: PersistentHeader,
        routes: AlgorithmSelector,
        rows: Sequence[Any],
        words: Sequence[memoryview],
        what: int = 0,
        *,
        looks: bool = False,
    ) -> None:
        rank, world_size = routes.rank, routes.world_size
        self.own = own = rows[rank]
        self._announcement = announcement
        others = [peer for peer in range(world_size) if peer != rank]
        self.signs = [announcement.sign(rank, peer, words) for peer in others] if routes.shows else []
        self._words, self._shown = words, words[rank]
        self._what = what
        is_power = world_size & (world_size - 1) == 0  # then both round alike, and to multiply is twice as fast
        divide: tuple[np.ufunc, float] = (np.multiply, 1 / world_size) if is_power else (np.true_divide, world_size)
        self._divide, by = divide
        self._by = own.dtype.type(by) if announcement.reduction is Reduction.AVG else None
        # As recursive doubling adds, and as a ring does: of two NaNs PyTorch and NumPy do not keep the same one.
        is_few = few(world_size, own.size, own.itemsize)
        self._add: Callable[..., object] = torch.add if is_few else np.add
        self._pieces = [_piece(parts, rank, is_few) for parts in _cut(rows, chunks(own.size, world_size)[rank])]
        with lasting():
            self._totals = [torch.from_numpy(total) for _, total, _ in self._pieces] if looks else []
        self._looks, self.is_finite = looks, True

    def rounds(self) -> Iterator[Exchange]:
        """Reduces; gives way where all ranks must have come that far.

        Before the first such place each rank has its elements there; between the two, a part of everybody's is this
        rank's alone; after the second one all is done.
        """
        yield from self._meet()
        with silent_numpy():
            for steps, total, copies in self._pieces:
                for one, other, into in steps:
                    self._add(one, other, out=into)
                if self._by is not None:
                    self._divide(total, self._by, total)
                for copy in copies:
                    copy[...] = total
        if self._looks:  # each at its part alone
            self._shown[SAYS] = all(map(is_finite, self._totals))
        yield from self._meet()
        if self._looks:
            self.is_finite = all(words[SAYS] for words in self._words)
        if self.signs:
            sequence = self._announcement.sequence
            asked = tuple(sign.hearing for sign in self.signs if sign.has_asked(sequence))
            if asked:
                yield Exchange((), asked)

    def _meet(self) -> tuple[Exchange, ...]:
        """Returns what is to be exchanged until all ranks have come as far as this one; nothing: all have."""
        if not self.signs:
            return self._announcement.meeting
        count = show(self._shown, self._what)
        missing = tuple(sign for sign in self.signs if not sign.shows(count))
        return (Exchange((), missing),) if missing else ()


def _cut(rows: Sequence[Any], span: tuple[int, int]) -> Iterator[list[Any]]:
    """Cuts a span out of all rows, in pieces that stay in a cache."""
    longest = _PIECE_BYTES // rows[0].itemsize
    for first in range(span[0], span[1], longest):
        yield [row[first : min(first + longest, span[1])] for row in rows]


def _piece(parts: Sequence[Any], rank: int, is_few: bool) -> tuple[list[tuple[Any, Any, Any]], Any, list[Any]]:
    """Returns how a piece is reduced: what is added to what, and where; where the total is then; where it is copied."""
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
