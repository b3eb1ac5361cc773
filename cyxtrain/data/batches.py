"""Batches of rows, on the device and of the types that the model wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cyxtrain.data.iterator import DistributedBatchIterator
from cyxtrain.data.source import ArraySource

PrepareTarget = Callable[[Tensor, torch.dtype], Tensor]


@dataclass
class Batch:
    """This rank's part of a batch.

    Attributes:
        number: Of the batch in its epoch, from 0; the same on every rank.
        inputs: Shape (rows, ...).
        targets: Shape (rows, ...), or None.
        joined_rows: Rows of the batch over all ranks.
        indices: Which rows of the data these are, shape (rows,); None outside training.
    """

    number: int
    inputs: Tensor
    targets: Tensor | None
    joined_rows: int
    indices: np.ndarray[Any, np.dtype[np.int64]] | None = None

    @property
    def rows(self) -> int:
        """Rows on this rank; 0 where the tail of an epoch has none for it."""
        return len(self.inputs)


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


def training_batches(
    source: ArraySource, iterator: DistributedBatchIterator, placement: Placement, epoch: int, first: int = 0
) -> Iterator[Batch]:
    """Gives this rank's batches of an epoch from number `first` on: as many on every rank, in the one global order."""
    iterator.reset(epoch, first)
    for number in range(first, iterator.num_batches):
        indices = iterator.next()
        inputs, targets = placement.place(*source.gather(indices))
        yield Batch(number, inputs, targets, iterator.global_batch_size(number), indices)


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
        yield Batch(number, inputs, targets, len(inputs))


def share_of_batches(rows: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (first, end) of the numbers of batches that a rank deals with: neighbours, evenly shared."""
    batches = -(-rows // batch_size)
    return batches * rank // world_size, batches * (rank + 1) // world_size
