"""Which places in the order of an epoch are whose in each step: pure arithmetic.

The rows of a step are dealt to the ranks one by one, and each rank's part into micro-batches. Batch norm cannot train
on a single row, so the tail of an epoch is dealt to fewer ranks where that gives each of them two rows or more. It
depends on nothing but the numbers of rows, of ranks and of micro-batches: the rows of a step are the same on any number
of ranks, and the deal is the same where a fit resumes.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
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


class UnevenStep(NamedTuple):
    """A step in which ranks have different numbers of micro-batches.

    Attributes:
        joined_rows: Its rows, over all ranks; 0: nobody knows.
        counts: Micro-batches by rank; empty: nobody knows.
        is_tail: Whether only the last step of an epoch is such.
    """

    joined_rows: int = 0
    counts: Sequence[int] = ()
    is_tail: bool = False


class Dealing(ABC):
    """All steps of an epoch.

    Attributes:
        steps: How many there are.
        rank: Whose deals these are.
        world_size: How many ranks there are.
    """

    steps: int
    rank: int
    world_size: int

    def deal(self, step: int) -> Deal:
        """Returns what the rank gets in a step."""
        return self.deal_to(self.rank, step)

    @abstractmethod
    def deal_to(self, rank: int, step: int) -> Deal:
        """Return what another rank gets in a step."""

    @abstractmethod
    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """Return whether any rank gets a micro-batch of a single row; the same on every rank.

        Args:
            together: Whether the micro-batches that all ranks have at the same time count as one.
        """

    def uneven_step(self) -> UnevenStep | None:
        """Return the first step in which ranks have different numbers of micro-batches; the same on every rank."""
        for step in self._kinds_of_steps():
            deals = [self.deal_to(rank, step) for rank in range(self.world_size)]
            counts = [len(deal.pieces) for deal in deals]
            if len(set(counts)) > 1:
                return UnevenStep(deals[0].joined_rows, counts, is_tail=step > 0)
        return None

    def _kinds_of_steps(self) -> list[int]:
        """Return a step of each kind: all but the last one are dealt alike."""
        return sorted({0, self.steps - 1}) if self.steps else []

    def _rounds(self, step: int) -> list[list[int]]:
        """Return how many rows each rank has in each micro-batch of a step, by micro-batch and rank."""
        pieces = [self.deal_to(rank, step).pieces for rank in range(self.world_size)]
        return [[*map(len, each)] for each in itertools.zip_longest(*pieces, fillvalue=range(0))]


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
        self.rank, self.world_size = rank, world_size
        self.steps = rows // effective_batch_size if drop_last else -(-rows // effective_batch_size)
        self._rows = rows

    def deal_to(self, rank: int, step: int) -> Deal:
        """As `Dealing`."""
        first = step * self._effective_batch_size
        end = min(first + self._effective_batch_size, self._rows)
        ranks = dealt_to(end - first, self._effective_batch_size, self.world_size)
        own = range(first + rank, end, ranks) if rank < ranks else range(0)
        return Deal(micro_batches_of(own, self._rows_at_once), end - first)

    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """As `Dealing`."""
        for step in self._kinds_of_steps():
            rounds = self._rounds(step)
            if any(sum(each) == 1 if together else 1 in each for each in rounds):
                joined_rows = self.deal(step).joined_rows
                return SingleRow(joined_rows, is_tail=joined_rows < self._effective_batch_size)
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
        self._batches_per_step, self.rank, self.world_size = batches_per_step, rank, world_size
        self.steps = len(ends) // batches_per_step if drop_last else -(-len(ends) // batches_per_step)

    def deal_to(self, rank: int, step: int) -> Deal:
        """As `Dealing`."""
        first = step * self._batches_per_step
        end = min(first + self._batches_per_step, len(self._ends) - 1)
        own = range(first + rank, end, self.world_size)
        return Deal(
            [range(self._ends[batch], self._ends[batch + 1]) for batch in own], self._ends[end] - self._ends[first]
        )

    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """As `Dealing`."""
        if together:
            found = [step for step in range(self.steps) if any(sum(each) == 1 for each in self._rounds(step))]
            return SingleRow(0, is_tail=found == [self.steps - 1]) if found else None
        dealt = self._ends[: min(self.steps * self._batches_per_step, len(self._ends) - 1) + 1]
        singles = [number for number, first in enumerate(dealt[:-1]) if dealt[number + 1] - first == 1]
        return SingleRow(0, is_tail=singles == [len(dealt) - 2]) if singles else None
