"""Data that give batches one after the other: iterable data sets, generators, whatever can be gone through.

Where all ranks go through the same, each batch is dealt to one of them; where each has its own, each takes all of its
own. Nobody knows beforehand how many there are: with each step the ranks add up how many rows they have, and the one
that has none any more takes part with nothing, until nobody has any.

What the data draw from the generators of torch, NumPy and Python depends on seed and pass alone, and nothing else
draws from them meanwhile: so the same batches come again where a fit goes on, and are skipped.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, Share, placed
from cyxtrain.data.batches.prefetch import DeviceCopier, Early, Placement, make_copier
from cyxtrain.data.batches.rows import Rows, sampled_hash
from cyxtrain.data.batches.specs import dtypes_of, example_of, form_of
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.feed import Feed, Place
from cyxtrain.data.sources.passes import Pass
from cyxtrain.data.sources.source import FetchedSource
from cyxtrain.errors import ConfigError, counted, on_all_ranks, warn
from cyxtrain.world import runtime

_OWN = 1
"""`Place.order` where each rank has data of its own."""


class StreamSource(FetchedSource):
    """Batches, one after the other.

    Args:
        make: Begins to give them.
        what: They come from, in a word or two.
        config: Of the fit.
        number: Of the pass that is begun with.
        once: Whether they come but once.
        parts: Of the data, as `Pass`.
        batch_size: Rows of a batch, where somebody has said it; None: as many as the first one has.

    Attributes:
        note: How its rows come about, for people; "": as everybody would think.
        is_dealt: Whether all ranks go through the same batches, and each takes its share; known once they have met.

    Raises:
        ConfigError: The first is no batch.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        what: str,
        config: DistributedTrainingConfig,
        number: int,
        *,
        once: bool,
        parts: Sequence[Any] = (),
        batch_size: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self._make = make
        self._parts = parts
        # What can be gone through again begins anew with a rank's own random numbers, when it is known to be its own.
        self._rank = runtime.get_rank() if config.sharded_data and not once else 0
        self._what = what
        self._seed = config.seed
        self.reads_once = once
        self.note = ""
        self.is_dealt = True
        self._begun: Pass | None = self._pass(number)
        self._first = self._begun.look()
        self.is_numpy, self.left_out = self._begun.is_numpy, self._begun.left_out

    def _pass(self, number: int) -> Pass:
        return Pass(self._make, self._parts, self._seed, number, self._rank)

    def describe(self) -> str:
        """As `Source`."""
        return f"batches of {self._what}"

    def explain(self) -> str:
        """As `Source`."""
        if runtime.get_world_size() == 1:
            return self.note
        return self.note + (", the same on all ranks and dealt to them" if self.is_dealt else ", each rank's own")

    def opening(self) -> dict[str, Any]:
        """Returns form and hash of the first batch."""
        if self._first is None:
            return {"kind": "batches", "form": None, "hash": None, "rows": 0, "numpy": False}
        values = [sampled_hash(tensor) for tensor in self._first.tensors()]
        form = [form_of(part) for part in self._first]
        rows = num_rows(self._first.inputs)
        return {"kind": "batches", "form": form, "hash": values, "rows": rows, "numpy": self.is_numpy}

    def meet(self, openings: Sequence[Mapping[str, Any]], rank: int, *, sharded: bool | None) -> None:
        """As `Source`: a rank that has nothing learns what the others' batches look like."""
        forms = {rank: opening["form"] for rank, opening in enumerate(openings) if opening["form"] is not None}
        if not forms:
            raise ConfigError(f"the {self._what} gives no batch: there is nothing to do.")
        known, form = next(iter(forms.items()))
        for other, others in forms.items():
            if dtypes_of(others) != dtypes_of(form):
                raise ConfigError(
                    f"rank {other} differs from rank {known} in the first batch of its {self._what}: "
                    f"{dtypes_of(others)} on rank {other}, {dtypes_of(form)} on rank {known}. They must have the "
                    "same parts, of the same types.",
                    rank=other,
                )
        self.is_dealt = not sharded if sharded is not None else all(o["hash"] == openings[0]["hash"] for o in openings)
        if sharded is None and not self.is_dealt and rank == 0:
            warn(
                f"the ranks' {self._what} begins with other batches on each, so it is taken for each rank's own part "
                "of the data. Say sharded_data=True if that is right; if all ranks have the same rows, give them in "
                "the same order, drawn from the generators of torch, NumPy or Python."
            )
        if not self.is_dealt and self._rank != rank:
            self._take_own(rank)
        self.example = Rows(*map(example_of, form)) if self._first is None else self._first
        self.batch_size = self.batch_size or max(opening["rows"] for opening in openings)
        self.is_numpy = any(opening["numpy"] for opening in openings)
        super().meet(openings, rank, sharded=sharded)

    def _take_own(self, rank: int) -> None:
        """Give this rank's data random numbers of their own, whether they were said or found to be its own."""
        self._rank, begun = rank, self._begun
        if begun is not None and self.reads_once:
            begun.seed(rank)
        elif begun is not None:
            self._begun = self._pass(begun.number)

    def facts(self, name: str) -> dict[str, Any]:
        """Returns what its batches consist of."""
        return {f"the {name} data": dtypes_of([form_of(part) for part in self.example])}

    def feed(self, config: DistributedTrainingConfig, rank: int, world_size: int) -> StreamFeed:
        """As `Source`.

        Raises:
            ConfigError: They come but once, and are wanted several times.
        """
        return StreamFeed(self, config, rank, world_size)

    def whole_batches(self, batch_size: int, placement: Placement, rank: int, world_size: int) -> Iterator[Batch]:
        """As `Source`: each world_size-th batch where they are dealt, else all. Numbers are all 0."""
        mover = make_copier(placement)

        def own() -> Iterator[tuple[int, Rows]]:
            batches = self.begin(0)
            for number in itertools.count() if self._limit is None else range(self._limit):
                rows = batches.take(mover.own)
                if rows is None:
                    return
                if not self.is_dealt or number % world_size == rank:
                    yield 0, self.weighed(rows)

        return placed(own(), mover, ahead=not self.reads_once)

    def table_rows(self, batch_size: int) -> int:
        """Returns 1: nobody knows how many batches there are."""
        return 1

    def in_order(self, batches: Sequence[Sequence[int]]) -> Tensor | None:
        """As `Source`: dealt batches come in turn; each rank's own stay together."""
        if not self.is_dealt or len(batches) == 1:
            return None
        starts, first = {}, 0
        for number, rank in itertools.product(range(max(map(len, batches))), range(len(batches))):
            if number < len(batches[rank]):
                starts[rank, number] = first
                first += batches[rank][number]
        places = [
            torch.arange(starts[rank, number], starts[rank, number] + rows, device="cpu")
            for rank, own in enumerate(batches)
            for number, rows in enumerate(own)
        ]
        return torch.cat(places)

    def begin(self, number: int) -> Pass:
        """Returns the data at the beginning of a pass.

        Raises:
            ConfigError: They come but once, and have been gone through.
        """
        begun, self._begun = self._begun, None
        if begun is not None and (begun.number == number or self.reads_once):
            return begun
        if self.reads_once:
            raise ConfigError(
                f"the {self._what} gives its batches once, and they are over: give the function that makes it, without "
                "calling it."
            )
        return self._pass(number)


class StreamFeed(Feed):
    """Batches, as they come.

    Args:
        source: They come from.
        config: Of the fit.
        rank: This one.
        world_size: How many there are.
    """

    def __init__(self, source: StreamSource, config: DistributedTrainingConfig, rank: int, world_size: int) -> None:
        if source.reads_once and config.epochs > 1 and config.steps_per_epoch is None and not config.fast_dev_run:
            raise ConfigError(
                f"X gives its batches once, and epochs={config.epochs}: give the function that makes it, without "
                "calling it, as in fit(batches, ...) instead of fit(batches(), ...); or say steps_per_epoch."
            )
        if config.effective_batch_size is not None:
            raise ConfigError(
                "effective_batch_size is set, and X gives batches one after the other: leave it out. The rows of an "
                "IterableDataset are put together as batch_size says, per rank."
            )
        if config.drop_last:
            raise ConfigError(
                "drop_last is set, and nobody knows how many rows X gives: let it leave out its last batch, as "
                "DataLoader(dataset, batch_size=64, drop_last=True) does."
            )
        self._source = source
        self._rank, self._world_size = rank, world_size
        self._endless = config.steps_per_epoch is not None
        self.rows_at_once = source.batch_size or 1
        self._batches_per_step = config.accumulation_steps * world_size
        self.effective_batch_size = self.rows_at_once * self._batches_per_step
        self._pass: Pass | None = None
        self._next = (0, 0)
        self._gave = False
        self._seconds = 0.0

    @property
    def micro_batches(self) -> int:
        """As `Feed`."""
        return -(-self._batches_per_step // self._world_size)

    def resume_from(self, effective_batch_size: int) -> None:
        """As `Feed`: with as many batches per step as before, where they are dealt; else each rank takes its own."""
        if self._source.is_dealt:
            self._batches_per_step = max(1, effective_batch_size // self.rows_at_once)
            self.effective_batch_size = self.rows_at_once * self._batches_per_step

    @property
    def steps_per_epoch(self) -> None:
        """As `Feed`: nobody knows."""
        return

    def rows_of(self, steps: int | None) -> None:
        """As `Feed`: nobody knows."""
        return

    @property
    def read(self) -> tuple[int, int, int]:
        """As `Feed`."""
        return (*self._next, 0 if self._source.is_dealt else _OWN)

    def seconds_communicated(self) -> float:
        """As `Feed`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def check_world(self, world_size: int, place: Place) -> None:
        """As `Feed`."""
        own = place.order == _OWN or not self._source.is_dealt
        if place.batches and own and world_size != self._world_size:
            raise ConfigError(
                f"the checkpoint was made by {counted(world_size, 'rank')} in the middle of what each gives itself, "
                f"and there are {self._world_size} now: take as many, or a checkpoint from where the data were over."
            )

    def shares(self, place: Place, placement: Placement, end: int | None) -> Iterator[Share]:
        """As `Feed`; one sum over ranks per step.

        With `steps_per_epoch` an epoch goes on where the one before it ended, and begins anew when the data are over.
        """
        if self._pass is None and self._next == (0, 0):
            self._next = (place.passes, place.batches)
            self._gave = place.batches > 0
        number, mover, ahead = place.steps, make_copier(placement), not self._source.reads_once
        take = functools.partial(self._take, mover)
        share = StreamShare(number, take, mover)
        while end is None or number < end:
            rows, (passes, batches) = share.rows, self._next
            self._next = (passes, batches + share.read)
            began = time.perf_counter()
            share.joined_rows = _sum_over_ranks(rows)
            self._seconds += time.perf_counter() - began
            if share.joined_rows:
                self._gave = True
                number += 1
                following = StreamShare(number, take, mover)
                share.next = following if ahead and number != end else None
                yield share
                share.next, share = None, following
                continue
            share = StreamShare(number, take, mover)
            nothing, self._gave = not self._gave, False
            self._pass, self._next = None, (self._next[0] + 1, 0)
            if self._source.reads_once and (self._endless or not number):
                self.is_over = True
                self._say_over(place, number)
                return
            if nothing and not number:
                raise on_all_ranks(ConfigError(f"epoch {place.epoch + 1} has no batch: X gives none."))
            if not self._endless or nothing:
                return

    def _say_over(self, place: Place, steps: int) -> None:
        if runtime.is_master():
            where = f"after {counted(steps, 'step')} of epoch {place.epoch + 1}"
            warn(f"X is over {where}: it gives its batches once. The fit ends here.")

    def _take(self, mover: DeviceCopier) -> tuple[list[Rows], int]:
        """Returns this rank's batches of the next step, and how many batches have been read for it."""
        batches = self._go_on()
        if self._source.is_dealt:
            found = [batches.take(mover.own) for _ in range(self._batches_per_step)]
            read = sum(each is not None for each in found)
            found = found[self._rank :: self._world_size]
        else:
            found = [batches.take(mover.own) for _ in range(self.micro_batches)]
            read = self.micro_batches
        return [self._source.weighed(rows) for rows in found if rows is not None], read

    def _go_on(self) -> Pass:
        """Returns the data where they are; where a fit begins or goes on, after what it has seen before."""
        if self._pass is None:
            self._pass = self._source.begin(self._next[0])
            for _ in range(self._next[1]):
                if self._pass.take() is None and self._source.is_dealt:
                    raise ConfigError(
                        f"X has given {self._pass.taken:,} batches, and the fit had seen {self._next[1]:,} when "
                        "its checkpoint was made: the data are others."
                    )
        return self._pass


def _sum_over_ranks(count: int) -> int:
    joined = torch.tensor([count], dtype=torch.int64, device="cpu")
    dist.all_reduce(joined, group=runtime.cpu_group())
    return int(joined)


class StreamShare(Share):
    """Batches of a step; how many rows the other ranks have is known later.

    Args:
        number: As `Share`.
        take: Returns this rank's batches, and how many have been read for them; called once, when they are needed.
        mover: As `Share`.
    """

    def __init__(self, number: int, take: Callable[[], tuple[list[Rows], int]], mover: DeviceCopier) -> None:
        super().__init__(number, 0, mover)
        self._take = take
        self._taken: Early[tuple[list[Rows], int]] | None = None

    def _get(self) -> tuple[list[Rows], int]:
        if self._taken is None:
            self._taken = Early(self._take)
        return self._taken.get()

    @property
    def read(self) -> int:
        """How many batches of the data, over all ranks that share them, have been read for this step."""
        return self._get()[1]

    @property
    def rows(self) -> int:
        """As `Share`."""
        return sum(num_rows(rows.inputs) for rows in self._get()[0])

    def __len__(self) -> int:
        return len(self._get()[0])

    def fetch(self, index: int) -> Rows:
        """As `Share`."""
        return self._get()[0][index]

    def names(self, rows: Sequence[int]) -> list[str]:
        """Returns the numbers of rows in what the rank has of this step."""
        return [f"{row} of the rank's in this step" for row in rows]
