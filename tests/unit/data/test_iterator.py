"""Claims about batches: what the ranks see together is what one rank sees alone."""

import itertools

import numpy as np
import pytest

from cyxtrain.data.sampler import DistributedBatchIterator, DistributedSampler
from cyxtrain.errors import ConfigError

SIZES = [1, 2, 7, 64, 100, 1797]
WORLDS = [1, 2, 3, 4, 5]
BATCH_SIZES = [1, 3, 64]


def iterators(size, world_size, batch_size, effective_batch_size=None, **options):
    options = {"pad": False, **options}
    return [
        DistributedBatchIterator(
            DistributedSampler(size, rank=rank, world_size=world_size, **options),
            batch_size,
            effective_batch_size=effective_batch_size,
        )
        for rank in range(world_size)
    ]


def joined(batches, size):
    """The ranks' batches of one step, put back into the order in which they were dealt."""
    result = np.full(size, -1)
    for rank, batch in enumerate(batches):
        result[rank :: len(batches)] = batch
    return result.tolist()


@pytest.mark.parametrize("world_size", WORLDS)
def test_joined_batches_of_all_ranks_are_the_batches_of_one_rank(world_size):
    for size, batch_size in itertools.product(SIZES, BATCH_SIZES):
        ranks = iterators(size, world_size, batch_size)
        (alone,) = iterators(size, 1, batch_size * world_size)
        assert {len(rank) for rank in ranks} == {len(alone)}
        for number, (batches, expected) in enumerate(zip(zip(*ranks, strict=True), alone, strict=True)):
            assert joined(batches, len(expected)) == expected.tolist(), (size, batch_size)
            assert ranks[0].global_batch_size(number) == len(expected) == sum(len(batch) for batch in batches)


@pytest.mark.parametrize("world_size", WORLDS)
def test_an_epoch_visits_every_index_once(world_size):
    for size, batch_size in itertools.product(SIZES, BATCH_SIZES):
        batches = [batch for rank in iterators(size, world_size, batch_size) for batch in rank]
        assert sorted(np.concatenate(batches).tolist()) == list(range(size)), (size, batch_size)
        assert all(batch.dtype == np.int64 and len(batch) <= batch_size for batch in batches)


def test_a_batch_is_the_callers_own():
    # PyTorch warns of read-only indices where rows of a tensor are taken by them.
    (iterator,) = iterators(7, 1, 3)
    before = [batch.tolist() for batch in iterator]
    for batch in iterator:
        batch[:] = 0
    assert [batch.tolist() for batch in iterator] == before


@pytest.mark.parametrize("world_size", WORLDS)
def test_an_effective_batch_size_gives_the_same_batches_on_any_number_of_ranks(world_size):
    for size, effective_batch_size in itertools.product(SIZES, [1, 4, 10, 64]):
        ranks = iterators(size, world_size, 3, effective_batch_size)
        (alone,) = iterators(size, 1, effective_batch_size)
        for batches, expected in zip(zip(*ranks, strict=True), alone, strict=True):
            assert joined(batches, len(expected)) == expected.tolist(), (size, effective_batch_size)


@pytest.mark.parametrize("options", [{"pad": True}, {"drop_last": True}])
def test_with_a_sampler_that_pads_or_drops_all_ranks_have_equal_batches(options):
    ranks = iterators(100, 3, 7, **options)
    for batches in zip(*ranks, strict=True):
        assert len({len(batch) for batch in batches}) == 1
    sampler = ranks[1].sampler
    assert np.concatenate(list(ranks[1])).tolist() == sampler.get_indices()


def test_a_rank_without_samples_takes_every_step_with_an_empty_batch():
    ranks = iterators(2, 4, 3)
    assert [[len(batch) for batch in rank] for rank in ranks] == [[1], [1], [0], [0]]


def test_has_next_and_next_walk_through_the_epoch():
    (iterator,) = iterators(7, 1, 3)
    sizes = []
    while iterator.has_next():
        sizes.append(len(iterator.next()))
    assert sizes == [3, 3, 1]
    with pytest.raises(StopIteration):
        iterator.next()


def test_every_for_starts_at_the_beginning_of_the_current_epoch():
    (iterator,) = iterators(10, 1, 3)
    first = [batch.tolist() for batch in iterator]
    iterator.reset()
    iterator.next()
    assert [batch.tolist() for batch in iterator] == first
    iterator.reset(epoch=1)
    assert [batch.tolist() for batch in iterator] != first
    assert iterator.sampler.epoch == 1
    iterator.reset(0)
    assert [batch.tolist() for batch in iterator] == first


def test_next_goes_on_from_the_batch_that_reset_names_and_a_for_does_not():
    (iterator,) = iterators(10, 1, 3)
    whole = [batch.tolist() for batch in iterator]
    iterator.reset(batch=2)
    assert [iterator.next().tolist(), iterator.next().tolist(), iterator.has_next()] == [*whole[2:], False]
    iterator.reset(batch=2)
    assert [batch.tolist() for batch in iterator] == whole


def test_an_epoch_set_in_the_middle_does_not_mix_two_orders():
    (iterator,) = iterators(10, 1, 3)
    seen = iterator.next().tolist()
    iterator.sampler.set_epoch(1)
    while iterator.has_next():
        seen += iterator.next().tolist()
    assert sorted(seen) == list(range(10))


def test_num_batches_is_a_method_and_the_length():
    (iterator,) = iterators(10, 1, 3)
    assert iterator.num_batches() == len(iterator) == len(list(iterator)) == 4


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, None])
def test_a_batch_size_that_is_none_is_refused(batch_size):
    with pytest.raises(ConfigError, match="batch_size"):
        iterators(10, 1, batch_size)


def test_an_effective_batch_size_of_0_is_refused():
    with pytest.raises(ConfigError, match="effective_batch_size"):
        iterators(10, 1, 1, 0)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_batch_that_is_not_there_has_no_size(number):
    (iterator,) = iterators(10, 1, 3)
    with pytest.raises(ConfigError, match="0 to 3"):
        iterator.global_batch_size(number)
