"""The tree over slices, symbolically: who adds up what, for all numbers of slices and ranks."""

from __future__ import annotations

import math

import pytest

from cyxtrain.ring import binary_tree
from cyxtrain.world.slices import (
    Slices,
    additions_after,
    additions_of_rows,
    rows_by_rank,
    rows_of,
)
from cyxtrain.world.world import World

MOST = 64
Sum = int | tuple["Sum", "Sum"]


def tree_of(count: int) -> Sum:
    """Return the sum of all slices as nested pairs."""
    sums: list[Sum] = [*range(count)]
    for into, source in binary_tree(count):
        sums[into] = (sums[into], sums[source])
    return sums[0]


def sums_of_rank(slices: Slices) -> tuple[dict[int, Sum], int]:
    """Return what a rank is left with, by place, and the most sums that it had at once while a slice was added."""
    sums: dict[int, Sum] = {}
    most = 0
    for number in slices.owned:
        sums[number] = number
        most = max(most, len(sums))
        for into, source in additions_after(number, slices):
            sums[into] = (sums[into], sums.pop(source))
    return sums, most


def divisions(count: int, num_ranks: int) -> list[Slices]:
    return [Slices.of(World(rank, num_ranks), count) for rank in range(num_ranks)]


@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_any_number_of_ranks_makes_the_same_sum(count):
    expected = tree_of(count)
    for num_ranks in range(1, count + 1):
        rows: list[Sum] = []
        first, *_ = all_ranks = divisions(count, num_ranks)
        for slices, places in zip(all_ranks, rows_by_rank(first), strict=True):
            sums, _ = sums_of_rank(slices)
            assert tuple(sums) == places == rows_of(slices)
            rows += sums.values()
        for into, source in additions_of_rows(first):
            rows[into] = (rows[into], rows[source])
        assert rows[0] == expected, num_ranks


@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_every_slice_has_one_owner_and_owners_are_neighbours(count):
    for num_ranks in range(1, count + 1):
        owned = [number for slices in divisions(count, num_ranks) for number in slices.owned]
        assert owned == [*range(count)]
        assert min(len(slices.owned) for slices in divisions(count, num_ranks)) == count // num_ranks


def test_the_memory_of_sums_is_logarithmic():
    for count in range(1, MOST + 1):
        for num_ranks in range(1, count + 1):
            are_powers = math.log2(count).is_integer() and math.log2(num_ranks).is_integer()
            for slices in divisions(count, num_ranks):
                _, most = sums_of_rank(slices)
                if are_powers:
                    assert most <= math.log2(count // num_ranks) + 1
                    assert len(rows_of(slices)) == 1
                else:
                    assert most <= 2 * math.log2(count) + 1


def test_a_rank_per_slice_is_the_ring_s_tree_of_ranks():
    for count in range(1, MOST + 1):
        assert additions_of_rows(Slices.of(World(0, count), count)) == binary_tree(count)


def test_a_world_has_a_slice_per_rank_unless_told_otherwise():
    assert Slices.of(World(2, 3)) == Slices(3, range(2, 3), 3)
    assert [Slices.of(World(rank, 3), 8).owned for rank in range(3)] == [range(3), range(3, 6), range(6, 8)]
