"""Batches of rows, on the device and of the types that the model wants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cyxtrain.data.batching import answers_in
from cyxtrain.data.moving import Mover
from cyxtrain.data.sampler import Indices
from cyxtrain.data.tree import Tree, num_rows


@dataclass
class Batch:
    """Rows that go through the model at once.

    Attributes:
        number: Of the batch in its epoch, from 0; the same on every rank.
        inputs: Shape (rows, ...), or several such.
        targets: Shape (rows, ...), or several such, or None.
        weights: Shape (rows,), or None: all rows count alike.
        items: How many items (such as tokens) the losses of a step count over all ranks and micro-batches; None: those
            of this batch.
    """

    number: int
    inputs: Tree
    targets: Tree | None
    weights: Tensor | None = None
    items: int | None = None

    @property
    def rows(self) -> int:
        """How many there are."""
        return num_rows(self.inputs)

    @property
    def answers(self) -> Tree | None:
        """What metrics compare outputs with: the targets, or labels among inputs by name."""
        return answers_in(self.inputs, self.targets)


class Share(ABC):
    """This rank's part of a joined batch: one step's worth, a micro-batch after the other.

    It can be gone through again.

    Args:
        number: Of the joined batch in its epoch, from 0; the same on every rank.
        joined_rows: Rows of the joined batch, over all ranks.
    """

    def __init__(self, number: int, joined_rows: int) -> None:
        self.number = number
        self.joined_rows = joined_rows

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many rows there are on this rank; the tail of an epoch may have none for it."""

    @abstractmethod
    def __len__(self) -> int:
        """How many micro-batches there are."""

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Gives them."""

    @abstractmethod
    def names(self, rows: Sequence[int]) -> list[str]:
        """Returns what the user calls rows of this share, counted from 0 over its micro-batches."""


class GatheredShare(Share):
    """Rows by number.

    Each `for` gathers them anew, so that there is memory for one micro-batch at a time.

    Args:
        number: As `Share`.
        pieces: Which rows of the data these are: their numbers, a micro-batch each.
        joined_rows: As `Share`.
        mover: Brings rows to the model.
    """

    def __init__(self, number: int, pieces: list[Indices], joined_rows: int, mover: Mover) -> None:
        super().__init__(number, joined_rows)
        self._mover = mover
        self._pieces = pieces
        self.next: GatheredShare | None = None
        """The share that comes next in the epoch, where it is known."""

    @property
    def rows(self) -> int:
        """As `Share`."""
        return sum(map(len, self._pieces))

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Batch]:
        following = [] if self.next is None else self.next._pieces[:1]
        for indices, coming in zip(self._pieces, [*self._pieces[1:], *following, None], strict=False):
            yield Batch(self.number, *self._mover(indices, coming))

    def names(self, rows: Sequence[int]) -> list[str]:
        """Returns the numbers of rows in the data."""
        indices = np.concatenate(self._pieces)
        return [str(indices[row]) for row in rows]


def share_of_batches(rows: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (first, end) of the numbers of batches that a rank deals with: neighbours, evenly shared."""
    batches = -(-rows // batch_size)
    return batches * rank // world_size, batches * (rank + 1) // world_size
