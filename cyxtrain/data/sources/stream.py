"""Data that give batches one after the other: iterable datasets, generators, iterables.

If all ranks read the same batches, each batch belongs to one of them; if each rank has its own, it uses all of them.
How many there are is unknown beforehand: in each step the ranks add up their rows, and a rank that has run out takes
part without any, until none has samples.

What the data draw from the generators of torch, NumPy and Python depends on seed and pass alone, and nothing else draws
from them meanwhile: the same batches come again when a fit resumes, and are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, BatchShare, StreamStep, on_device
from cyxtrain.data.batches.collate import as_batch, left_out, target_name
from cyxtrain.data.batches.prefetch import DeviceCopier, Placement, make_copier
from cyxtrain.data.batches.rows import Rows, holds_tensors
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.feed import DataInterruptedError, Place
from cyxtrain.data.sources.passes import INTERRUPTED, FirstBatchSource, PassFeed
from cyxtrain.data.sources.seeded import Saved, SeededIterator, resume_from
from cyxtrain.errors import ConfigError, counted, warn
from cyxtrain.world.world import World

_OWN = 1  # `Place.order` if each rank has its own data


class Pass(SeededIterator):
    """A pass through batches."""

    num_read = 0  # batches with rows
    is_numpy = False
    left_out: Sequence[str] = ()
    target_name: str | None = None

    @override
    def _rows(self, read: Sequence[Any]) -> Iterable[Rows]:
        return [rows for rows in read if rows is not None]

    def peek(self) -> Rows | None:
        """Return the first batch, which stays the next one; None if there are no batches."""
        found = self.read()
        if found is not None:
            self.num_read -= 1
            self._ahead.append(found)
        return found

    def read(self, own: Callable[[Tensor], Tensor] = torch.clone) -> Rows | None:
        """Return a copy of the next batch, made by `own`; None after the last one."""
        if self._ahead:
            self.num_read += 1
            rows: Rows = self._ahead.pop()
            return rows
        with self.drawing():
            return self._read(own)

    def _read(self, own: Callable[[Tensor], Tensor]) -> Rows | None:
        if self._is_over:  # an iterator may begin anew after its end
            return None
        for given in self._items:
            rows = as_batch(given)
            if not num_rows(rows.inputs):
                continue
            if not self.num_read:
                self.left_out = left_out(given)
                self.target_name = target_name(given)
            self.num_read += 1
            self.is_numpy = not holds_tensors(given)
            # A copy: the data may give the same memory again, and a model may change it.
            return rows.mapped(own)
        self._is_over = True
        return None


class StreamSource(FirstBatchSource):
    """Batches of `make()` from pass `number` on; messages call them `what`, and the header adds `note`."""

    def __init__(
        self,
        make: Callable[[], Iterable[Any]],
        what: str,
        config: DistributedTrainingConfig,
        number: int,
        world: World,
        *,
        once: bool,
        parts: Sequence[Any] = (),
        batch_size: int | None = None,
        note: str = "",
    ) -> None:
        self.batch_size = batch_size
        self._make = make
        self._parts = parts
        # What can be read again restarts with a rank's own random numbers, when it is known to be its own.
        self._seeded_as = world.rank if config.sharded_data and not once else 0
        self._what = what
        self._seed = config.seed
        self.reads_once = once
        self._note = note
        self._begun: Pass | None = self._new_pass(number)
        self._first = self._begun.peek()
        self.is_numpy = self._begun.is_numpy
        self.left_out = self._begun.left_out
        self.target_name = self._begun.target_name

    def _new_pass(self, number: int, saved: Saved | None = None) -> Pass:
        return Pass(self._make, self._parts, self._seed, number, self._seeded_as, saved)

    @override
    def describe(self) -> str:
        return f"batches of {self._what}"

    @override
    def explain(self, world: World) -> str:
        if world.size == 1:
            return self._note
        if self.is_shared:
            return f"{self._note}, the same on all ranks and divided among them"
        return f"{self._note}, each rank's own"

    @override
    def reconcile(self, summaries: Sequence[Mapping[str, Any]], rank: int, *, sharded: bool | None) -> None:
        self._take_form(summaries)
        is_same = all(summary["hash"] == summaries[0]["hash"] for summary in summaries)
        self.is_shared = is_same if sharded is None else not sharded
        self.is_in_slices = self.is_shared
        if sharded is False:
            self._check_sizes([summary["rows"] for summary in summaries])
        if not self.is_shared:
            if sharded is None and rank == 0 and not self.must_be_shared:
                self._warn_of_own_batches()
            self._seed_as(rank)
        self.batch_size = max(summary["rows"] for summary in summaries)
        super().reconcile(summaries, rank, sharded=sharded)

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        """Refuse shared batches of other sizes on some rank: ranks would divide different samples."""
        for rank, size in enumerate(sizes):
            if size != sizes[0]:
                raise ConfigError(
                    f"rank {rank} differs from rank 0 in the batches of its {self._what}: {counted(size, 'sample')} on "
                    f"rank {rank}, {sizes[0]:,} on rank 0, and sharded_data=False says that ranks share them. Give "
                    "every rank the same batches; or set sharded_data=True if each has its own.",
                    rank=rank,
                )

    def _warn_of_own_batches(self) -> None:
        warn(
            f"the first batch of the {self._what} differs between ranks, so each rank trains on all of its own. "
            "Set sharded_data=True if that is right; if all ranks have the same samples, give them in the same order, "
            "drawn from the generators of torch, NumPy or Python."
        )

    def _seed_as(self, rank: int) -> None:
        """Give the data random numbers of a rank's own; what can be read again restarts with them."""
        if self._seeded_as == rank:
            return
        self._seeded_as = rank
        if self._begun is None:
            return
        if self.reads_once:
            self._begun.seed(rank)
        else:
            self._begun.rewind()
            self._begun = self._new_pass(self._begun.number)

    @override
    def feed(self, config: DistributedTrainingConfig, world: World) -> StreamFeed:
        return StreamFeed(self, config, world)

    @override
    def whole_batches(self, batch_size: int, placement: Placement, share: BatchShare) -> Iterator[Batch]:
        """Yield this rank's turns of shared data; otherwise all of its own batches, numbered on this rank."""
        copier = make_copier(placement)
        self.num_evaluated = None

        def own() -> Iterator[tuple[int, Rows]]:
            batches = self.begin_pass(0)
            for number in self._numbers(share):
                rows = batches.read(copier.clone)
                if rows is None:
                    break
                if not self.is_shared or share.has(number):
                    yield number, self.checked(rows)
            self.num_evaluated = batches.num_read

        return on_device(own(), copier, prefetches=not self.reads_once)

    def begin_pass(self, number: int) -> Pass:
        """Return a pass from its beginning; raise ConfigError if the data were read and can be read only once."""
        begun = self._begun
        self._begun = None
        if begun is not None and (begun.number == number or self.reads_once):
            return begun
        if begun is not None:
            begun.rewind()
        if self.reads_once:
            raise ConfigError(
                f"the {self._what} gives its batches only once, and they were read: pass the function that makes it, "
                "without calling it."
            )
        return self._new_pass(number)

    def resumed_pass(self, number: int, saved: Saved, read: Callable[[Pass], object]) -> tuple[Pass | None, str]:
        """Return a pass from a saved state, after `read` has read a step; otherwise None, and why not."""
        first = self._begun
        self._begun = None
        found, problem = resume_from(saved, lambda: self._new_pass(number, saved), read)
        if found is None and first is not None:
            first.rewind()
        return found, problem


class StreamFeed(PassFeed):
    """The batches of a stream."""

    def __init__(self, source: StreamSource, config: DistributedTrainingConfig, world: World) -> None:
        super().__init__(config, world, reads_once=source.reads_once)
        self._source = source
        self.has_own_data = not source.is_shared
        self._check_settings(config)
        self.rows_at_once = source.batch_size or 1
        self._batches_per_step = config.accumulation_steps * self._slices.count
        self.effective_batch_size = self.rows_at_once * self._batches_per_step

    def _check_settings(self, config: DistributedTrainingConfig) -> None:
        if self._reads_once and config.epochs > 1 and not self._ends_early:
            raise ConfigError(
                f"X gives its batches once, and epochs={config.epochs}: pass the function that makes it, without "
                "calling it, as in fit(batches, ...) instead of fit(batches(), ...); or set steps_per_epoch "
                "or max_steps."
            )
        if config.effective_batch_size is not None:
            raise ConfigError(
                "effective_batch_size is set, and X gives batches one after the other: leave it out. For an "
                "IterableDataset, batch_size sets the samples of a batch per rank."
            )
        if config.drop_last:
            raise ConfigError(
                "drop_last is set, and the number of samples of X is unknown: let X leave out its last batch, as "
                "DataLoader(dataset, batch_size=64, drop_last=True) does."
            )

    @property
    @override
    def micro_batches(self) -> int:
        return -(-self._batches_per_step // self._slices.count) * len(self._slices.owned)

    @override
    def set_step_size(self, effective_batch_size: int) -> None:
        """Continue with as many batches per step as before; with own data, each rank with as many as the others."""
        self._batches_per_step = max(1, effective_batch_size // self.rows_at_once)
        if not self._source.is_shared:
            self._batches_per_step = max(1, self._batches_per_step // self._world.size) * self._world.size
        self.effective_batch_size = self.rows_at_once * self._batches_per_step

    @property
    @override
    def position(self) -> tuple[int, int, int]:
        own = 0 if self._source.is_shared else _OWN
        return (*self._next, own)

    @override
    def check_world(self, world_size: int, place: Place) -> None:
        own = place.order == _OWN or not self._source.is_shared
        if place.batches and own and world_size != self._world.size:
            raise ConfigError(
                f"the checkpoint was made by {counted(world_size, 'rank')} in the middle of each rank's own data, and "
                f"there are {self._world.size} now: use the same number of ranks, or a checkpoint from the end of the "
                "data."
            )

    @override
    def _read(self, copier: DeviceCopier) -> StreamStep:
        slices = self._slices
        try:
            found = self._take_step(self._current_pass(), copier.clone)
        except DataInterruptedError:
            return StreamStep({}, INTERRUPTED)
        if not self._source.is_shared:
            # A rank whose own batches have ended still counts them, so that the position is equal on all ranks.
            return StreamStep({slices.owned.start: self._checked(found)}, len(found))
        num_read = sum(rows is not None for rows in found)
        return StreamStep({number: self._checked(found[number :: slices.count]) for number in slices.owned}, num_read)

    def _checked(self, found: Sequence[Rows | None]) -> list[Rows]:
        return [self._source.checked(rows) for rows in found if rows is not None]

    def _take_step(self, begun: Pass, own: Callable[[Tensor], Tensor] = torch.clone) -> list[Rows | None]:
        """Return the batches of a step, None for each after the last one."""
        count = self._batches_per_step if self._source.is_shared else self.micro_batches
        return begun.marking(lambda: [begun.read(own) for _ in range(count)])

    @override
    def _begin(self, number: int, num_read: int) -> Pass:
        problem = ""
        rank = 0 if self._source.is_shared else self._world.rank
        saved = self._saved_at((number, num_read), slice(rank, rank + 1))
        if saved and not self._reads_once:
            resumed, problem = self._source.resumed_pass(number, saved[0], self._take_step)
            if resumed is not None:
                resumed.num_read = num_read
                return resumed
        began = time.perf_counter()
        begun = self._source.begin_pass(number)
        for _ in range(num_read):
            if begun.read() is None and self._source.is_shared:
                raise ConfigError(
                    f"X has given {begun.num_read:,} batches, and the checkpoint was made after {num_read:,}: the "
                    "data have changed since."
                )
        self._warn_of_reading(problem, began)
        return begun
