"""Which places in the order of an epoch each rank gets in each step: pure arithmetic.

The samples of a step are divided among the ranks one by one, and each rank's part into micro-batches. Batch norm cannot
train on a single sample, so the tail of an epoch goes to fewer ranks if each of them then gets two samples or more.
This depends only on the numbers of samples, ranks and micro-batches: a step has the same samples on any number of
ranks, and in a resumed run.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import override

from cyxtrain.data.sampler import Indices


class Shard(NamedTuple):
    """A rank's part of a step: the places of each micro-batch in the epoch's order; samples over all ranks."""

    pieces: list[range]
    global_rows: int


class SingleRow(NamedTuple):
    """A micro-batch of a single sample, which a model with batch norm cannot be trained on."""

    global_rows: int  # of its step, over all ranks; 0: unknown
    is_tail: bool  # whether only the last step of an epoch has one


class UnevenStep(NamedTuple):
    """A step in which ranks have different numbers of micro-batches."""

    global_rows: int = 0  # over all ranks; 0: unknown
    counts: Sequence[int] = ()  # micro-batches by rank; empty: unknown
    is_tail: bool = False  # whether only the last step of an epoch is uneven


class Sharding(ABC):
    """The shards of all steps of an epoch."""

    steps: int  # the number of steps
    num_slices: int  # parts of a step, one per rank

    @abstractmethod
    def shard(self, number: int, step: int) -> Shard:
        """Return a slice's shard of a step."""

    @abstractmethod
    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """Return a micro-batch of a single sample on any rank; `together`: count those of all ranks as one."""

    def count_ranks(self, step: int) -> int:
        """Return how many ranks have samples in a step: those from 0 on."""
        return sum(bool(self.shard(number, step).pieces) for number in range(self.num_slices))

    def uneven_step(self) -> UnevenStep | None:
        """Return the first step in which ranks have different numbers of micro-batches."""
        for step in self._kinds_of_steps():
            shards = [self.shard(number, step) for number in range(self.num_slices)]
            counts = [len(shard.pieces) for shard in shards]
            if len(set(counts)) > 1:
                return UnevenStep(shards[0].global_rows, counts, is_tail=step > 0)
        return None

    def _kinds_of_steps(self) -> list[int]:
        """Return a step of each kind: all but the last one are sharded the same way."""
        if not self.steps:
            return []
        return sorted({0, self.steps - 1})

    def _rounds(self, step: int) -> list[list[int]]:
        """Return the number of samples of each rank in each micro-batch of a step, by micro-batch and rank."""
        pieces = [self.shard(number, step).pieces for number in range(self.num_slices)]
        return [[*map(len, each)] for each in itertools.zip_longest(*pieces, fillvalue=range(0))]

    def _has_single_row(self, step: int, *, together: bool) -> bool:
        rounds = self._rounds(step)
        if together:
            return any(sum(counts) == 1 for counts in rounds)
        return any(1 in counts for counts in rounds)


def num_steps(units: int, per_step: int, *, drop_last: bool) -> int:
    """Return how many steps rows or batches make; the last one may be incomplete, unless `drop_last`."""
    if drop_last:
        return units // per_step
    return -(-units // per_step)


def ranks_with_rows(rows: int, effective_batch_size: int, world_size: int) -> int:
    """Return how many ranks share a step: all, or for a tail fewer, if that leaves no single sample."""
    if rows == effective_batch_size:
        return world_size
    fewer = max(1, rows // 2)
    most_rows = -(-effective_batch_size // world_size)  # on a rank, in a full step
    if fewer < world_size and -(-rows // fewer) <= most_rows:
        return fewer
    return world_size


def micro_batches_of(own: range, rows_at_once: int) -> list[range]:
    """Return a rank's places as micro-batches; rather than a single sample, the last one takes one more."""
    cuts = list(range(0, len(own), rows_at_once))
    if len(cuts) > 1 and len(own) - cuts[-1] == 1 and rows_at_once > 2:
        cuts[-1] -= 1
    return [own[begin:end] for begin, end in itertools.pairwise([*cuts, len(own)])]


class RowSharding(Sharding):
    """Rows divided one by one: step k has the rows from k times the effective batch size on."""

    def __init__(
        self, rows: int, effective_batch_size: int, rows_at_once: int, num_slices: int, *, drop_last: bool
    ) -> None:
        self._effective_batch_size = effective_batch_size
        self._rows_at_once = rows_at_once
        self.num_slices = num_slices
        self.steps = num_steps(rows, effective_batch_size, drop_last=drop_last)
        self._rows = rows

    @override
    def shard(self, number: int, step: int) -> Shard:
        first = step * self._effective_batch_size
        end = min(first + self._effective_batch_size, self._rows)
        global_rows = end - first
        count = ranks_with_rows(global_rows, self._effective_batch_size, self.num_slices)
        if number >= count:
            return Shard([], global_rows)
        own = range(first + number, end, count)
        return Shard(micro_batches_of(own, self._rows_at_once), global_rows)

    @override
    def single_row(self, *, together: bool = False) -> SingleRow | None:
        for step in self._kinds_of_steps():
            if self._has_single_row(step, together=together):
                global_rows = self.shard(0, step).global_rows
                return SingleRow(global_rows, is_tail=global_rows < self._effective_batch_size)
        return None


class BatchSharding(Sharding):
    """Batches of a batch sampler, which end at `ends`, divided: one micro-batch each."""

    def __init__(self, ends: Indices, batches_per_step: int, num_slices: int, *, drop_last: bool) -> None:
        self._ends = [0, *ends.tolist()]
        self._batches_per_step = batches_per_step
        self.num_slices = num_slices
        self.steps = num_steps(len(ends), batches_per_step, drop_last=drop_last)

    @override
    def shard(self, number: int, step: int) -> Shard:
        first = step * self._batches_per_step
        end = min(first + self._batches_per_step, len(self._ends) - 1)
        own = range(first + number, end, self.num_slices)
        pieces = [range(self._ends[batch], self._ends[batch + 1]) for batch in own]
        return Shard(pieces, self._ends[end] - self._ends[first])

    @override
    def single_row(self, *, together: bool = False) -> SingleRow | None:
        if together:
            count = self.steps
            single = [step for step in range(count) if self._has_single_row(step, together=True)]
        else:
            count = min(self.steps * self._batches_per_step, len(self._ends) - 1)
            sizes = [end - first for first, end in itertools.pairwise(self._ends[: count + 1])]
            single = [batch for batch, size in enumerate(sizes) if size == 1]
        if not single:
            return None
        return SingleRow(0, is_tail=single == [count - 1])
