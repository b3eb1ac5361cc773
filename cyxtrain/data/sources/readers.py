"""Data in parts: readers give the samples of each step in turn, whatever the number of ranks.

Sample i of a step comes from reader i mod R, of R readers. Rank r of N has the readers r, r + N, r + 2N, ..., so each
sample is read by one rank. A reader that has ended gives none, and the others continue as before: the position of every
reader follows from the number of steps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate
from typing_extensions import override

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, BatchShare, StreamStep, on_device
from cyxtrain.data.batches.collate import as_batch, left_out, target_name
from cyxtrain.data.batches.prefetch import DeviceCopier, Placement, make_copier
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.feed import DataInterruptedError
from cyxtrain.data.rng import set_epoch_of
from cyxtrain.data.sharding import micro_batches_of
from cyxtrain.data.sources.parts import Parts
from cyxtrain.data.sources.passes import INTERRUPTED, FirstBatchSource, PassFeed
from cyxtrain.data.sources.seeded import Saved, SeededIterator, resume_from
from cyxtrain.errors import ConfigError, counted
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

_MISSING = object()
_SKIPPED_AT_ONCE = 64


def samples_from(reader: int, readers: int, step_size: int) -> int:
    """Return how many of a step's samples come from a reader."""
    return len(range(reader, step_size, readers))


def in_turn(samples: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the samples of several readers in turn; a reader that has no more is left out."""
    rounds = itertools.zip_longest(*samples, fillvalue=_MISSING)
    return [sample for each in rounds for sample in each if sample is not _MISSING]


def collated(samples: Sequence[Any]) -> Rows:
    """Return samples as a batch, which shares no memory with them."""
    with warnings.catch_warnings():
        # Of columns of Arrow: nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return as_batch(default_collate(list(samples)))


def readers_of_training(readers: int, slices: Slices) -> list[int]:
    """Return the readers of a rank in a fit: neighboring ones are on different ranks, so that steps are even."""
    return [reader for reader in range(readers) if reader % slices.count in slices.owned]


def readers_of_evaluation(readers: int, slices: Slices) -> list[int]:
    """Return the readers of a rank in an evaluation: neighboring ones, so that ranks keep the order of the data."""
    owned = slices.owned
    return list(range(readers * owned.start // slices.count, readers * owned.stop // slices.count))


class Reader(SeededIterator):
    """The samples of one reader in a pass."""

    def __init__(
        self, parts: Parts, reader: int, readers: int, seed: int, number: int, saved: Saved | None = None
    ) -> None:
        def begin() -> Iterable[Any]:
            samples = parts.read(reader, readers)
            if not isinstance(samples, Iterable):
                raise ConfigError(
                    f"X is the function {parts.what}, which returned a {type(samples).__name__}: it must return an "
                    "iterable of samples, such as a generator."
                )
            set_epoch_of(samples, number)
            return samples

        super().__init__(begin, [parts.read], seed, number, reader, saved)

    @override
    def _rows(self, read: Sequence[Any]) -> Iterable[Rows]:
        return [collated(read)] if read else []

    def take_step(self, count: int) -> list[Any]:
        """Return the next samples of a step; as `take`."""
        return self.marking(lambda: self.take(count))

    def take(self, count: int) -> list[Any]:
        """Return the next samples; fewer, or none, at the end."""
        found = self._ahead[:count]
        del self._ahead[:count]
        missing = count - len(found)
        if missing and not self._is_over:
            with self.drawing():
                read = [*itertools.islice(self._items, missing)]
            self._is_over = len(read) < missing
            found += read
        return found

    def peek(self, count: int) -> list[Any]:
        """Return the next samples, which stay the next ones."""
        self._ahead = self.take(count) + self._ahead
        return self._ahead[:count]

    def skip(self, count: int) -> None:
        """Read samples that a fit has used before it was interrupted."""
        while read := self.take(min(count, _SKIPPED_AT_ONCE)):
            count -= len(read)


class RankReaders:
    """The readers of a rank, of so many in all, in a pass."""

    def __init__(self, parts: Parts, owned: Sequence[int], readers: int, seed: int, number: int) -> None:
        self.number = number
        self._readers = readers
        self._new = functools.partial(Reader, parts, readers=readers, seed=seed, number=number)
        self._owned: dict[int, Reader] = {reader: self._new(reader) for reader in owned}

    def take_step(self, step_size: int, slices: Slices) -> dict[int, list[Any]]:
        """Return the samples of each slice of this rank in the next step, which has so many over all ranks."""
        taken = {reader: each.take_step(self._share(reader, step_size)) for reader, each in self._owned.items()}
        return {
            number: in_turn([samples for reader, samples in taken.items() if reader % slices.count == number])
            for number in slices.owned
        }

    def resume(self, steps: int, step_size: int, saved: Mapping[int, Any]) -> str:
        """Continue after steps that were trained before: from the `saved` states of readers, or reading them again.

        Returns why a saved state does not fit; "": all do.
        """
        problem = ""
        for reader, each in self._owned.items():
            share = self._share(reader, step_size)
            state = saved.get(reader)
            found = None
            if state is not None:
                make = functools.partial(self._new, reader, saved=state)
                found, why = resume_from(state, make, operator.methodcaller("take_step", share))
                problem = problem or why
            if found is None:
                each.skip(steps * share)
            self._owned[reader] = found or each
        return problem

    def saved(self, ahead: int) -> dict[int, Any]:
        """Return the state of each reader; as `SeededIterator.saved`."""
        return {reader: each.saved(ahead) for reader, each in self._owned.items()}

    def peek(self, count: int) -> list[Any]:
        """Return up to that many of the first samples, which stay the next ones."""
        of_each = -(-count // max(len(self._owned), 1))
        return in_turn([each.peek(of_each) for each in self._owned.values()])[:count]

    def batches(self, size: int, readers: Iterable[int]) -> Iterator[list[Any]]:
        """Yield the samples of one reader after the other, that many at once."""
        for reader in readers:
            while samples := self._owned[reader].take(size):
                yield samples

    def _share(self, reader: int, step_size: int) -> int:
        return samples_from(reader, self._readers, step_size)


class ReaderSource(FirstBatchSource):
    """Samples that readers read, from pass `number` on."""

    is_shared = False

    def __init__(
        self, parts: Parts, config: DistributedTrainingConfig, number: int, world: World, *, trains: bool
    ) -> None:
        self._parts = parts
        self._what = parts.what
        self._seed = config.seed
        slices = Slices.of(world, config.virtual_ranks)
        self._slices = slices
        self.readers = config.readers or slices.count
        if trains:
            parts.check(self.readers, slices.count)
            self._owned = readers_of_training(self.readers, slices)
        else:
            # Each sample once needs no certain number of readers.
            if parts.number is not None:
                self.readers = max(1, min(self.readers, parts.number))
            self._owned = readers_of_evaluation(self.readers, slices)
        self._first: Rows | None = None
        self._begun: RankReaders | None = self._new_pass(number)
        wanted = config.batch_size
        if trains and config.effective_batch_size is not None:
            wanted = -(-config.effective_batch_size // slices.count)
        samples = self._begun.peek(wanted)
        if samples:
            self._first = collated(samples)
            self.left_out = left_out(samples[0])
            self.target_name = target_name(samples[0])

    def _new_pass(self, number: int) -> RankReaders:
        return RankReaders(self._parts, self._owned, self.readers, self._seed, number)

    @override
    def describe(self) -> str:
        return f"{counted(self.readers, 'reader')} of {self._what}"

    @override
    def explain(self, world: World) -> str:
        if world.size == 1:
            return ""
        least, rest = divmod(self.readers, world.size)
        if rest:
            return f", {least} or {least + 1} on each rank"
        return f", {least} on each rank"

    @override
    def summary(self) -> dict[str, Any]:
        return super().summary() | {"kind": self.describe()}

    @override
    def reconcile(self, summaries: Sequence[Mapping[str, Any]], rank: int, *, sharded: bool | None) -> None:
        self._take_form(summaries)
        super().reconcile(summaries, rank, sharded=sharded)

    @override
    def facts(self, name: str) -> dict[str, Any]:
        return super().facts(name) | {f"the parts of the {name} data": self._parts.digest}

    @override
    def feed(self, config: DistributedTrainingConfig, world: World) -> ReaderFeed:
        return ReaderFeed(self, config, world)

    @override
    def whole_batches(self, batch_size: int, placement: Placement, share: BatchShare) -> Iterator[Batch]:
        """Yield the batches of this rank's readers, numbered on this rank; with virtual ranks, as `is_in_slices`."""

        def own() -> Iterator[tuple[int, Rows]]:
            begun = self.begin_pass(0)
            for number in self._slices.owned:
                of_slice = dataclasses.replace(self._slices, owned=range(number, number + 1))
                batches = begun.batches(batch_size, readers_of_evaluation(self.readers, of_slice))
                places = self._numbers(share._replace(slices=of_slice))
                for place, samples in zip(places, batches, strict=False):
                    if of_slice.is_virtual:
                        place = place * of_slice.count + number
                    yield place, self.checked(collated(samples))

        return on_device(own(), make_copier(placement))

    def begin_pass(self, number: int) -> RankReaders:
        """Return a pass from its beginning."""
        begun = self._begun
        self._begun = None
        if begun is not None and begun.number == number:
            return begun
        return self._new_pass(number)


class ReaderFeed(PassFeed):
    """Steps of as many samples on any number of ranks, until readers end; the position counts steps."""

    def __init__(self, source: ReaderSource, config: DistributedTrainingConfig, world: World) -> None:
        super().__init__(config, world, reads_once=False)
        self._source = source
        self._accumulation_steps = config.accumulation_steps
        if config.drop_last:
            raise ConfigError(
                "drop_last is set, and the number of samples of X is unknown: leave it out, or let the readers leave "
                "samples out."
            )
        of_slice = config.batch_size * config.accumulation_steps
        self.set_step_size(config.effective_batch_size or of_slice * self._slices.count)

    @property
    @override
    def micro_batches(self) -> int:
        return self._accumulation_steps * len(self._slices.owned)

    @override
    def set_step_size(self, effective_batch_size: int) -> None:
        readers = self._source.readers
        if effective_batch_size < readers:
            raise ConfigError(
                f"readers={readers}, and a step has {counted(effective_batch_size, 'sample')} over all ranks: some "
                f"readers would never be read. Set fewer readers, or effective_batch_size={readers} or more."
            )
        self.effective_batch_size = effective_batch_size
        # Of slice 0, which has the most.
        rows = sum(
            samples_from(reader, readers, effective_batch_size) for reader in range(0, readers, self._slices.count)
        )
        self.rows_at_once = -(-rows // self._accumulation_steps)

    @override
    def _begin(self, number: int, num_read: int) -> RankReaders:
        began = time.perf_counter()
        begun = self._source.begin_pass(number)
        saved: dict[int, Any] = {}
        for each in self._saved_at((number, num_read), slice(None)):
            saved |= each
        problem = begun.resume(num_read, self.effective_batch_size, saved)
        self._warn_of_reading(problem, began)
        return begun

    @override
    def _read(self, copier: DeviceCopier) -> StreamStep:
        try:
            samples = self._current_pass().take_step(self.effective_batch_size, self._slices)
        except DataInterruptedError:
            return StreamStep({}, INTERRUPTED)
        # A step counts as one batch, also on a rank whose readers have ended.
        return StreamStep({number: self._micro_batches(of_slice) for number, of_slice in samples.items()}, 1)

    def _micro_batches(self, samples: Sequence[Any]) -> list[Rows]:
        pieces = micro_batches_of(range(len(samples)), self.rows_at_once)
        return [self._source.checked(collated(samples[piece.start : piece.stop])) for piece in pieces]
