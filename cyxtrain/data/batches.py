"""Batches of rows, on the device and of the types that the model wants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cyxtrain.data.iterator import DistributedBatchIterator, joined_batch
from cyxtrain.data.moving import Mover, Placement, make_mover
from cyxtrain.data.sampler import Indices, deal
from cyxtrain.data.source import ArraySource
from cyxtrain.data.tree import Tree, num_rows


@dataclass
class Batch:
    """Rows that go through the model at once.

    Attributes:
        number: Of the batch in its epoch, from 0; the same on every rank.
        inputs: Shape (rows, ...), or several such.
        targets: Shape (rows, ...), or several such, or None.
        weights: Shape (rows,), or None: all rows count alike.
    """

    number: int
    inputs: Tree
    targets: Tree | None
    weights: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many there are."""
        return num_rows(self.inputs)


class Share:
    """This rank's part of a joined batch: one step's worth, a micro-batch after the other.

    Each `for` gathers the rows anew, so that there is memory for one micro-batch at a time.

    Args:
        number: Of the joined batch in its epoch, from 0; the same on every rank.
        indices: Which rows of the data these are, shape (rows,); of none where the tail of an epoch has none for this
            rank.
        joined_rows: Rows of the joined batch, over all ranks.
        rows_at_once: Rows of a micro-batch; the last one may have fewer.
        mover: Brings rows to the model.
    """

    def __init__(
        self,
        number: int,
        indices: Indices,
        joined_rows: int,
        rows_at_once: int,
        mover: Mover,
    ) -> None:
        self.number = number
        self.indices = indices
        self.joined_rows = joined_rows
        self._mover = mover
        self._pieces = [indices[first : first + rows_at_once] for first in range(0, len(indices), rows_at_once)]
        self.next: Share | None = None
        """The share that comes next in the epoch, where it is known."""

    @property
    def rows(self) -> int:
        """How many there are on this rank."""
        return len(self.indices)

    def __len__(self) -> int:
        """How many micro-batches there are."""
        return len(self._pieces)

    def __iter__(self) -> Iterator[Batch]:
        following = [] if self.next is None else self.next._pieces[:1]
        for indices, coming in zip(self._pieces, [*self._pieces[1:], *following, None], strict=False):
            yield Batch(self.number, *self._mover(indices, coming))


def training_shares(
    source: ArraySource,
    iterator: DistributedBatchIterator,
    placement: Placement,
    rows_at_once: int,
    epoch: int,
    first: int = 0,
    end: int | None = None,
) -> Iterator[Share]:
    """Gives this rank's shares of an epoch from number `first` to before `end` (None: the last one is the last).

    As many on every rank, in the one global order.
    """
    mover, sampler = make_mover(source, placement), iterator.sampler
    sampler.set_epoch(epoch)
    order = sampler.global_indices().copy()  # PyTorch takes rows from a read-only array by a copy of each batch

    def share(number: int) -> Share:
        joined = joined_batch(order, number, iterator.effective_batch_size)
        own = deal(joined, sampler.rank, sampler.world_size)
        return Share(number, own, len(joined), rows_at_once, mover)

    shares = map(share, range(first, iterator.num_batches if end is None else end))
    for this, following in itertools.pairwise(itertools.chain(shares, [None])):
        assert this is not None
        this.next = following
        yield this


def whole_batches(
    source: ArraySource, batch_size: int, placement: Placement, rank: int, world_size: int
) -> Iterator[Batch]:
    """Gives this rank's share of the batches that one process would make, in order and undivided.

    The model sees the very batches of one process, so it gives the very bits.
    """
    first, end = share_of_batches(len(source), batch_size, rank, world_size)
    for number in range(first, end):
        rows = source.slice(number * batch_size, (number + 1) * batch_size)
        yield Batch(number, *placement.place(rows))


def share_of_batches(rows: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (first, end) of the numbers of batches that a rank deals with: neighbours, evenly shared."""
    batches = -(-rows // batch_size)
    return batches * rank // world_size, batches * (rank + 1) // world_size
