"""Which places in the order of an epoch are whose in each step: pure arithmetic.

The rows of a step are dealt to the ranks one by one, and each rank's part into micro-batches. Batch norm cannot train
on a single row, so the tail of an epoch is dealt to fewer ranks where that gives each of them two rows or more. It
depends on nothing but the numbers of rows, of ranks and of micro-batches: the rows of a step are the same on any number
of ranks, and the deal is the same where a fit resumes.
"""

from __future__ import annotations

import itertools
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


class SingleRow(NamedTuple):
    """A micro-batch of a single row, which a model with batch norm cannot be trained on.

    Attributes:
        joined_rows: Rows of its step, over all ranks; 0: nobody knows.
        is_tail: Whether only the last step of an epoch has one.
    """

    joined_rows: int
    is_tail: bool


class Dealing(ABC):
    """All steps of an epoch.

    Attributes:
        steps: How many there are.
    """

    steps: int

    @abstractmethod
    def deal(self, step: int) -> Deal:
        """Returns what the rank gets in a step."""

    @abstractmethod
    def single_row(self) -> SingleRow | None:
        """Return whether any rank gets a micro-batch of a single row; the same on every rank."""


def dealt_to(rows: int, effective_batch_size: int, world_size: int) -> int:
    """Return to how many ranks the rows of a step are dealt: all, or of a tail fewer where that leaves no single row.

    Args:
        rows: Of the step, over all ranks.
        effective_batch_size: Rows of a full step. No rank gets more than it has in one.
        world_size: Number of ranks.
    """
    fewer, most = max(1, rows // 2), -(-effective_batch_size // world_size)
    if rows == effective_batch_size:
        return world_size
    return fewer if fewer < world_size and -(-rows // fewer) <= most else world_size


def micro_batches_of(own: range, rows_at_once: int) -> list[range]:
    """Return a rank's places as micro-batches; the last one takes a row of the one before rather than have only one.

    Args:
        own: Places of the rank.
        rows_at_once: Rows of a micro-batch, at most.
    """
    cuts = list(range(0, len(own), rows_at_once))
    if len(cuts) > 1 and len(own) - cuts[-1] == 1 and rows_at_once > 2:
        cuts[-1] -= 1
    return [own[begin:end] for begin, end in itertools.pairwise([*cuts, len(own)])]


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
        return self._deal(step, self._rank)

    def _deal(self, step: int, rank: int) -> Deal:
        first = step * self._effective_batch_size
        end = min(first + self._effective_batch_size, self._rows)
        ranks = dealt_to(end - first, self._effective_batch_size, self._world_size)
        own = range(first + rank, end, ranks) if rank < ranks else range(0)
        return Deal(micro_batches_of(own, self._rows_at_once), end - first)

    def single_row(self) -> SingleRow | None:
        """As `Dealing`."""
        for step in sorted({0, self.steps - 1}):
            deals = [self._deal(step, rank) for rank in range(self._world_size)]
            if any(len(piece) == 1 for deal in deals for piece in deal.pieces):
                return SingleRow(deals[0].joined_rows, is_tail=deals[0].joined_rows < self._effective_batch_size)
        return None


class BatchDealing(Dealing):
    """Batches are dealt, one micro-batch each: as a DataLoader's batch sampler has made them.

    Args:
        ends: Of each batch in the order of the epoch, shape (batches,).
        batches_per_step: Over all ranks.
        rank: Whose deals these are.
        world_size: How many ranks there are.
        drop_last: Whether a last step with fewer batches is left out.
    """

    def __init__(self, ends: Indices, batches_per_step: int, rank: int, world_size: int, *, drop_last: bool) -> None:
        self._ends = [0, *ends.tolist()]
        self._batches_per_step, self._rank, self._world_size = batches_per_step, rank, world_size
        self.steps = len(ends) // batches_per_step if drop_last else -(-len(ends) // batches_per_step)

    def deal(self, step: int) -> Deal:
        """As `Dealing`."""
        first = step * self._batches_per_step
        end = min(first + self._batches_per_step, len(self._ends) - 1)
        own = range(first + self._rank, end, self._world_size)
        return Deal(
            [range(self._ends[batch], self._ends[batch + 1]) for batch in own], self._ends[end] - self._ends[first]
        )

    def single_row(self) -> SingleRow | None:
        """As `Dealing`."""
        dealt = self._ends[: min(self.steps * self._batches_per_step, len(self._ends) - 1) + 1]
        singles = [number for number, first in enumerate(dealt[:-1]) if dealt[number + 1] - first == 1]
        return SingleRow(0, is_tail=singles == [len(dealt) - 2]) if singles else None
