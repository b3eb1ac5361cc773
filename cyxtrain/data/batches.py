"""Batches of rows, on the device and of the types that the model wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cyxtrain.data.iterator import DistributedBatchIterator
from cyxtrain.data.sampler import Indices
from cyxtrain.data.source import ArraySource

PrepareTarget = Callable[[Tensor, torch.dtype], Tensor]


@dataclass
class Batch:
    """Rows that go through the model at once.

    Attributes:
        number: Of the batch in its epoch, from 0; the same on every rank.
        inputs: Shape (rows, ...).
        targets: Shape (rows, ...), or None.
    """

    number: int
    inputs: Tensor
    targets: Tensor | None

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.inputs)


class Share:
    """This rank's part of a joined batch: one step's worth, a micro-batch after the other.

    Each `for` gathers the rows anew, so that there is memory for one micro-batch at a time.

    Args:
        number: Of the joined batch in its epoch, from 0; the same on every rank.
        indices: Which rows of the data these are, shape (rows,); of none where the tail of an epoch has none for this
            rank.
        joined_rows: Rows of the joined batch, over all ranks.
        rows_at_once: Rows of a micro-batch; the last one may have fewer.
        gather: Returns (inputs, targets) of rows by number.
    """

    def __init__(
        self,
        number: int,
        indices: Indices,
        joined_rows: int,
        rows_at_once: int,
        gather: Callable[[Indices], tuple[Tensor, Tensor | None]],
    ) -> None:
        self.number = number
        self.indices = indices
        self.joined_rows = joined_rows
        self._rows_at_once = rows_at_once
        self._gather = gather

    @property
    def rows(self) -> int:
        """How many there are on this rank."""
        return len(self.indices)

    def __len__(self) -> int:
        """How many micro-batches there are."""
        return -(-len(self.indices) // self._rows_at_once)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.indices), self._rows_at_once):
            yield Batch(self.number, *self._gather(self.indices[first : first + self._rows_at_once]))


@dataclass(frozen=True)
class Placement:
    """Where a model wants its batches, and in which types.

    Attributes:
        device: To compute on.
        dtype: Of the model's parameters: floats become it, and bytes (images) too. Other whole numbers stay whole;
            unsigned ones become int64, because no layer takes them.
        prepare_target: Gives targets the type that the loss wants.
    """

    device: torch.device
    dtype: torch.dtype
    prepare_target: PrepareTarget

    def place(self, inputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns a batch's tensors on the device, converted."""
        dtype = inputs.dtype
        if inputs.is_floating_point() or dtype in (torch.uint8, torch.bool):
            dtype = self.dtype
        elif dtype in (torch.uint16, torch.uint32, torch.uint64):
            dtype = torch.int64
        inputs = inputs.to(self.device, dtype)
        if targets is None:
            return inputs, None
        return inputs, self.prepare_target(targets.to(self.device), self.dtype)


def training_shares(
    source: ArraySource,
    iterator: DistributedBatchIterator,
    placement: Placement,
    rows_at_once: int,
    epoch: int,
    first: int = 0,
) -> Iterator[Share]:
    """Gives this rank's shares of an epoch from number `first` on: as many on every rank, in the one global order."""

    def gather(indices: Indices) -> tuple[Tensor, Tensor | None]:
        return placement.place(*source.gather(indices))

    iterator.reset(epoch, first)
    for number in range(first, iterator.num_batches):
        yield Share(number, iterator.next(), iterator.global_batch_size(number), rows_at_once, gather)


def whole_batches(
    source: ArraySource, batch_size: int, placement: Placement, rank: int, world_size: int
) -> Iterator[Batch]:
    """Gives this rank's share of the batches that one process would make, in order and undivided.

    The model sees the very batches of one process, so it gives the very bits.
    """
    first, end = share_of_batches(len(source), batch_size, rank, world_size)
    for number in range(first, end):
        rows = source.slice(number * batch_size, (number + 1) * batch_size)
        inputs, targets = placement.place(*rows)
        yield Batch(number, inputs, targets)


def share_of_batches(rows: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (first, end) of the numbers of batches that a rank deals with: neighbours, evenly shared."""
    batches = -(-rows // batch_size)
    return batches * rank // world_size, batches * (rank + 1) // world_size
