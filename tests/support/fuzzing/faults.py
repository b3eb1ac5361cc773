"""Planted faults: each makes the ranks err in one way, to show that the comparisons find it.

They replace functions of the package in the process that calls them: a rank of a world, before its first program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cyxtrain as cx
from cyxtrain.data.sharding import RowSharding, Shard
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import MetricSums
from cyxtrain.training.resume import resumption


def count_a_row_twice() -> None:
    """A rank that has fewer rows than others in a step takes one of the step before, too."""
    shard = RowSharding.shard

    def padded(self: RowSharding, rank: int, step: int) -> Shard:
        pieces, global_rows = shard(self, rank, step)
        own, most = (sum(map(len, shard(self, each, step).pieces)) for each in (rank, 0))
        if 0 < own < most and pieces[0].start >= pieces[0].step:
            pieces = [range(pieces[0].start - pieces[0].step, pieces[0].stop, pieces[0].step), *pieces[1:]]
        return Shard(pieces, global_rows)

    _replace(RowSharding, "shard", padded)


def weigh_tails_as_full_batches() -> None:
    """A step averages over ranks, whatever number of rows each of them has."""
    shard = RowSharding.shard

    def unweighted(self: RowSharding, rank: int, step: int) -> Shard:
        pieces, global_rows = shard(self, rank, step)
        own = sum(map(len, pieces))
        return Shard(pieces, own * self.num_slices if own else global_rows)

    _replace(RowSharding, "shard", unweighted)


def round_extremes_to_float32() -> None:
    """With several ranks, max and min of logged numbers pass through float32."""
    add = LoggedNumbers.add

    def rounded(self: LoggedNumbers, name: str, value: Any, reduce: str = "mean", *more: Any, **keywords: Any) -> None:
        if reduce in ("max", "min") and cx.get_world_size() > 1:
            value = float(np.float32(float(value)))
        add(self, name, value, reduce, *more, **keywords)

    _replace(LoggedNumbers, "add", rounded)


def forget_generators_on_resume() -> None:
    """A resumed fit draws its own random numbers."""
    _replace(resumption, "set_generators", lambda states, device: None)


def drop_metrics_of_the_last_rank() -> None:
    """The sums of the last of several ranks are lost where ranks add them up."""
    over_ranks = MetricSums.over_ranks

    def without_last(self: MetricSums, group: Any) -> dict[str, float]:
        if cx.get_world_size() > 1 and cx.get_rank() == cx.get_world_size() - 1:
            self.restore([[0.0] * self.table().shape[1]], None, [])
        return over_ranks(self, group)

    _replace(MetricSums, "over_ranks", without_last)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    assert callable(getattr(owner, name)), f"{owner.__name__} has no {name} to plant a fault in"
    setattr(owner, name, function)


FAULTS: dict[str, Callable[[], None]] = {
    "a row counted twice": count_a_row_twice,
    "tails not weighted": weigh_tails_as_full_batches,
    "max in float32": round_extremes_to_float32,
    "generators not restored": forget_generators_on_resume,
    "metrics of a rank dropped": drop_metrics_of_the_last_rank,
}
