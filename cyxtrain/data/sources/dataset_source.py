"""Rows of a Dataset, fetched by number through a DataLoader: workers, collating and pinning are its user's.

Which rows, and when, is ours: one order of each epoch, dealt to the ranks, from any step on. What a data set draws for
a row, such as its augmentation, depends on seed, epoch and the row's place in the epoch alone: it is the same on any
number of ranks and workers, and where a fit goes on in the middle of an epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, Share, placed, share_of_batches
from cyxtrain.data.batches.collate import as_batch, left_out
from cyxtrain.data.batches.prefetch import DeviceCopier, Placement, make_copier
from cyxtrain.data.batches.rows import Rows, sampled_hash
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.feed import NumberedFeed, Place, check_steps
from cyxtrain.data.order import Order, OrderOf, OwnOrder, load_states, order_of, states_of
from cyxtrain.data.row_rng import row_keys, tell_epoch
from cyxtrain.data.sampler import Indices
from cyxtrain.data.sharding import BatchDealing, Dealing, RowDealing, SingleRow, UnevenStep
from cyxtrain.data.sources.fetching import Fetcher, KeyedRows
from cyxtrain.data.sources.source import FetchedSource
from cyxtrain.errors import ConfigError, counted, on_all_ranks, warn
from cyxtrain.world.runtime import gather_texts, is_master

_TRIED_ROWS = 2
_TO_EVALUATE = -1
"""The "epoch" whose random numbers an evaluation has: always the same."""


class LoadedSource(FetchedSource):
    """Rows of a Dataset.

    Args:
        dataset: With rows by number.
        loader: How they are fetched, and in which order; None: one by one, in ours.
        config: Of the fit.

    Attributes:
        seed: Of the run.
        order: Of the rows in each epoch.
        drop_last: Whether a step with fewer rows, at the end of an epoch, is left out.
        to_train: Fetches the rows of a fit; those of an evaluation have a fetcher, and workers, of their own.

    Raises:
        ConfigError: There are none, or what is fetched is no batch.
    """

    def __init__(self, dataset: Any, loader: DataLoader[Any] | None, config: DistributedTrainingConfig) -> None:
        self._dataset = dataset
        self._loader = loader
        self.seed = config.seed
        size = _size(dataset)
        self.order: Order = (
            OwnOrder(size, config.shuffle, config.seed) if loader is None else order_of(loader, size, config.seed)
        )
        if len(self.order) == 0:
            raise ConfigError(f"the {type(dataset).__name__} has no rows: there is nothing to train on or to evaluate.")
        batches = None if loader is None else loader.batch_sampler
        if type(batches) is BatchSampler:
            self.batch_size = batches.batch_size
        self.drop_last = type(batches) is BatchSampler and batches.drop_last
        self._to_evaluate = Fetcher(dataset, loader, config.seed)
        self.to_train = Fetcher(dataset, loader, config.seed)
        self._look(config.batch_size)

    def _look(self, batch_size: int) -> None:
        """Takes a first batch, or some rows of it, twice: a data set may draw what nobody can seed."""
        found = self.order.to_evaluate()
        if found.ends is not None:
            self.batch_size = int(found.ends[0])
        rows = min(_TRIED_ROWS, self.batch_size or batch_size, len(found.indices))
        places = range(rows if found.ends is None else int(found.ends[0]))
        asked = _keyed_rows(found, places, self.seed, _TO_EVALUATE)
        fetched = list(self._looks().fetch([asked, asked]))
        self.left_out = left_out(fetched[0])
        self.example, again = (_whole(as_batch(each), len(places)) for each in fetched)
        pairs = zip(self.example.tensors(), again.tensors(), strict=True)
        self._is_reproducible = all(sampled_hash(one) == sampled_hash(other) for one, other in pairs)

    def _looks(self) -> Fetcher:
        """Return what fetches rows to be tried, in this process where it can: it is not prepared as workers are."""
        tries = self._loader is None or self._loader.worker_init_fn is None
        return Fetcher(self._dataset, self._loader, self.seed, tries=tries)

    def begin(self, number: int) -> bool:
        """Tell the data set the number of a pass; return whether it wants to know, and may have another length now."""
        told = tell_epoch(self._dataset, number)
        if told and isinstance(self.order, OwnOrder):
            self.order.size = _size(self._dataset)
        return told

    def fetch(self, order: OrderOf, places: range, epoch: int) -> Rows:
        """Returns rows at places in an order, as copies, as an epoch gives them."""
        (fetched,) = self._looks().fetch([_keyed_rows(order, places, self.seed, epoch)])
        return self.rows(fetched, len(places)).mapped(Tensor.clone)

    def describe(self) -> str:
        """As `Source`."""
        rows = len(self.order.to_evaluate().indices) if self.order.in_batches else len(self.order)
        return f"{counted(rows, 'row')} of {type(self._dataset).__name__}"

    def explain(self) -> str:
        """As `Source`."""
        workers = self._loader.num_workers if self._loader is not None else 0
        by = f", by {counted(workers, 'worker')} per rank" if workers else ""
        drawn = "" if self._is_reproducible else ", which draw random numbers that nobody seeds: no run is like another"
        return f", {self.order.describe()}{by}{drawn}"

    def rows(self, fetched: Any, asked: int) -> Rows:
        """Returns what was fetched as rows.

        Raises:
            ConfigError: They do not have the parts of the first ones, or are not as many as were asked for.
        """
        return _whole(self.weighed(as_batch(fetched)), asked)

    def facts(self, name: str) -> dict[str, Any]:
        """Returns the kind of data set and of sampler, and kinds and values of the first rows."""
        facts: dict[str, Any] = {
            f"the {name} data set": f"{counted(len(self.order), 'row')} of {type(self._dataset).__name__}",
            f"the order of the {name} data": self.order.describe(),
            f"the order of the {name} data: hash": self.order.to_evaluate().digest if self.order.is_drawn else 0,
        }
        for what, tensor in self.example.named():
            facts[f"{name} {what}: dtype"] = str(tensor.dtype).removeprefix("torch.")
            facts[f"{name} {what}: shape of a row"] = list(tensor.shape[1:])
            facts[f"{name} {what}: hash of the first rows"] = sampled_hash(tensor) if self._is_reproducible else ""
        return facts

    def feed(self, config: DistributedTrainingConfig, rank: int, world_size: int) -> LoadedFeed:
        """As `Source`.

        Raises:
            ConfigError: Batches that are made in advance shall have another size, or none would be left.
        """
        return LoadedFeed(self, config, rank, world_size)

    def whole_batches(self, batch_size: int, placement: Placement, rank: int, world_size: int) -> Iterator[Batch]:
        """As `Source`: neighbouring batches."""
        order, batches = self._batches(batch_size)
        first, end = share_of_batches(len(batches), 1, rank, world_size)
        own = batches[first:end]
        fetched = self._to_evaluate.fetch([_keyed_rows(order, places, self.seed, _TO_EVALUATE) for places in own])
        rows = (self.rows(found, len(places)) for places, found in zip(own, fetched, strict=True))
        return placed(enumerate(rows, first), make_copier(placement))

    def table_rows(self, batch_size: int) -> int:
        """Returns how many batches there are."""
        return len(self._batches(batch_size)[1])

    def _batches(self, batch_size: int) -> tuple[OrderOf, list[range]]:
        """Returns the order, and the places of each batch in it."""
        order = self.order.to_evaluate()
        if order.ends is None:
            rows = len(order.indices)
            found = [range(first, min(first + batch_size, rows)) for first in range(0, rows, batch_size)]
        else:
            found = [range(first, end) for first, end in zip([0, *order.ends[:-1]], order.ends, strict=True)]
        return order, found[: self._limit]


def _whole(rows: Rows, asked: int) -> Rows:
    """Refuses another number of rows than was asked for: gradients are divided by how many there are."""
    if num_rows(rows.inputs) != asked:
        raise ConfigError(
            f"of {counted(asked, 'row')} the DataLoader's collate_fn has made {num_rows(rows.inputs)}, and each "
            "rank must know how many rows the others have. To leave rows out, give a sampler that does; what "
            "gives batches of any size is an IterableDataset or a generator."
        )
    return rows


def _size(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"{type(dataset).__name__} has no length, and rows are dealt to the ranks by number: give it a __len__, or "
            "make it an IterableDataset."
        ) from error


class LoadedFeed(NumberedFeed):
    """Rows of a data set, in the order of each epoch.

    Args:
        source: The rows.
        config: Of the fit.
        rank: This one.
        world_size: How many there are.
    """

    def __init__(self, source: LoadedSource, config: DistributedTrainingConfig, rank: int, world_size: int) -> None:
        super().__init__(config)
        self._source = source
        self._rank, self._world_size = rank, world_size
        self._accumulation_steps = config.accumulation_steps
        self._drop_last = source.drop_last or config.drop_last
        self._rows = len(source.order)
        self._pass: tuple[int, OrderOf] | None = None
        self._before: list[Any] | None = None
        self._restored: dict[str, Any] = {}
        self._warned = False
        self._digest = 0
        self._is_in_batches = source.order.in_batches
        if self._is_in_batches and config.effective_batch_size is not None:
            raise ConfigError(
                "effective_batch_size is set, and the DataLoader's batch_sampler makes batches as it likes: give the "
                "DataLoader a batch_size and a sampler instead, or leave effective_batch_size out."
            )
        self._batch_size = source.batch_size or config.batch_size
        self.resume_from(config.effective_batch_size or self._batch_size * config.accumulation_steps * world_size)
        check_steps(self.steps_per_epoch, self._rows, self.effective_batch_size)

    def resume_from(self, effective_batch_size: int) -> None:
        """As `Feed`."""
        self.effective_batch_size = effective_batch_size
        most = -(-effective_batch_size // self._world_size)
        self.rows_at_once = self._batch_size if self._is_in_batches else -(-most // self._accumulation_steps)

    @property
    def _batches_per_step(self) -> int:
        """Of those that are made in advance, over all ranks."""
        return max(1, self.effective_batch_size // self._batch_size)

    @property
    def micro_batches(self) -> int:
        """As `Feed`."""
        if self._is_in_batches:
            return -(-self._batches_per_step // self._world_size)
        return self._accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        """As `Feed`."""
        if self._is_in_batches:
            batches = self._rows
            return batches // self._batches_per_step if self._drop_last else -(-batches // self._batches_per_step)
        return self._deal_rows(self._rows).steps

    def _deal_rows(self, rows: int, rank: int | None = None) -> RowDealing:
        sizes, own = (self.effective_batch_size, self.rows_at_once), self._rank if rank is None else rank
        return RowDealing(rows, *sizes, own, self._world_size, drop_last=self._drop_last)

    def _dealing_of(self, order: OrderOf, rank: int | None = None) -> Dealing:
        if order.ends is None:
            return self._deal_rows(len(order.indices), rank)
        ranks = (self._rank if rank is None else rank, self._world_size)
        return BatchDealing(order.ends, self._batches_per_step, *ranks, drop_last=self._drop_last)

    def first_rows(self, epoch: int) -> Rows:
        """As `Feed`; where a sampler of the user's draws the order, in another one: all ranks draw it together."""
        order = self._source.order
        found = order.to_evaluate() if order.is_drawn else order.of(epoch)
        return self._source.fetch(found, self._dealing_of(found, 0).deal(0).pieces[0], epoch)

    def single_row(self, *, together: bool = False) -> SingleRow | None:
        """As `Feed`, in the order of the first epoch."""
        return self._dealing_of(self._source.order.to_evaluate()).single_row(together=together)

    def uneven_step(self) -> UnevenStep | None:
        """As `Feed`: later epochs may have other lengths."""
        found = self._dealing_of(self._source.order.to_evaluate()).uneven_step()
        return UnevenStep() if found is None and not self._drop_last else found

    def rows_of(self, steps: int | None) -> int | None:
        """As `Feed`."""
        if self._is_in_batches or self._continues:
            return None
        most = self.steps_per_epoch * self.effective_batch_size
        return min(self._rows, most if steps is None else steps * self.effective_batch_size)

    @property
    def read(self) -> tuple[int, int, int]:
        """As `Feed`."""
        return (*super().read[:2], self._digest)

    def shares(self, place: Place, placement: Placement, end: int | None) -> Iterator[Share]:
        """As `Feed`; the last share of a pass does not know the first of the next, whose order is not drawn before."""
        source, numbers, mover = self._source, itertools.count(place.steps), make_copier(placement)

        def given(number: int, dealing: Dealing, steps: range) -> Iterator[tuple[Share, tuple[int, int]]]:
            order = self._open(number, place)
            fetched = source.to_train.fetch(_asked(order, dealing, steps, source.seed, number))
            for step in steps:
                deal = dealing.deal(step)
                own = [order.indices[piece.start : piece.stop : piece.step] for piece in deal.pieces]
                yield LoadedShare(next(numbers), deal.joined_rows, own, fetched, source, mover), (number, step + 1)

        for number, dealing, steps in self._walk(
            place, end, lambda number: self._dealing_of(self._open(number, place))
        ):
            yield from self._linked(given(number, dealing, steps))

    def _open(self, number: int, place: Place) -> OrderOf:
        """Return the order of a pass; it is made once. All ranks call it."""
        if self._pass is None or self._pass[0] != number:
            drawn, told = self._source.order, self._source.begin(number)
            begun, taken = self._begin(place)
            is_resumed = taken > 0 and number == begun
            restored, self._restored = self._restored, {}
            load_states(drawn.stateful, restored.get("before" if is_resumed else "now", ()))
            self._before = states_of(drawn.stateful)
            order = drawn.of(number)
            if is_resumed:
                load_states(drawn.stateful, restored.get("now", ()))
            self._pass = number, order
            if drawn.is_drawn or told:
                self._check(order, place.order if is_resumed else 0)
            self._warn_of_length(number, order)
        return self._pass[1]

    def _warn_of_length(self, number: int, order: OrderOf) -> None:
        steps, planned = self._dealing_of(order).steps, self.steps_per_epoch
        if steps != planned and not self._warned and not self._continues and is_master():
            warn(
                f"epoch {number + 1} has {counted(steps, 'step')} and the first one had {planned:,}: the length of X "
                "changes. A schedule counts on that of the first epoch."
            )
            self._warned = True

    def state_dict(self) -> dict[str, Any]:
        """As `Feed`: of the user's sampler, before it gave the running order, and now."""
        now = states_of(self._source.order.stateful)
        return {"before": now if self._before is None else self._before, "now": now} if now else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Feed`."""
        self._restored = dict(state)

    def _check(self, order: OrderOf, expected: int) -> None:
        """Refuse an order that is not the same on all ranks, or not the one that was begun with. All ranks call it.

        Args:
            order: Of a pass.
            expected: Its digest, where it was begun with; else 0.
        """
        self._digest = order.digest
        digests = gather_texts(str(self._digest))
        another = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        drawn = "must draw from the generators of torch, NumPy or Python, or from one that is its attribute 'generator'"
        if another is not None:
            raise on_all_ranks(
                ConfigError(
                    f"the DataLoader's sampler gives rank {another} another order than rank 0: it {drawn}, which are "
                    "seeded alike on all ranks.",
                    rank=another,
                )
            )
        if expected not in (0, self._digest):
            raise on_all_ranks(
                ConfigError(
                    "the DataLoader's sampler gives another order of this epoch than it gave before the checkpoint in "
                    f"the middle of it: rows would come twice, and others never. It {drawn}; or go on from a "
                    "checkpoint between two epochs."
                )
            )


def _asked(order: OrderOf, dealing: Dealing, steps: range, seed: int, epoch: int) -> Iterator[KeyedRows]:
    """Gives what is to be fetched, micro-batch by micro-batch.

    It holds nothing of the loader that asks: else the two would keep each other, and workers, alive.
    """
    for step in steps:
        for piece in dealing.deal(step).pieces:
            yield _keyed_rows(order, piece, seed, epoch)


def _keyed_rows(order: OrderOf, places: range, seed: int, epoch: int) -> KeyedRows:
    """Returns row numbers, each with its key."""
    indices = order.indices[places.start : places.stop : places.step].tolist()
    rows = KeyedRows(zip(indices, row_keys(seed, epoch, places), strict=True))
    rows.epoch = epoch
    return rows


class LoadedShare(Share):
    """Rows that a DataLoader fetches; they are kept until the share is gone.

    Args:
        number: As `Share`.
        joined_rows: As `Share`.
        pieces: Row numbers, a micro-batch each.
        fetched: Gives what is made of each, after that of the shares before.
        source: Makes rows of it.
        mover: As `Share`.
    """

    def __init__(
        self,
        number: int,
        joined_rows: int,
        pieces: Sequence[Indices],
        fetched: Iterator[Any],
        source: LoadedSource,
        mover: DeviceCopier,
    ) -> None:
        super().__init__(number, joined_rows, mover)
        self._pieces = pieces
        self._fetched = fetched
        self._source = source
        self._held: list[Rows] = []

    @property
    def rows(self) -> int:
        """As `Share`."""
        return sum(map(len, self._pieces))

    def __len__(self) -> int:
        return len(self._pieces)

    def fetch(self, index: int) -> Rows:
        """As `Share`."""
        if index == len(self._held):
            self._held.append(self._source.rows(next(self._fetched), len(self._pieces[index])))
        return self._held[index]

    def names(self, rows: Sequence[int]) -> list[str]:
        """Returns the numbers of rows in the data set."""
        indices = np.concatenate(self._pieces)
        return [str(indices[row]) for row in rows]
