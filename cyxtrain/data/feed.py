"""Who is given which rows in each step of a fit."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import GatheredShare, Share
from cyxtrain.data.batches.prefetch import Placement, make_copier
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.iterator import DistributedBatchIterator
from cyxtrain.data.sharding import Dealing, RowDealing, SingleRow, UnevenStep
from cyxtrain.errors import ConfigError, counted


class Place(NamedTuple):
    """Where in the data a fit is; the same on every rank.

    Attributes:
        epoch: Number of the running one, from 0.
        steps: Of it that have been taken.
        rows: Of it that all ranks together have been trained on.
        passes: Times that the data have been gone through, where an epoch does not end with them.
        batches: Batches that they have given in the running pass; of rows by number, steps.
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

    def state_dict(self) -> dict[str, Any]:
        """Return what the data themselves keep that decides what comes next, such as a sampler's own `state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Give the data the state of a checkpoint, before the fit continues from it."""

    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """Return whether any rank is given a micro-batch of a single row; None: no, or nobody knows.

        Args:
            together: Whether the micro-batches that all ranks have at the same time count as one.
        """
        return None

    def uneven_step(self) -> UnevenStep | None:
        """Return a step in which ranks may have different numbers of micro-batches; None: there is none."""
        return UnevenStep()

    def resume_from(self, effective_batch_size: int) -> None:  # noqa: B027
        """Goes on with a fit whose steps have so many rows, over all ranks."""


class NumberedFeed(Feed):
    """Rows by number, dealt in passes through the data that each have an order.

    Args:
        config: Of the fit. With `steps_per_epoch` an epoch continues where the one before it ended, and goes through
            the data again when they are over; without, each epoch is one pass.
    """

    def __init__(self, config: DistributedTrainingConfig) -> None:
        self._continues = config.steps_per_epoch is not None
        self._next = (0, 0)

    @property
    def read(self) -> tuple[int, int, int]:
        """As `Feed`."""
        return (*self._next, 0) if self._continues else (0, 0, 0)

    def _begin(self, place: Place) -> tuple[int, int]:
        """Return (pass, steps of it that have been taken)."""
        return (place.passes, place.batches) if self._continues else (place.epoch, place.steps)

    def _linked(self, given: Iterable[tuple[Share, tuple[int, int]]]) -> Iterator[Share]:
        """Yield shares, each of which knows the next one.

        Args:
            given: With each, the pass and how many of its steps are complete after it.
        """
        for this, following in itertools.pairwise(itertools.chain(given, [None])):
            assert this is not None
            share, self._next = this
            share.next = None if following is None else following[0]
            yield share
            share.next = None  # whoever keeps a share must not keep all that follow

    def _walk(
        self, place: Place, end: int | None, dealing_of: Callable[[int], Dealing]
    ) -> Iterator[tuple[int, Dealing, range]]:
        """Yield (pass, its dealing, its steps) until the epoch ends.

        Args:
            place: Where the epoch is.
            end: As `shares`.
            dealing_of: Opens a pass by its number.

        Raises:
            ConfigError: A whole pass has no step.
        """
        number, first = self._next = self._begin(place)
        left = None if end is None else end - place.steps
        while True:
            dealing = dealing_of(number)
            last = dealing.steps if left is None else min(dealing.steps, first + left)
            yield number, dealing, range(first, last)
            left = None if left is None else left - (last - first)
            if not (self._continues and left):
                return
            if not dealing.steps:
                raise ConfigError(f"pass {number + 1} through X has no rows for a step: there is nothing to train on.")
            number, first = number + 1, 0


class ArrayFeed(NumberedFeed):
    """Rows that lie in memory, in the one global order.

    Args:
        gather: Returns rows by number; takes `pinned`, as `rows.gather`.
        iterator: Deals them.
        config: Of the fit.

    Raises:
        ConfigError: `drop_last` leaves nothing.
    """

    def __init__(
        self,
        gather: Callable[..., Rows],
        iterator: DistributedBatchIterator,
        config: DistributedTrainingConfig,
    ) -> None:
        super().__init__(config)
        self._gather = gather
        self._accumulation_steps = config.accumulation_steps
        self._drop_last = config.drop_last
        self._sampler, self._batch_size = iterator.sampler, iterator.batch_size
        self.resume_from(iterator.effective_batch_size)
        check_steps(self.steps_per_epoch, self._sampler.total_size(), self.effective_batch_size)

    def resume_from(self, effective_batch_size: int) -> None:
        """As `Feed`."""
        sampler = self._sampler
        self.effective_batch_size = effective_batch_size
        most = -(-effective_batch_size // sampler.world_size)
        self.rows_at_once = -(-most // self._accumulation_steps)
        self._sizes = (sampler.total_size(), effective_batch_size, self.rows_at_once)
        self._dealing = RowDealing(*self._sizes, sampler.rank, sampler.world_size, drop_last=self._drop_last)

    @property
    def steps_per_epoch(self) -> int:
        """As `Feed`."""
        return self._dealing.steps

    @property
    def micro_batches(self) -> int:
        """As `Feed`."""
        return self._accumulation_steps

    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """As `Feed`."""
        return self._dealing.single_row(together=together)

    def uneven_step(self) -> UnevenStep | None:
        """As `Feed`."""
        return self._dealing.uneven_step()

    def rows_of(self, steps: int | None) -> int | None:
        """As `Feed`."""
        if self._continues:
            return None
        most = self.steps_per_epoch * self.effective_batch_size
        return min(self._sampler.total_size(), most if steps is None else steps * self.effective_batch_size)

    def shares(self, place: Place, placement: Placement, end: int | None) -> Iterator[Share]:
        """As `Feed`; each share knows the one that comes next."""
        mover, numbers = make_copier(placement), itertools.count(place.steps)
        gather = functools.partial(self._gather, pinned=True) if mover.is_ahead else self._gather

        def given() -> Iterator[tuple[Share, tuple[int, int]]]:
            for number, dealing, steps in self._walk(place, end, lambda _: self._dealing):
                self._sampler.set_epoch(number)
                order = self._sampler.global_indices().copy()  # of a read-only array PyTorch copies each batch of rows
                for step in steps:
                    deal = dealing.deal(step)
                    pieces = [order[piece.start : piece.stop : piece.step] for piece in deal.pieces]
                    yield GatheredShare(next(numbers), pieces, deal.joined_rows, gather, mover), (number, step + 1)

        return self._linked(given())

    def first_rows(self, epoch: int) -> Rows:
        """As `Feed`."""
        self._sampler.set_epoch(epoch)
        places = RowDealing(*self._sizes, 0, self._sampler.world_size, drop_last=self._drop_last).deal(0).pieces[0]
        return self._gather(self._sampler.global_indices()[places.start : places.stop : places.step])


def check_steps(steps: int, rows: int, effective_batch_size: int) -> None:
    """Refuse data of which `drop_last` leaves nothing.

    Raises:
        ConfigError: There is no step.
    """
    if steps == 0:
        raise ConfigError(
            f"drop_last leaves nothing: {counted(rows, 'row')}, and a step has {effective_batch_size:,} over all ranks."
        )
