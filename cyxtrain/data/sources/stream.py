"""Data that give batches one after the other: iterable datasets, generators, iterables.

If all ranks read the same batches, each batch belongs to one of them; if each rank has its own, it uses all of them.
How many there are is unknown beforehand: in each step the ranks add up their rows, and a rank that has run out takes
part without any, until none has samples.

What the data draw from the generators of torch, NumPy and Python depends on seed and pass alone, and nothing else draws
from them meanwhile: the same batches come again when a fit resumes, and are skipped.
"""

from __future__ import annotations

import functools
import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, BatchShare, Share, StreamShare, on_device
from cyxtrain.data.batches.collate import as_batch, left_out, target_name
from cyxtrain.data.batches.prefetch import DeviceCopier, Placement, make_copier
from cyxtrain.data.batches.rows import Rows, holds_tensors, sampled_hash
from cyxtrain.data.batches.structure import dtypes_of, example_of, form_of, num_rows
from cyxtrain.data.feed import DataInterruptedError, Feed, Place
from cyxtrain.data.sources.seeded import Saved, SeededIterator, resume_from
from cyxtrain.data.sources.source import Source
from cyxtrain.errors import ConfigError, counted, on_all_ranks, warn
from cyxtrain.world.world import World

INTERRUPTED = -(1 << 40)  # read by a rank whose data cannot continue: below zero, whatever the others have
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


def check_ends(world: World, num_read: int | None) -> None:
    """Refuse shared batches that end at another number on some rank, which has read `num_read`. All ranks call it.

    None: this rank has stopped before their end. Cost: a small gather.
    """
    sent = world.gather("" if num_read is None else str(num_read))
    counts = {rank: int(count) for rank, count in enumerate(sent) if count}
    if len(set(counts.values())) <= 1:
        return
    fewest = min(counts, key=counts.__getitem__)
    most = max(counts, key=counts.__getitem__)
    raise on_all_ranks(
        ConfigError(
            f"the ranks share their batches, which end after {counts[fewest]:,} on rank {fewest}, and rank {most} has "
            f"{counts[most]:,}: samples would be lost. Give every rank the same batches; or set sharded_data=True if "
            "each has its own.",
            rank=fewest,
        )
    )


class FirstBatchSource(Source):
    """Data of which only the first batch is known before they are read; messages call them `_what`."""

    _what: str
    _first: Rows | None  # the first batch on this rank, if it has one

    @override
    def summary(self) -> dict[str, Any]:
        if self._first is None:
            return {"kind": "batches", "form": None, "hash": None, "rows": 0, "numpy": False, "y": None}
        values = [sampled_hash(tensor) for tensor in self._first.tensors()]
        form = [form_of(part) for part in self._first]
        rows = self.batch_size or num_rows(self._first.inputs)
        own = {"rows": rows, "numpy": self.is_numpy, "y": self.target_name, "steps": self._limit}
        return {"kind": "batches", "form": form, "hash": values, **own}

    def _take_form(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Adapt to the first batch of any rank; raise ConfigError unless all ranks' batches are alike."""
        ranks = [rank for rank, summary in enumerate(summaries) if summary["form"] is not None]
        if not ranks:
            raise ConfigError(f"the {self._what} gives no batch: there is nothing to do.")
        first = summaries[ranks[0]]
        expected = dtypes_of(first["form"])
        for rank in ranks:
            found = dtypes_of(summaries[rank]["form"])
            if found != expected:
                raise ConfigError(
                    f"rank {rank} differs from rank {ranks[0]} in the first batch of its {self._what}: {found} on rank "
                    f"{rank}, {expected} on rank {ranks[0]}. They must have the same parts, of the same types.",
                    rank=rank,
                )
        self.target_name = first["y"]
        # A rank without a batch makes an empty one of the same form.
        self.example = self._first or Rows(*map(example_of, first["form"]))
        self.is_numpy = any(summary["numpy"] for summary in summaries)

    @override
    def facts(self, name: str) -> dict[str, Any]:
        return {f"the {name} data": dtypes_of([form_of(part) for part in self.example])}

    def _numbers(self, share: BatchShare) -> Iterable[int]:
        """Return the numbers of the batches that an evaluation reads on this rank: all, or up to a limit."""
        if self._limit is None:
            return itertools.count()
        if self.is_shared:
            return range(self._limit)
        # The limit is over all ranks, each of which reads its own batches.
        owned = range(share.slices.owned.start, self._limit, share.slices.count)
        return range(len(owned))

    @override
    def num_batches(self, batch_size: int) -> int | None:
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
        if sharded is False:
            self._check_sizes([summary["rows"] for summary in summaries])
        if not self.is_shared:
            if sharded is None and rank == 0:
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


class PassFeed(Feed):
    """Data without a known end, in passes that continue over epochs as in a `RowFeed`."""

    has_rank_states = True

    def __init__(self, config: DistributedTrainingConfig, world: World, *, reads_once: bool) -> None:
        self._world = world
        self._reads_once = reads_once
        self._endless = config.steps_per_epoch is not None
        ends_by_steps = config.max_steps is not None and config.epochs >= config.max_steps
        self._ends_once = reads_once and (self._endless or ends_by_steps)
        self._ends_early = self._endless or ends_by_steps or bool(config.fast_dev_run)
        self._pass: Any = None
        self._next = (0, 0)  # the pass, and how many of its batches were read
        self._is_empty = True  # whether the pass has given no samples so far
        self._seconds = 0.0
        self._saved: Sequence[Mapping[str, Any]] = ()  # what each rank has kept in the checkpoint
        self._ahead = 0  # steps that were read, and not taken

    @override
    def rank_state(self) -> dict[str, Any]:
        data = None
        if self._pass is not None:
            data = self._pass.saved(self._ahead)
        return {"place": self._next, "data": data}

    @override
    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._saved = states

    def _saved_at(self, place: tuple[int, int], ranks: slice) -> list[Any]:
        """Return what some ranks of the checkpoint have saved at a place; nothing of ranks that have not."""
        return [each["data"] for each in self._saved[ranks] if each.get("place") == place and each["data"]]

    def _warn_of_reading(self, problem: str, began: float) -> None:
        if problem and self._world.is_first:
            seconds = time.perf_counter() - began
            warn(
                f"X cannot continue from its state in the checkpoint ({problem}), so what was read before it was read "
                f"again, in {seconds:.1f} s."
            )

    @abstractmethod
    def _begin(self, number: int, num_read: int) -> Any:
        """Begin a pass; when a fit resumes, after what was read of it before."""

    @abstractmethod
    def _read(self, copier: DeviceCopier) -> tuple[list[Rows], int]:
        """Return this rank's micro-batches of the next step, and how many batches the step counts for."""

    def _read_ahead(self, copier: DeviceCopier) -> tuple[list[Rows], int]:
        self._ahead += 1
        return self._read(copier)

    def _current_pass(self) -> Any:
        if self._pass is None:
            self._pass = self._begin(*self._next)
        return self._pass

    @property
    @override
    def position(self) -> tuple[int, int, int]:
        return (*self._next, 0)

    @override
    def seconds_communicated(self) -> float:
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    @override
    def shares(self, place: Place, placement: Placement, end: int | None) -> Generator[Share]:
        """Yield the shares, at the cost of one all_reduce per step."""
        if self._pass is None and self._next == (0, 0):  # the fit begins, or resumes
            self._next = place.passes, place.batches
            self._is_empty = place.batches == 0
        copier = make_copier(placement)
        read = functools.partial(self._read_ahead, copier)
        share = StreamShare(place.steps, read, copier)
        while end is None or share.number < end:
            if self._has_rows(share):
                following = StreamShare(share.number + 1, read, copier)
                if not self._reads_once and following.number != end:
                    share.next = following
                yield share
                share.next = None  # a share that is kept must not keep all that follow
                share = following
            elif self._restarts(place.epoch, share.number):
                share = StreamShare(share.number, read, copier)
            else:
                return

    def _has_rows(self, share: StreamShare) -> bool:
        """Read the batches of a step; return whether any rank has samples for it. All ranks call it."""
        read = share.batches_read
        self._ahead -= 1
        began = time.perf_counter()
        counted_read = max(read, 0)
        own = [share.rows + min(read, 0), counted_read, counted_read**2]
        rows, sum_read, sum_of_squares = self._world.reduce(torch.tensor(own, dtype=torch.int64, device="cpu")).tolist()
        self._seconds += time.perf_counter() - began
        if rows < 0:
            raise DataInterruptedError
        # Equal exactly if all ranks have read as many (Cauchy-Schwarz): so all of them notice.
        if sum_of_squares * self._world.size != sum_read**2:
            check_ends(self._world, self._next[1] + read)
        self._next = self._next[0], self._next[1] + read
        share.global_rows = rows
        self._is_empty = self._is_empty and not share.global_rows
        return share.global_rows > 0

    def _restarts(self, epoch: int, steps: int) -> bool:
        """End the pass; return whether the epoch, after `steps` steps, continues with the next one."""
        was_empty = self._is_empty
        self._is_empty = True
        self._pass = None
        self._next = (self._next[0] + 1, 0)
        if self._ends_once or (self._reads_once and not steps):
            self.is_over = True
            if self._world.is_first:
                where = f"after {counted(steps, 'step')} of epoch {epoch + 1}"
                warn(f"X ended {where}: it gives its batches once. Training stops here.")
            return False
        if was_empty and not steps:
            raise on_all_ranks(ConfigError(f"epoch {epoch + 1} has no batch: X gives none."))
        return self._endless and not was_empty


class StreamFeed(PassFeed):
    """The batches of a stream."""

    def __init__(self, source: StreamSource, config: DistributedTrainingConfig, world: World) -> None:
        super().__init__(config, world, reads_once=source.reads_once)
        self._source = source
        self._check_settings(config)
        self.rows_at_once = source.batch_size or 1
        self._batches_per_step = config.accumulation_steps * world.size
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
        return -(-self._batches_per_step // self._world.size)

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
    def _read(self, copier: DeviceCopier) -> tuple[list[Rows], int]:
        is_shared = self._source.is_shared
        try:
            found = self._take_step(self._current_pass(), copier.clone)
        except DataInterruptedError:
            return [], INTERRUPTED
        # A rank whose own batches have ended still counts them, so that the position is equal on all ranks.
        num_read = len(found)
        if is_shared:
            num_read = sum(rows is not None for rows in found)
            found = found[self._world.rank :: self._world.size]
        return [self._source.checked(rows) for rows in found if rows is not None], num_read

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
