"""The division of each step into slices, and the one tree that adds them up: pure arithmetic.

The sum over all slices is one binary tree (`binary_tree`), whichever rank has which of them. A rank adds up what lies
within its own slices, as soon as they are there. What then is left are rows, one or a few per rank, which the ranks add
up together in the order of the same tree.
"""

from __future__ import annotations

import dataclasses
import functools

from cyxtrain.ring import binary_tree
from cyxtrain.world.world import World

Addition = tuple[int, int]
"""(into, source): slice or row `into` becomes `into + source`."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """The division of each step into `count` slices; a rank works on the slices in `owned`.

    The samples and the random numbers of a slice depend on its number, not on the rank that owns it.

    Attributes:
        num_ranks: How many ranks there are.
        is_virtual: Whether their number does not follow from the ranks. They are then added up in the order of one
            tree, with the same bits on any number of ranks; a slice per rank in the order of the backend.
    """

    count: int = 1
    owned: range = range(1)
    num_ranks: int = 1
    is_virtual: bool = False

    @classmethod
    def of(cls, world: World, count: int | None = None) -> Slices:
        """Divide `count` slices among the ranks, neighbouring ones to each; None, or too few: one slice per rank."""
        if count is None or count < world.size:
            return cls(world.size, range(world.rank, world.rank + 1), world.size)
        return cls(count, owned_by(world.rank, world.size, count), world.size, is_virtual=True)


def owned_by(rank: int, num_ranks: int, count: int) -> range:
    """Return the slices, of `count`, that a rank owns."""
    return range(-(-count * rank // num_ranks), -(-count * (rank + 1) // num_ranks))


@functools.cache
def additions_after(number: int, slices: Slices) -> tuple[Addition, ...]:
    """Return what a rank adds up when slice `number`, the latest of those that it owns, is there.

    Source of the order: a binary counter, as in pairwise summation (Higham, The Accuracy of Floating Point Summation,
    1993, section 2).
    """
    return tuple(_additions_by_latest(slices).get(number, ()))


@functools.cache
def rows_of(slices: Slices) -> tuple[int, ...]:
    """Return the slices whose places hold the sums that a rank is left with; each is the first one of its sum."""
    added = {source for _, source in _additions_within(slices)}
    return tuple(number for number in slices.owned if number not in added)


@functools.cache
def rows_by_rank(slices: Slices) -> tuple[tuple[int, ...], ...]:
    """Return `rows_of` each rank."""
    divisions = [
        dataclasses.replace(slices, owned=owned_by(rank, slices.num_ranks, slices.count))
        for rank in range(slices.num_ranks)
    ]
    return tuple(map(rows_of, divisions))


@functools.cache
def additions_of_rows(slices: Slices) -> tuple[Addition, ...]:
    """Return how the rows of all ranks, counted from 0, are added up; row 0 then has the sum over all slices."""
    rows = [row for of_rank in rows_by_rank(slices) for row in of_rank]
    place = {row: number for number, row in enumerate(rows)}
    between_ranks = [(into, source) for into, source in binary_tree(slices.count) if source in place]
    return tuple((place[into], place[source]) for into, source in between_ranks)


@functools.cache
def _additions_within(slices: Slices) -> tuple[Addition, ...]:
    """Return the additions of the tree that need none but a rank's own slices, in the order of the tree."""
    found = []
    for addition in binary_tree(slices.count):
        leaves = _leaves_of(addition, slices.count)
        if leaves.start >= slices.owned.start and leaves.stop <= slices.owned.stop:
            found.append(addition)
    return tuple(found)


@functools.cache
def _additions_by_latest(slices: Slices) -> dict[int, list[Addition]]:
    """Return `_additions_within` by the latest slice that an addition sums up."""
    found: dict[int, list[Addition]] = {}
    for addition in _additions_within(slices):
        latest = _leaves_of(addition, slices.count).stop - 1
        found.setdefault(latest, []).append(addition)
    return found


def _leaves_of(addition: Addition, count: int) -> range:
    """Return all slices that an addition sums up."""
    into, source = addition
    return range(into, min(2 * source - into, count))
