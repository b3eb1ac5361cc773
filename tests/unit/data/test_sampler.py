"""Claims about the order of samples: pure arithmetic, no processes."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cyxtrain.data import sampler as sampler_module
from cyxtrain.data.sampler import DistributedSampler, global_order
from cyxtrain.data.sources.validation_rows import validation_rows
from cyxtrain.errors import ConfigError
from cyxtrain.world.world import World

SIZES = [1, 2, 7, 64, 100, 1797]
WORLDS = [1, 2, 3, 4, 5]


def samplers(size, world_size, **options):
    return [DistributedSampler(size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_without_padding_every_index_is_dealt_exactly_once(size, world_size, shuffle):
    ranks = samplers(size, world_size, pad=False, shuffle=shuffle)
    assert sorted(index for rank in ranks for index in rank) == list(range(size))
    assert max(len(rank) for rank in ranks) - min(len(rank) for rank in ranks) <= 1
    assert [len(rank.get_indices()) for rank in ranks] == [rank.local_size() for rank in ranks]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_padding_makes_equal_lengths_with_the_head_of_the_order(size, world_size):
    ranks = samplers(size, world_size)
    assert {len(rank) for rank in ranks} == {math.ceil(size / world_size)}
    order = ranks[0].global_indices().tolist()
    assert len(order) == ranks[0].padded_size()
    assert order[size:] == (order[:size] * world_size)[: len(order) - size]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_drop_last_makes_equal_lengths_without_the_tail(size, world_size):
    if size < world_size:
        with pytest.raises(ConfigError, match=f"nothing of {size} samples on {world_size} ranks"):
            DistributedSampler(size, drop_last=True, rank=0, world_size=world_size)
        return
    ranks = samplers(size, world_size, drop_last=True)
    assert {len(rank) for rank in ranks} == {size // world_size}
    assert ranks[0].global_indices().tolist() == global_order(size, True, 42, 0)[: ranks[0].padded_size()].tolist()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_global_order_does_not_depend_on_the_number_of_ranks(size, world_size):
    alone = DistributedSampler(size, rank=0, world_size=1).get_indices()
    joined = [0] * size
    for rank, sampler in enumerate(samplers(size, world_size, pad=False)):
        joined[rank::world_size] = sampler.get_indices()
    assert joined == alone


def test_the_order_is_frozen_for_ever():
    """A change of these numbers breaks every run that is resumed."""
    assert global_order(16, True, 42, 3).tolist() == [10, 8, 7, 13, 6, 5, 11, 1, 14, 12, 9, 2, 3, 15, 0, 4]
    assert global_order(10, True, 2**40 + 5, 1).tolist() == [4, 1, 5, 3, 8, 7, 9, 0, 2, 6]


def test_seed_and_epoch_each_choose_another_order_and_are_not_added():
    orders = {tuple(global_order(50, True, seed, epoch)) for seed in (0, 1, 2, 2**32, 2**64 - 1) for epoch in range(5)}
    assert len(orders) == 25


def test_making_an_order_leaves_numpys_own_generator_alone():
    before = np.random.get_state()[1].tolist()
    global_order(100, True, 1, 1)
    assert np.random.get_state()[1].tolist() == before


def test_set_epoch_changes_the_order_and_comes_back_to_it():
    sampler = DistributedSampler(100, rank=0, world_size=2)
    first = sampler.get_indices()
    sampler.set_epoch(1)
    assert sampler.get_indices() != first
    sampler.set_epoch(0)
    assert sampler.get_indices() == first


def test_without_shuffle_the_order_is_that_of_the_data_set_in_every_epoch():
    sampler = DistributedSampler(10, shuffle=False, rank=1, world_size=3, pad=False)
    assert sampler.get_indices() == [1, 4, 7]
    sampler.set_epoch(5)
    assert sampler.get_indices() == [1, 4, 7]


def test_the_order_is_computed_once_per_epoch_and_cannot_be_changed():
    sampler = DistributedSampler(10, rank=0, world_size=1)
    assert sampler.global_indices() is sampler.global_indices()
    assert sampler.global_indices().dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        sampler.global_indices()[0] = 1


def test_sizes_are_methods():
    sampler = DistributedSampler(10, rank=2, world_size=4)
    assert (sampler.local_size(), sampler.total_size(), sampler.padded_size()) == (3, 10, 12)
    uneven = DistributedSampler(10, rank=2, world_size=4, pad=False)
    assert (uneven.local_size(), uneven.total_size(), uneven.padded_size()) == (2, 10, 10)
    dropping = DistributedSampler(10, rank=2, world_size=4, drop_last=True, pad=False)
    assert (dropping.local_size(), dropping.total_size(), dropping.padded_size()) == (2, 10, 8)
    assert DistributedSampler(10, rank=2, world_size=4, drop_last=True, pad=True).padded_size() == 8


def test_it_is_a_sampler_for_pytorchs_data_loader():
    data = TensorDataset(torch.arange(10))
    ranks = [DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False) for rank in range(2)]
    seen = [torch.cat([batch for (batch,) in DataLoader(data, batch_size=2, sampler=rank)]) for rank in ranks]
    assert torch.equal(torch.cat(seen), torch.cat([torch.arange(0, 10, 2), torch.arange(1, 10, 2)]))


def test_a_data_set_stands_for_its_length():
    for data in ([1, 2, 3], np.zeros((3, 2)), torch.zeros(3, 2), TensorDataset(torch.zeros(3))):
        assert DistributedSampler(data, rank=0, world_size=1).total_size() == 3


def test_without_a_group_it_is_rank_0_of_1():
    sampler = DistributedSampler(5)
    assert (sampler.rank, sampler.world_size) == (0, 1)


def test_with_a_group_rank_and_world_size_are_the_groups(monkeypatch):
    for name, found in {"is_initialized": True, "current": World(rank=2, size=3)}.items():
        monkeypatch.setattr(sampler_module.runtime, name, lambda found=found: found)
    sampler = DistributedSampler(5)
    assert (sampler.rank, sampler.world_size) == (2, 3)
    given = DistributedSampler(5, rank=0, world_size=1)
    assert (given.rank, given.world_size) == (0, 1)
    assert DistributedSampler(5, rank=1).world_size == 3


@pytest.mark.parametrize("size", SIZES)
def test_state_goes_from_any_number_of_ranks_to_any_other(size):
    source = DistributedSampler(size, rank=0, world_size=1)
    source.set_epoch(7)
    target = DistributedSampler(size, rank=1, world_size=3, pad=False)
    target.load_state_dict(source.state_dict())
    assert target.get_indices() == source.get_indices()[1::3]


@pytest.mark.parametrize("given", [(2, 0), (1, 0), (2,), (None, None), (2, 0, True)])
def test_pytorchs_order_of_arguments_is_refused_with_what_to_write(given):
    with pytest.raises(ConfigError, match=r"DistributedSampler\(dataset, num_replicas=2, rank=0\)"):
        DistributedSampler(range(10), *given)


@pytest.mark.parametrize("other", [{"dataset_size": 11}, {"seed": 1}, {"shuffle": False}, {"epoch": None}])
def test_a_state_of_another_order_is_refused(other):
    sampler = DistributedSampler(10, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=next(iter(other))):
        sampler.load_state_dict({**sampler.state_dict(), **other})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_size": 0}, "empty"),
        ({"dataset_size": []}, "empty"),
        ({"dataset_size": -1}, "dataset_size"),
        ({"dataset_size": 1.5}, "dataset_size"),
        ({"rank": 3, "world_size": 3}, "rank 3 is outside a world of 3"),
        ({"rank": -1, "world_size": 3}, "rank"),
        ({"rank": 0, "world_size": 0}, "world_size"),
        ({"rank": 0, "world_size": 2, "num_replicas": 3}, "world_size=2 and num_replicas=3"),
        ({"world_size": 2}, "Give both"),
        ({"rank": 0}, "Give both"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"shuffle": 3}, "shuffle"),
    ],
)
def test_what_cannot_work_is_refused_with_its_numbers(arguments, message):
    with pytest.raises(ConfigError, match=message):
        DistributedSampler(**{"dataset_size": 10, **arguments})


@pytest.mark.parametrize("epoch", [-1, 2**32, 0.5, None])
def test_an_epoch_that_is_none_is_refused(epoch):
    with pytest.raises(ConfigError, match="epoch"):
        DistributedSampler(10, rank=0, world_size=1).set_epoch(epoch)


@pytest.mark.parametrize(
    ("num_rows", "fraction", "first"),
    [(10, 0.1, 9), (10, 0.2, 8), (1797, 0.2, 1437), (3, 0.5, 1), (2, 0.5, 1), (1000, 1e-3, 999), (100, 0.29, 71)],
)
def test_the_validation_part_is_the_last_fraction(num_rows, fraction, first):
    assert validation_rows(num_rows, fraction) == first


@pytest.mark.parametrize("percent", [1, 10, 25, 29, 50, 90])
@pytest.mark.parametrize("num_rows", SIZES)
def test_a_split_has_two_parts_or_is_refused(num_rows, percent):
    first = num_rows * (100 - percent) // 100
    if first == 0:
        with pytest.raises(ConfigError, match=f"of {num_rows} samples leaves 0 for training and {num_rows} for"):
            validation_rows(num_rows, percent / 100)
    else:
        assert validation_rows(num_rows, percent / 100) == first < num_rows


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 1.5])
def test_a_fraction_outside_of_0_and_1_splits_nothing(fraction):
    with pytest.raises(ConfigError, match="validation_split"):
        validation_rows(10, fraction)
