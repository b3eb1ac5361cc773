"""Batches of rows, on the device and of the types that the model wants."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cyxtrain.data.batches.collate import answers_in
from cyxtrain.data.batches.prefetch import DeviceCopier, Early, PendingRows, one_ahead
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import Tree, num_rows
from cyxtrain.data.sampler import Indices


@dataclass
class Batch:
    """Rows that go through the model at once.

    Attributes:
        number: Of the batch in its epoch, from 0; the same on every rank.
        inputs: Shape (rows, ...), or several such.
        targets: Shape (rows, ...), or several such, or None.
        weights: Shape (rows,), or None: all rows count alike.
        items: How many items (such as tokens) the losses of a step count over all ranks and micro-batches; None: those
            of this batch. A tensor of the model's device, if that is an accelerator.
    """

    number: int
    inputs: Tree
    targets: Tree | None
    weights: Tensor | None = None
    items: Tensor | int | None = None

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
        mover: Brings rows to the model.

    Attributes:
        next: The share of the next step, if its rows may be fetched before this step is complete.
    """

    def __init__(self, number: int, joined_rows: int, mover: DeviceCopier) -> None:
        self.number = number
        self.joined_rows = joined_rows
        self.next: Share | None = None
        self._mover = mover
        self._given = -1
        self._begun: tuple[int, Early[PendingRows | None]] | None = None

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many rows there are on this rank; the tail of an epoch may have none for it."""

    @abstractmethod
    def __len__(self) -> int:
        """How many micro-batches there are."""

    @abstractmethod
    def fetch(self, index: int) -> Rows:
        """Return the rows of a micro-batch, as the data give them."""

    @abstractmethod
    def names(self, rows: Sequence[int]) -> list[str]:
        """Returns what the user calls rows of this share, counted from 0 over its micro-batches."""

    def __iter__(self) -> Iterator[Batch]:
        """Gives the micro-batches."""
        mover = self._mover
        for index in range(len(self)):
            rows = self._received(index) if mover.is_ahead else mover.place(self.fetch(index))
            yield Batch(self.number, *rows)

    def ahead(self, timed: AbstractContextManager[object]) -> None:
        """Begin to copy the micro-batch after the latest one to the accelerator; on a CPU, do nothing.

        Call it when the backward of the latest one has been launched: the accelerator is busy while the host fetches.
        What the data raise is raised when that micro-batch is needed.

        Args:
            timed: Measures the time.
        """
        if self._mover.is_ahead:
            with timed:
                is_last = self._given + 1 >= len(self)
                following, index = (self.next, 0) if is_last else (self, self._given + 1)
                if following is not None and following._begun is None:
                    following._begun = index, Early(functools.partial(following._sent, index))

    def _sent(self, index: int) -> PendingRows | None:
        return self._mover.send(self.fetch(index)) if index < len(self) else None

    def _received(self, index: int) -> Rows:
        begun, self._begun, self._given = self._begun, None, index
        pending = begun[1].get() if begun is not None and begun[0] == index else self._sent(index)
        assert pending is not None
        return self._mover.receive(pending)


class GatheredShare(Share):
    """Rows by number.

    Each `for` gathers them anew, so that there is memory for one micro-batch at a time.

    Args:
        number: As `Share`.
        pieces: Which rows of the data these are: their numbers, a micro-batch each.
        joined_rows: As `Share`.
        gather: Returns rows by number.
        mover: As `Share`.
    """

    def __init__(
        self,
        number: int,
        pieces: list[Indices],
        joined_rows: int,
        gather: Callable[[Indices], Rows],
        mover: DeviceCopier,
    ) -> None:
        super().__init__(number, joined_rows, mover)
        self._gather = gather
        self._pieces = pieces

    @property
    def rows(self) -> int:
        """As `Share`."""
        return sum(map(len, self._pieces))

    def __len__(self) -> int:
        return len(self._pieces)

    def fetch(self, index: int) -> Rows:
        """As `Share`."""
        return self._gather(self._pieces[index])

    def names(self, rows: Sequence[int]) -> list[str]:
        """Returns the numbers of rows in the data."""
        indices = np.concatenate(self._pieces)
        return [str(indices[row]) for row in rows]


def placed(batches: Iterator[tuple[int, Rows]], mover: DeviceCopier, *, ahead: bool = True) -> Iterator[Batch]:
    """Yield batches as the model takes them; on an accelerator, each after the next one's copy has begun.

    Args:
        batches: Their numbers and rows.
        mover: Brings rows to the model.
        ahead: Whether a batch may be fetched before the one before it was used.
    """
    if not mover.is_ahead:
        for number, rows in batches:
            yield Batch(number, *mover.place(rows))
        return
    sent = ((number, mover.send(rows)) for number, rows in batches)
    for number, pending in one_ahead(sent) if ahead else sent:
        yield Batch(number, *mover.receive(pending))


def share_of_batches(rows: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (first, end) of the numbers of batches that a rank deals with: neighbours, evenly shared."""
    batches = -(-rows // batch_size)
    return batches * rank // world_size, batches * (rank + 1) // world_size
