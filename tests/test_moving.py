"""Rows come to the model in the order of the epoch, and whoever brings them knows early which come next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data import feed
from cyxtrain.data.arrays import ArraySource
from cyxtrain.data.batches import Share
from cyxtrain.data.feed import ArrayFeed, Place
from cyxtrain.data.iterator import DistributedBatchIterator
from cyxtrain.data.moving import Placement, ToCPU
from cyxtrain.data.sampler import DistributedSampler, Indices

PLACEMENT = Placement(torch.device("cpu"), torch.float32, lambda targets, dtype: targets.to(dtype))


class Noting(ToCPU):
    """Notes what is asked for, and what it is told comes next."""

    asked: list[tuple[Indices, Indices | None]] = []  # noqa: RUF012 - one for the test

    def __call__(self, indices, following):
        self.asked.append((indices, following))
        return super().__call__(indices, following)


def shares(rows: int, rank: int, world_size: int, rows_at_once: int, first: int = 0) -> Iterator[Share]:
    source = ArraySource(torch.arange(float(rows))[:, None], torch.arange(rows))
    sampler = DistributedSampler(rows, rank=rank, world_size=world_size, pad=False)
    iterator = DistributedBatchIterator(sampler, 1, effective_batch_size=6)
    config = DistributedTrainingConfig(accumulation_steps=-(-6 // (world_size * rows_at_once)))
    return ArrayFeed(source.gather, iterator, config).shares(Place(0, first, 0), PLACEMENT, None)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("rows_at_once", [1, 2, 6])
@pytest.mark.parametrize("first", [0, 2])
def test_what_follows_is_the_very_array_that_is_asked_for_next(world_size, rows_at_once, first, monkeypatch):
    monkeypatch.setattr(feed, "make_mover", Noting)
    for rank in range(world_size):
        Noting.asked.clear()
        seen = [
            batch.inputs[:, 0].tolist()
            for share in shares(25, rank, world_size, rows_at_once, first)
            for batch in share
        ]
        assert seen == [indices.tolist() for indices, _ in Noting.asked]
        assert len(seen) > 1
        for (_, said), (came, _) in zip(Noting.asked, [*Noting.asked[1:], (None, None)], strict=True):
            assert said is came


def test_a_share_may_be_gone_through_again():
    for share in shares(25, 0, 2, 2):
        once, again = ([batch.targets.tolist() for batch in share] for _ in range(2))
        assert once == again
        assert sum(map(len, once)) == share.rows
