"""The feed of a fit: which rows each rank gets in each step."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import RowShare, Share
from cyxtrain.data.batches.prefetch import DeviceCopier, Placement, make_copier
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.order import EpochOrder, Order, load_states, states_of
from cyxtrain.data.sampler import Indices
from cyxtrain.data.sharding import BatchSharding, RowSharding, Sharding, SingleRow, UnevenStep, num_steps
from cyxtrain.errors import ConfigError, counted, on_all_ranks, warn
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

_DRAWN = "must draw from the generators of torch, NumPy or Python, or from one that is its attribute 'generator'"


class Place(NamedTuple):
    """Where in the data a fit is; the same on every rank."""

    epoch: int  # the running one, from 0
    steps: int  # complete steps of it
    rows: int  # rows of it that all ranks together have been trained on
    passes: int = 0  # complete passes through the data, if an epoch does not end with them
    batches: int = 0  # batches read in the running pass; for rows by number, steps
    order: int = 0  # of a user's sampler, a digest; of a stream, 1 if each rank has its own data; otherwise 0


class DataInterruptedError(Exception):
    """A rank's data cannot continue, because their workers have died in a stop; all ranks raise it at one step."""


class Feed(ABC):
    """The steps of each epoch, as one rank sees them."""

    effective_batch_size: int  # samples of a step, over all ranks; for a stream, as its first batch has them
    rows_at_once: int  # rows of a micro-batch
    is_over = False  # whether there will never be a step again
    has_rank_states = False  # whether `rank_state` may return one
    has_own_data = False  # whether this rank has samples that the others have not

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps that an epoch has samples for; None: unknown before it ends."""
        return None

    def rows_of(self, steps: int | None) -> int | None:
        """Return how many samples a number of steps has, over all ranks; None: unknown."""
        return None

    @abstractmethod
    def shares(self, place: Place, placement: Placement, end: int | None) -> Generator[Share]:
        """Yield this rank's shares of an epoch from a place to step `end`, as many as on every other rank."""

    def first_rows(self, epoch: int) -> Rows | None:
        """Return copies of rank 0's first micro-batch of an epoch; None: use the source's first samples."""
        return None

    @property
    def position(self) -> tuple[int, int, int]:
        """The running `Place.passes`, `Place.batches` and `Place.order`."""
        return 0, 0, 0

    def seconds_communicated(self) -> float:
        """Return how long this rank has waited for other ranks' numbers of samples since the last call."""
        return 0.0

    def check_world(self, world_size: int, place: Place) -> None:  # noqa: B027
        """Raise ConfigError if this number of ranks cannot resume at a place where `world_size` ranks were."""

    @property
    @abstractmethod
    def micro_batches(self) -> int:
        """Micro-batches of a step on one rank, at most."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data that decides what comes next, such as a sampler's own `state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load the state of a checkpoint into the data, before the fit resumes from it."""

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank's data before the latest step, for a checkpoint."""
        return {}

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Load what the ranks of a checkpoint returned, before the fit resumes from it."""

    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """Return a micro-batch of a single sample on any rank, if there is one; as `Sharding.single_row`."""
        return None

    def uneven_step(self) -> UnevenStep | None:
        """Return a step in which ranks may have different numbers of micro-batches."""
        return UnevenStep()

    def set_step_size(self, effective_batch_size: int) -> None:  # noqa: B027
        """Take steps of so many samples over all ranks, as the fit did that resumes."""


class RowSource(Protocol):
    """Data with rows by number, as a feed uses them."""

    batch_size: int | None
    is_whole: bool
    drop_last: bool

    def begin_pass(self, number: int) -> bool:
        """Begin a pass; return whether the length of the data may have changed."""

    def fetch(self, order: EpochOrder, places: range, epoch: int) -> Rows:
        """Return copies of the rows at places in an order."""

    def fetcher(
        self, order: EpochOrder, pieces: Iterable[range], epoch: int, *, pinned: bool
    ) -> Callable[[Indices], Rows]:
        """Return a function that fetches rows by number: the pieces of the order, one after the other."""


class RowFeed(Feed):
    """Rows by number, in passes that each have an order; with `steps_per_epoch` epochs end and begin within them."""

    def __init__(self, source: RowSource, order: Order, config: DistributedTrainingConfig, world: World) -> None:
        self._source = source
        self._order = order
        self._world = world
        self._slices = Slices.of(world, config.virtual_ranks)
        self._continues = config.steps_per_epoch is not None
        self._accumulation_steps = config.accumulation_steps
        self._drop_last = source.drop_last or config.drop_last
        self._rows = len(order)  # in an epoch; batches, if they are made in advance
        self._next = (0, 0)  # the pass, and how many of its steps are complete
        self._pass: tuple[int, EpochOrder] | None = None
        self._before: list[Any] | None = None
        self._restored: dict[str, Any] = {}
        self._warned = False
        self._digest = 0
        if order.in_batches and config.effective_batch_size is not None:
            raise ConfigError(
                "effective_batch_size is set, and the DataLoader's batch_sampler determines the batches: give the "
                "DataLoader a batch_size and a sampler instead, or leave effective_batch_size out."
            )
        self._batch_size = source.batch_size or config.batch_size
        of_slice = self._batch_size * config.accumulation_steps
        self.set_step_size(config.effective_batch_size or of_slice * self._slices.count)
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"drop_last leaves nothing: {counted(self._rows, 'sample')}, and a step has "
                f"{self.effective_batch_size:,} over all ranks."
            )

    @override
    def set_step_size(self, effective_batch_size: int) -> None:
        self.effective_batch_size = self._order.rows_per_step = effective_batch_size
        self.rows_at_once = self._batch_size
        if not self._order.in_batches:
            rows_of_slice = -(-effective_batch_size // self._slices.count)
            self.rows_at_once = -(-rows_of_slice // self._accumulation_steps)

    @property
    def _batches_per_step(self) -> int:
        """Batches that are made in advance, over all ranks."""
        return max(1, self.effective_batch_size // self._batch_size)

    @property
    @override
    def micro_batches(self) -> int:
        of_slice = self._accumulation_steps
        if self._order.in_batches:
            of_slice = -(-self._batches_per_step // self._slices.count)
        return of_slice * len(self._slices.owned)

    @property
    @override
    def steps_per_epoch(self) -> int:
        per_step = self.effective_batch_size
        if self._order.in_batches:
            per_step = self._batches_per_step
        return num_steps(self._rows, per_step, drop_last=self._drop_last)

    def _sharding(self, order: EpochOrder | None = None) -> Sharding:
        """Return the sharding of an order, by default of the first epoch's."""
        if order is None and self._order.is_drawn:
            order = self._order.to_evaluate()
        rows = self._rows
        if order is not None:
            if order.ends is not None:
                return BatchSharding(order.ends, self._batches_per_step, self._slices.count, drop_last=self._drop_last)
            rows = len(order.indices)
        sizes = (self.effective_batch_size, self.rows_at_once, self._slices.count)
        return RowSharding(rows, *sizes, drop_last=self._drop_last)

    @override
    def first_rows(self, epoch: int) -> Rows:
        """Return these samples; with a user's sampler, in the order of evaluation, which all ranks draw together."""
        order = self._order.to_evaluate() if self._order.is_drawn else self._order.of(epoch)
        first_shard = self._sharding(order).shard(0, 0)
        return self._source.fetch(order, first_shard.pieces[0], epoch)

    @override
    def single_row(self, *, together: bool = False) -> SingleRow | None:
        return self._sharding().single_row(together=together)

    @override
    def uneven_step(self) -> UnevenStep | None:
        found = self._sharding().uneven_step()
        may_change = not self._source.is_whole and not self._drop_last
        if found is None and may_change:
            return UnevenStep()
        return found

    @override
    def rows_of(self, steps: int | None) -> int | None:
        if self._order.in_batches or self._continues:
            return None
        if steps is None:
            steps = self.steps_per_epoch
        return min(self._rows, steps * self.effective_batch_size)

    @property
    @override
    def position(self) -> tuple[int, int, int]:
        if not self._continues:
            return 0, 0, self._digest
        return (*self._next, self._digest)

    def _first_step(self, place: Place) -> tuple[int, int]:
        """Return the pass at a place, and how many of its steps are complete."""
        if self._continues:
            return place.passes, place.batches
        return place.epoch, place.steps

    @override
    def shares(self, place: Place, placement: Placement, end: int | None) -> Generator[Share]:
        """Yield the shares; the last one of a pass has no `next`: the next order is not drawn before."""
        copier = make_copier(placement)
        done = place.steps  # complete steps of the epoch, when a pass begins or continues
        number, first = self._next = self._first_step(place)
        while True:
            order = self._begin_pass(number, place)
            sharding = self._sharding(order)
            last = sharding.steps
            if end is not None:
                last = min(last, first + end - done)
            shares = self._pass_shares(number, order, sharding, range(first, last), done - first, copier)
            following = next(shares, None)
            for completed in range(first + 1, last + 1):
                share = following
                following = next(shares, None)
                assert share is not None
                self._next = number, completed
                share.next = following
                yield share
                share.next = None  # a share that is kept must not keep all that follow
            done += last - first
            if not self._continues or end is None or done == end:
                return
            if not sharding.steps:
                raise ConfigError(f"pass {number + 1} through X has no samples for a step: nothing to train on.")
            number += 1
            first = 0

    def _pass_shares(
        self,
        number: int,
        order: EpochOrder,
        sharding: Sharding,
        steps: range,
        offset: int,
        copier: DeviceCopier,
    ) -> Iterator[RowShare]:
        """Yield the shares of some steps of a pass; `offset` plus a step is its number in the epoch."""
        fetch = self._source.fetcher(order, _pieces(sharding, self._slices, steps), number, pinned=copier.prefetches)
        for step in steps:
            shards = {slice_number: sharding.shard(slice_number, step) for slice_number in self._slices.owned}
            own = {slice_number: [*map(order.rows, shard.pieces)] for slice_number, shard in shards.items()}
            global_rows = sharding.shard(0, step).global_rows
            share = RowShare(offset + step, global_rows, own, fetch, copier, keeps=not self._source.is_whole)
            share.count_ranks = functools.partial(sharding.count_ranks, step)
            yield share

    def _begin_pass(self, number: int, place: Place) -> EpochOrder:
        """Return the order of a pass; it is made once. All ranks call it."""
        if self._pass is not None and self._pass[0] == number:
            return self._pass[1]
        first, completed = self._first_step(place)
        is_resumed = completed > 0 and number == first
        if self._pass is None and place.order and not is_resumed:
            self._check_order_before(number - 1, place.order)
        may_differ = self._source.begin_pass(number) or self._order.is_drawn
        order = self._drawn_order(number, is_resumed=is_resumed)
        self._pass = number, order
        if may_differ:
            self._check(order, place.order if is_resumed else 0)
        self._warn_of_length(number, order)
        return order

    def _check_order_before(self, number: int, expected: int) -> None:
        """Warn, when a fit resumes between two passes, if the sampler gives the pass before in another order."""
        if number < 0 or not self._order.is_drawn or self._order.stateful:
            return
        self._source.begin_pass(number)
        if self._order.of(number).digest != expected and self._world.is_first:
            warn(
                "the DataLoader's sampler gives a different order than before the checkpoint, so this fit differs from "
                f"one that was not interrupted: it {_DRAWN}; or give it a state_dict and a load_state_dict."
            )

    def _drawn_order(self, number: int, *, is_resumed: bool) -> EpochOrder:
        """Return the order of a pass; a resumed one is drawn again from the sampler's state before it."""
        sampler = self._order.stateful
        restored = self._restored
        self._restored = {}
        load_states(sampler, restored.get("before" if is_resumed else "now", ()))
        self._before = states_of(sampler)
        order = self._order.of(number)
        if is_resumed:
            load_states(sampler, restored.get("now", ()))
        return order

    def _warn_of_length(self, number: int, order: EpochOrder) -> None:
        steps = self._sharding(order).steps
        planned = self.steps_per_epoch
        if steps != planned and not self._warned and not self._continues and self._world.is_first:
            warn(
                f"epoch {number + 1} has {counted(steps, 'step')} and the first one had {planned:,}: the length of X "
                "changes. Schedules use the length of the first epoch."
            )
            self._warned = True

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the states of the user's sampler, before it gave the running order and now."""
        now = states_of(self._order.stateful)
        if not now:
            return {}
        return {"before": self._before or now, "now": now}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = dict(state)

    def _check(self, order: EpochOrder, expected: int) -> None:
        """Refuse an order that differs between ranks, or from the digest `expected` (0: any)."""
        self._digest = order.digest
        digests = self._world.gather(str(self._digest))
        differing = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if differing is not None:
            raise on_all_ranks(
                ConfigError(
                    f"the DataLoader's sampler gives rank {differing} a different order than rank 0: it {_DRAWN}, "
                    "which are seeded alike on all ranks.",
                    rank=differing,
                )
            )
        if expected not in (0, self._digest):
            raise on_all_ranks(
                ConfigError(
                    "the DataLoader's sampler gives a different order of this epoch than before the checkpoint in the "
                    f"middle of it: some samples would repeat, and others be missing. It {_DRAWN}; or resume from a "
                    "checkpoint between two epochs."
                )
            )


def _pieces(sharding: Sharding, slices: Slices, steps: range) -> Iterator[range]:
    # Not a method: it must not hold the feed. The loader that reads it would keep itself, and its workers, alive.
    for step in steps:
        for number in slices.owned:
            yield from sharding.shard(number, step).pieces
