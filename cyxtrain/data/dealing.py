"""Which places in the order of an epoch are whose in each step: pure arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from cyxtrain.data.sampler import Indices


class Deal(NamedTuple):
    """What a rank gets of a joined batch.

    Attributes:
        pieces: Places in the order of the epoch, a micro-batch each.
        joined_rows: Rows of the joined batch, over all ranks.
    """

    pieces: list[range]
    joined_rows: int


class Dealing(ABC):
    """All steps of an epoch from one on.

    Attributes:
        steps: How many there are, with those before.
    """

    steps: int

    @abstractmethod
    def deal(self, step: int) -> Deal:
        """Returns what the rank gets in a step."""


class RowDealing(Dealing):
    """Rows are dealt one by one: step k has those from k times the effective batch size on.

    Args:
        rows: Of the epoch.
        effective_batch_size: Rows of a step.
        rows_at_once: Of a micro-batch.
        rank: Whose deals these are.
        world_size: How many ranks there are.
        drop_last: Whether a smaller last step is left out.
    """

    def __init__(
        self, rows: int, effective_batch_size: int, rows_at_once: int, rank: int, world_size: int, *, drop_last: bool
    ) -> None:
        self._effective_batch_size = effective_batch_size
        self._rows_at_once = rows_at_once
        self._rank, self._world_size = rank, world_size
        self.steps = rows // effective_batch_size if drop_last else -(-rows // effective_batch_size)
        self._rows = rows

    def deal(self, step: int) -> Deal:
        """As `Dealing`."""
        first = step * self._effective_batch_size
        end = min(first + self._effective_batch_size, self._rows)
        own, size = range(first + self._rank, end, self._world_size), self._rows_at_once
        return Deal([own[begin : begin + size] for begin in range(0, len(own), size)], end - first)


class BatchDealing(Dealing):
    """Batches are dealt, one micro-batch each: as a DataLoader's batch sampler has made them.

    Args:
        ends: Of each batch in the order of the epoch, shape (batches,).
        done: Steps before, and the rows that they had: a world of another size may have taken them.
        batches_per_step: Over all ranks.
        rank: Whose deals these are.
        world_size: How many ranks there are.
    """

    def __init__(self, ends: Indices, done: tuple[int, int], batches_per_step: int, rank: int, world_size: int) -> None:
        self._ends = [0, *ends.tolist()]
        self._done = done[0]
        self._first = self._ends.index(done[1])
        self._batches_per_step, self._rank, self._world_size = batches_per_step, rank, world_size
        self.steps = self._done - (self._first - len(ends)) // batches_per_step

    def deal(self, step: int) -> Deal:
        """As `Dealing`."""
        first = self._first + (step - self._done) * self._batches_per_step
        end = min(first + self._batches_per_step, len(self._ends) - 1)
        own = range(first + self._rank, end, self._world_size)
        return Deal(
            [range(self._ends[batch], self._ends[batch + 1]) for batch in own], self._ends[end] - self._ends[first]
        )
