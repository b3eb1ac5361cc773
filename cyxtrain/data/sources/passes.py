"""Data of which only the first batch is known before they are read, in passes over them."""

from __future__ import annotations

import functools
import itertools
import time
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import BatchShare, Share, StreamShare, StreamStep
from cyxtrain.data.batches.prefetch import DeviceCopier, Placement, make_copier
from cyxtrain.data.batches.rows import Rows, sampled_hash
from cyxtrain.data.batches.structure import dtypes_of, example_of, form_of, num_rows
from cyxtrain.data.feed import DataInterruptedError, Feed, Place
from cyxtrain.data.sources.source import Source
from cyxtrain.errors import ConfigError, counted, on_all_ranks, warn
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

INTERRUPTED = -(1 << 40)  # read by a rank whose data cannot continue: below zero, whatever the others have


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


class PassFeed(Feed):
    """Data without a known end, in passes that continue over epochs as in a `RowFeed`."""

    has_rank_states = True

    def __init__(self, config: DistributedTrainingConfig, world: World, *, reads_once: bool) -> None:
        self._world = world
        self._slices = Slices.of(world, config.virtual_ranks)
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
    def _read(self, copier: DeviceCopier) -> StreamStep:
        """Read the next step."""

    def _read_ahead(self, copier: DeviceCopier) -> StreamStep:
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
