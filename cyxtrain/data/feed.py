"""Who is given which rows in each step of a fit."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cyxtrain.data.batches import GatheredShare, Share
from cyxtrain.data.iterator import DistributedBatchIterator, joined_batch
from cyxtrain.data.moving import Placement, make_mover
from cyxtrain.data.rows import Rows
from cyxtrain.data.sampler import Indices, deal


class Place(NamedTuple):
    """Where in the data a fit is; the same on every rank.

    Attributes:
        epoch: Number of the running one, from 0.
        steps: Of it that have been taken.
        rows: Of it that all ranks together have been trained on.
        passes: Times that what gives batches has been gone through, where it is not the epoch that ends with it.
        batches: Batches that it has given in the running pass.
        order: A number that no other order of the epoch has, where the user's own sampler makes it; of what gives
            batches, 1 where each rank has its own; else 0.
    """

    epoch: int
    steps: int
    rows: int
    passes: int = 0
    batches: int = 0
    order: int = 0


class Feed(ABC):
    """The steps of each epoch, as one rank sees them.

    Attributes:
        effective_batch_size: Rows of a step, over all ranks; of what gives batches, as its first one has them.
        rows_at_once: Rows of a micro-batch.
        is_over: Whether there will never be a step again.
    """

    effective_batch_size: int
    rows_at_once: int
    is_over = False

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Steps that an epoch has rows for; None: nobody knows before they are over."""

    @abstractmethod
    def rows_of(self, steps: int | None) -> int | None:
        """Returns how many rows so many steps have, over all ranks; None: nobody knows."""

    @abstractmethod
    def shares(self, place: Place, placement: Placement, end: int | None) -> Iterator[Share]:
        """Gives this rank's shares of an epoch from a place on, as many as on every other rank.

        Args:
            place: Where.
            placement: Of batches.
            end: The step before which the epoch ends; None: with its rows.
        """

    def first_rows(self, epoch: int) -> Rows | None:
        """Returns the rows of rank 0's first micro-batch of an epoch, as copies; None: the first rows look like it."""
        return None

    @property
    def read(self) -> tuple[int, int, int]:
        """What else says where in the data it is: `Place.passes`, `Place.batches` and `Place.order`."""
        return 0, 0, 0

    def seconds_communicated(self) -> float:
        """Returns how long this rank has waited for the others' numbers of rows, since it was asked last."""
        return 0.0

    def check_world(self, world_size: int, place: Place) -> None:  # noqa: B027
        """Refuses to go on from where so many ranks were, if this many cannot.

        Raises:
            ConfigError: With what can be done.
        """

    @property
    @abstractmethod
    def micro_batches(self) -> int:
        """How many of them a step has on one rank, at most."""

    def go_on(self, effective_batch_size: int) -> None:  # noqa: B027
        """Goes on with a fit whose steps have so many rows, over all ranks."""


class ArrayFeed(Feed):
    """Rows that lie in memory, in the one global order.

    Args:
        gather: Returns rows by number.
        iterator: Deals them.
        accumulation_steps: Micro-batches of a step.
    """

    def __init__(
        self, gather: Callable[[Indices], Rows], iterator: DistributedBatchIterator, accumulation_steps: int
    ) -> None:
        self._gather = gather
        self._accumulation_steps = accumulation_steps
        self._take(iterator)

    def _take(self, iterator: DistributedBatchIterator) -> None:
        self._iterator = iterator
        self.effective_batch_size = iterator.effective_batch_size
        most = -(-iterator.effective_batch_size // iterator.sampler.world_size)
        self.rows_at_once = -(-most // self._accumulation_steps)

    @property
    def steps_per_epoch(self) -> int:
        """As `Feed`."""
        return self._iterator.num_batches()

    @property
    def micro_batches(self) -> int:
        """As `Feed`."""
        return self._accumulation_steps

    def rows_of(self, steps: int | None) -> int:
        """As `Feed`."""
        total = self._iterator.sampler.total_size()
        return total if steps is None else min(total, steps * self.effective_batch_size)

    def shares(self, place: Place, placement: Placement, end: int | None) -> Iterator[Share]:
        """As `Feed`; each share knows the one that comes next."""
        mover, sampler = make_mover(self._gather, placement), self._iterator.sampler
        sampler.set_epoch(place.epoch)
        order = sampler.global_indices().copy()  # PyTorch takes rows from a read-only array by a copy of each batch

        def share(number: int) -> GatheredShare:
            joined = joined_batch(order, number, self.effective_batch_size)
            own = deal(joined, sampler.rank, sampler.world_size)
            return GatheredShare(number, own, len(joined), self.rows_at_once, mover)

        shares = map(share, range(place.steps, min(self.steps_per_epoch, end or self.steps_per_epoch)))
        for this, following in itertools.pairwise(itertools.chain(shares, [None])):
            assert this is not None
            this.next = following
            yield this

    def first_rows(self, epoch: int) -> Rows:
        """As `Feed`."""
        sampler = self._iterator.sampler
        sampler.set_epoch(epoch)
        joined = joined_batch(sampler.global_indices(), 0, self.effective_batch_size)
        return self._gather(deal(joined, 0, sampler.world_size)[: self.rows_at_once])

    def go_on(self, effective_batch_size: int) -> None:
        """As `Feed`."""
        old = self._iterator
        self._take(DistributedBatchIterator(old.sampler, old.batch_size, effective_batch_size=effective_batch_size))
