"""Every schedule ends, with the same result, whoever goes first and wherever buffers have room.

The schedules, without sockets: test_ring_algorithms.py has what each leaves and in which order it sums, with the ranks
in their order.
"""

from __future__ import annotations

import itertools
import random

import pytest
from lockstep import Lockstep, Way, buffered, handed_over, handed_over_where_long, own
from markers import nightly_where

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import NOTHING, Transfer, even_spans
from cyxtrain.ring.schedules.summation import chunks

RANKS = [2, 3, 4, 7]


def same_machine(sender, receiver, length):
    """Two machines that take turns: only between them there is room for what is long."""
    return Way.BUFFERED if sender % 2 != receiver % 2 else handed_over_where_long(sender, receiver, length)


def one_way(sender, receiver, length):
    """Only towards higher ranks there is room."""
    return Way.BUFFERED if sender < receiver else handed_over_where_long(sender, receiver, length)


def only_short(sender, receiver, length):
    """Where chunks are of two lengths the limit may lie between them."""
    return Way.BUFFERED if length <= 2 else Way.HANDED_OVER


WAYS = [buffered, handed_over_where_long, same_machine, one_way, only_short]


def orders(world_size):
    """Who goes first: every order of few ranks; of many each one last, and some by lot."""
    if world_size < 5:
        return list(itertools.permutations(range(world_size)))
    draw, ranks = random.Random(world_size), list(range(world_size))
    late = [[*ranks[:last], *ranks[last + 1 :], last] for last in ranks]
    late += [order[::-1] for order in late]
    return late + [draw.sample(ranks, world_size) for _ in range(8)]


def ring_of(world_size):
    ranks = tuple(range(world_size))
    return ranks[::2] + ranks[1::2]


def summed(world_size, count, schedule):
    """Buffers that are summed; what must come is what comes where nothing waits, rank after rank."""

    def made():
        return [schedule(rank) for rank in range(world_size)], [own(rank, count) for rank in range(world_size)]

    return *made(), None, Lockstep(*made(), way=buffered).run().results


def all_reduce(size, count):
    """Both rings: one in order of the ranks, and one that visits every machine once."""
    spans = chunks(count, size)
    return summed(
        size,
        count,
        lambda r: [
            *algorithms.reduce_scatter(r, size, spans),
            *algorithms.all_gather(r, size, spans, ring_of(size)),
        ],
    )


def reduce(size, count):
    spans = chunks(count, size)
    return summed(
        size,
        count,
        lambda r: [*algorithms.reduce_scatter(r, size, spans), *algorithms.gather(r, size, spans, 1, spans[r])],
    )


def reduce_scatter(size, count):
    return summed(size, count, lambda r: algorithms.reduce_scatter(r, size, chunks(count, size)))


def doubling(size, count):
    return summed(size, count, lambda r: algorithms.recursive_doubling(r, size, count))


def all_gather(size, count):
    buffers, spans = [[None] * (size * count) for _ in range(size)], even_spans(count, size)
    for rank, (start, end) in enumerate(spans):
        buffers[rank][start:end] = own(rank, count)
    everything = [element for rank in range(size) for element in own(rank, count)]
    schedules = [algorithms.all_gather(rank, size, spans, ring_of(size)) for rank in range(size)]
    return schedules, buffers, None, [everything] * size


def broadcast(size, count):
    schedules = [algorithms.broadcast(rank, size, count, 1, 3, ring_of(size)) for rank in range(size)]
    return schedules, [own(rank, count) for rank in range(size)], None, [own(1, count)] * size


def gather(size, count):
    sources, targets = [own(r, count) for r in range(size)], [[None] * (size * count) for _ in range(size)]
    spans = even_spans(count, size)
    came = [element for r in range(size) for element in ([None] * count if r == 1 else own(r, count))]
    expected = [came if r == 1 else [None] * (size * count) for r in range(size)]
    return [algorithms.gather(r, size, spans, 1, (0, count)) for r in range(size)], sources, targets, expected


def scatter(size, count):
    sources, targets = [own(r, size * count) for r in range(size)], [[None] * count for _ in range(size)]
    spans = even_spans(count, size)
    expected = [[None] * count if r == 1 else own(1, size * count)[slice(*spans[r])] for r in range(size)]
    return [algorithms.scatter(r, size, spans, 1, (0, count)) for r in range(size)], sources, targets, expected


def all_to_all(size, count):
    sources, targets = [own(r, size * count) for r in range(size)], [[None] * (size * count) for _ in range(size)]
    spans = even_spans(count, size)
    expected = []
    for rank in range(size):
        parts = [[None] * count if r == rank else own(r, size * count)[slice(*spans[rank])] for r in range(size)]
        expected.append([element for part in parts for element in part])
    return [algorithms.all_to_all(r, size, spans, spans) for r in range(size)], sources, targets, expected


SCHEDULES = [all_reduce, reduce, reduce_scatter, doubling, all_gather, broadcast, gather, scatter, all_to_all]


@nightly_where(lambda world_size: world_size == 7)
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("operation", SCHEDULES, ids=lambda operation: operation.__name__)
def test_the_result_is_the_same_whoever_goes_first_and_wherever_there_is_room(operation, world_size):
    count = 2 * world_size + 1
    for way, order in itertools.product(WAYS, orders(world_size)):
        schedules, sources, targets, expected = operation(world_size, count)
        ranks = Lockstep(schedules, sources, targets, way, order).run()
        assert ranks.results == expected, (way.__name__, order)


# --- and it can fail ------------------------------------------------------------------------------------------------


def swap(rank):
    """All that a rank has to the other one, and then all that the other one has."""
    return [Transfer(1 - rank, (0, 2), None, NOTHING), Transfer(None, NOTHING, 1 - rank, (0, 2))]


def lockstep_of_two(schedule, way):
    targets = [[None] * 2 for _ in range(2)]
    return Lockstep([schedule(0), schedule(1)], [own(0, 2), own(1, 2)], targets, way)


def test_ranks_that_both_send_first_wait_for_each_other_unless_there_is_room():
    for way in (buffered, only_short):
        assert lockstep_of_two(swap, way).run().results == [own(1, 2), own(0, 2)]
    for way in (handed_over, handed_over_where_long):
        with pytest.raises(AssertionError, match="the ranks wait for each other"):
            lockstep_of_two(swap, way).run()


def test_what_nobody_receives_and_what_is_received_in_another_length_is_found():
    with pytest.raises(AssertionError, match="something was sent that nobody received"):
        lockstep_of_two(lambda rank: swap(rank)[: 2 - rank], buffered).run()
    with pytest.raises(AssertionError, match="another length than is to come"):
        lockstep_of_two(lambda rank: [swap(rank)[0], swap(rank)[1]._replace(receive=(0, 1))], buffered).run()
