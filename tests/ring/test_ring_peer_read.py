"""What a rank offers to be read stays as it is until all who read it have said so, also where they read very late.

The schedules, without sockets: `Lockstep` overwrites the memory of a rank that has ended, and fails where anybody
reads what is no longer what was offered.
"""

from __future__ import annotations

import itertools
import random

import pytest
from lockstep import ChangedError, Lockstep, Way, buffered, offered, own

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import chunks, even_spans

RANKS = [2, 3, 4, 7]


def same_machine(sender, receiver, length, then):
    """Two machines that take turns: within each, memory is read; between them it is sent."""
    return offered(sender, receiver, length, then) if sender % 2 == receiver % 2 else Way.BUFFERED


def one_way(sender, receiver, length, then):
    """Only from higher ranks is read."""
    return offered(sender, receiver, length, then) if sender > receiver else Way.BUFFERED


def only_long(sender, receiver, length, then):
    """Where chunks are of two lengths the limit may lie between them."""
    return offered(sender, receiver, length, then) if length > 2 else Way.BUFFERED


WAYS = [offered, same_machine, one_way, only_long]


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


def gather_in_place(world_size, count, schedule):
    """Buffers in which each rank has its own part, and what must come."""
    buffers = [[None] * (world_size * count) for _ in range(world_size)]
    for rank, (start, end) in enumerate(even_spans(count, world_size)):
        buffers[rank][start:end] = own(rank, count)
    everything = [element for rank in range(world_size) for element in own(rank, count)]
    return [schedule(rank) for rank in range(world_size)], buffers, None, [everything] * world_size


def copied(world_size, count, schedule):
    """Buffers of which that of rank 1 must come to all."""
    buffers = [own(rank, count) for rank in range(world_size)]
    return [schedule(rank) for rank in range(world_size)], buffers, None, [own(1, count)] * world_size


def reduced(world_size, count, schedule):
    """Buffers that are summed; what must come is what comes where nothing is offered."""

    def made():
        return [schedule(rank) for rank in range(world_size)], [own(rank, count) for rank in range(world_size)]

    return *made(), None, Lockstep(*made(), way=buffered).run().results


def all_reduce_read(size, count):
    spans = chunks(count, size)
    return reduced(
        size, count, lambda r: [*algorithms.read_reduce(r, size, spans), *algorithms.read_gather(r, size, spans)]
    )


def all_reduce_ring(size, count):
    """Both rings: one in order of the ranks, and one that visits every machine once."""
    spans = chunks(count, size)
    return reduced(
        size,
        count,
        lambda r: [
            *algorithms.reduce_scatter(r, size, spans),
            *algorithms.all_gather(r, size, spans, ring_of(size)),
        ],
    )


def all_reduce_read_then_ring(size, count):
    spans = chunks(count, size)
    return reduced(
        size,
        count,
        lambda r: [*algorithms.read_reduce(r, size, spans), *algorithms.all_gather(r, size, spans, range(size))],
    )


def reduce_read(size, count):
    spans = chunks(count, size)
    return reduced(
        size,
        count,
        lambda r: [*algorithms.read_reduce(r, size, spans), *algorithms.gather(r, size, spans, 1, spans[r])],
    )


def reduce_ring(size, count):
    spans = chunks(count, size)
    return reduced(
        size,
        count,
        lambda r: [*algorithms.reduce_scatter(r, size, spans), *algorithms.gather(r, size, spans, 1, spans[r])],
    )


def reduce_scatter_read(size, count):
    return reduced(size, count, lambda r: algorithms.read_reduce(r, size, chunks(count, size)))


def reduce_scatter_ring(size, count):
    return reduced(size, count, lambda r: algorithms.reduce_scatter(r, size, chunks(count, size)))


def doubling(size, count):
    return reduced(size, count, lambda r: algorithms.recursive_doubling(r, size, count))


def all_gather_read(size, count):
    return gather_in_place(size, count, lambda r: algorithms.read_gather(r, size, even_spans(count, size)))


def all_gather_ring(size, count):
    return gather_in_place(
        size, count, lambda r: algorithms.all_gather(r, size, even_spans(count, size), ring_of(size))
    )


def broadcast_read(size, count):
    return copied(size, count, lambda r: algorithms.fan_out(r, size, count, 1))


def broadcast_ring(size, count):
    return copied(size, count, lambda r: algorithms.broadcast(r, size, count, 1, 3, ring_of(size)))


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


OF_ALL_WHO_READ_EACH_OTHER = [all_reduce_read, reduce_read, reduce_scatter_read, all_gather_read, broadcast_read]
ANYWHERE = [
    *(all_reduce_ring, all_reduce_read_then_ring, reduce_ring, reduce_scatter_ring, doubling),
    *(all_gather_ring, broadcast_ring, gather, scatter, all_to_all),
]
EVERYTHING = OF_ALL_WHO_READ_EACH_OTHER + ANYWHERE


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("operation", EVERYTHING, ids=lambda operation: operation.__name__)
def test_what_is_offered_stays_until_it_has_been_read_whoever_comes_last(operation, world_size):
    count = 2 * world_size + 1
    for way, order in itertools.product(WAYS, orders(world_size)):
        schedules, sources, targets, expected = operation(world_size, count)
        ranks = Lockstep(schedules, sources, targets, way, order).run()
        assert ranks.results == expected, (way.__name__, order)


@pytest.mark.parametrize(
    "operation", [each for each in EVERYTHING if each is not doubling], ids=lambda operation: operation.__name__
)
def test_without_the_last_word_of_the_readers_it_would_not(operation):
    def changes(order):
        schedules, sources, targets, _ = operation(4, 9)
        try:
            Lockstep(schedules, sources, targets, offered, order, settles=False).run()
        except ChangedError:
            return True
        return False

    assert any(map(changes, orders(4)))


def test_a_schedule_that_changes_what_it_has_offered_is_found():
    """Each of two ranks offers all that it has, and takes the other's in its place: the second one reads its own."""

    def swap(rank):
        whole, nothing = (0, 2), algorithms.NOTHING
        offer = algorithms.Transfer(1 - rank, whole, None, nothing)
        return [offer, algorithms.Transfer(None, nothing, 1 - rank, whole)]

    with pytest.raises(ChangedError):
        Lockstep([swap(0), swap(1)], [own(0, 2), own(1, 2)], way=offered).run()
