"""The schedules, without sockets: what each leaves, in which order it sums, and that every rank hears of every other.

Where nothing else is said a send happens only together with its receive: such a schedule needs no buffer anywhere.
test_ring_lockstep.py has every order in which ranks may go on.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep import Lockstep, apart, buffered, handed_over_where_long, own
from markers import nightly_where

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import even_spans
from cyxtrain.ring.schedules.summation import along_ring, binary_tree, chunks, summation_order

RANKS = (*range(1, 10), 16)


def everywhere(check):
    """Runs a check of (world_size, count) for many counts, in one test per number of ranks."""

    def test(world_size):
        for count in sorted({0, 1, world_size - 1, world_size, world_size + 1, 100}):
            check(world_size, count)

    test.__name__ = check.__name__
    return pytest.mark.parametrize("world_size", RANKS)(test)


def added_up(additions, world_size):
    """What these additions leave in the leaf of the last one: an expression of ranks."""
    leaves = list(range(world_size))
    for into, source in additions:
        leaves[into] = (leaves[into], leaves[source])
    return leaves[additions[-1][0]] if additions else 0


def summed(additions, world_size, count, start=0):
    """The elements from `start` on, each summed by these additions."""
    return [(added_up(additions, world_size), start + index) for index in range(count)]


def summed_in_chunks(spans, world_size):
    return [
        element
        for chunk, (start, end) in enumerate(spans)
        for element in summed(along_ring(world_size, chunk), world_size, end - start, start)
    ]


@pytest.mark.parametrize("world_size", RANKS)
def test_every_order_adds_each_leaf_once(world_size):
    orders = [binary_tree(world_size), *(along_ring(world_size, chunk) for chunk in range(world_size))]
    for order in orders:
        sources = [source for _, source in order]
        assert len(order) == world_size - 1
        assert len(set(sources)) == world_size - 1
        for number, (into, _) in enumerate(order):
            assert into not in sources[:number], "a leaf is added to after it was used"


@given(st.integers(1, 64), st.integers(0, 2**24), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_order_follows_from_the_number_of_leaves_and_the_bytes(leaves, count, item_bytes):
    few = leaves > 1 and count * item_bytes <= 256 * 1024
    for chunk in {0, leaves - 1}:
        order = summation_order(leaves, count, item_bytes, chunk)
        assert order == (binary_tree(leaves) if few else along_ring(leaves, chunk))


def test_along_the_ring_a_chunk_ends_at_its_own_leaf():
    assert [added_up(along_ring(4, chunk), 4) for chunk in range(4)] == [
        (0, (3, (2, 1))),
        (1, (0, (3, 2))),
        (2, (1, (0, 3))),
        (3, (2, (1, 0))),
    ]


@pytest.mark.parametrize("chunk", [0, 1])
def test_two_leaves_have_the_same_sum_in_both_orders(chunk):
    assert {*along_ring(2, chunk)[0]} == {*binary_tree(2)[0]}  # addition is commutative


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])
def test_in_the_tree_blocks_of_a_power_of_two_are_sums_of_their_own(world_size):
    """So that one rank can sum consecutive leaves by itself, with the same bits."""
    whole = added_up(binary_tree(2 * world_size), 2 * world_size)
    assert whole[0] == added_up(binary_tree(world_size), world_size)


@everywhere
def test_chunks_cover_everything_in_order_and_evenly(world_size, count):
    spans = chunks(count, world_size)
    assert [position for span in spans for position in range(*span)] == list(range(count))
    lengths = [end - start for start, end in spans]
    assert max(lengths) - min(lengths) <= 1


@everywhere
def test_all_reduce_sums_every_chunk_along_the_ring_and_gives_it_to_all(world_size, count):
    spans = chunks(count, world_size)
    buffers = [own(rank, count) for rank in range(world_size)]
    reducing = [algorithms.reduce_scatter(rank, world_size, spans) for rank in range(world_size)]
    gathering = [algorithms.all_gather(rank, world_size, spans, range(world_size)) for rank in range(world_size)]
    ranks = Lockstep([a + b for a, b in zip(reducing, gathering, strict=True)], buffers).run()
    assert ranks.all_heard()
    assert ranks.results == [summed_in_chunks(spans, world_size)] * world_size


@everywhere
def test_reduce_scatter_leaves_each_rank_its_chunk(world_size, count):
    spans = chunks(count, world_size)
    buffers = [own(rank, count) for rank in range(world_size)]
    schedules = [algorithms.reduce_scatter(rank, world_size, spans) for rank in range(world_size)]
    ranks = Lockstep(schedules, buffers).run()
    assert ranks.all_heard()
    for rank, (start, end) in enumerate(spans):
        expected = summed(along_ring(world_size, rank), world_size, end - start, start)
        assert ranks.results[rank][start:end] == expected


def rings(world_size):
    """Some orders of all ranks: as they are, backwards, and those of two machines that took turns."""
    ranks = tuple(range(world_size))
    return [ranks, ranks[::-1], ranks[::2] + ranks[1::2]]


@everywhere
def test_all_gather_brings_every_span_to_all_in_any_order_of_the_ring(world_size, count):
    spans = even_spans(count, world_size)
    for ring in rings(world_size):
        buffers = [[None] * (world_size * count) for _ in range(world_size)]
        for rank, (start, end) in enumerate(spans):
            buffers[rank][start:end] = own(rank, count)
        schedules = [algorithms.all_gather(rank, world_size, spans, ring) for rank in range(world_size)]
        ranks = Lockstep(schedules, buffers).run()
        assert ranks.all_heard()
        assert ranks.results == [[element for rank in range(world_size) for element in own(rank, count)]] * world_size
        assert ranks.links == (set(zip(ring, ring[1:] + ring[:1], strict=True)) if count and world_size > 1 else set())


@nightly_where(lambda world_size: world_size in (7, 16))
@everywhere
def test_broadcast_copies_the_buffer_of_any_rank_to_all_in_any_order_of_the_ring(world_size, count):
    for src, segments in itertools.product({0, 1, world_size // 2, world_size - 1} & set(range(world_size)), (1, 2, 5)):
        segment = max(1, count // segments)
        for ring in rings(world_size):
            buffers = [own(rank, count) for rank in range(world_size)]
            schedules = [
                algorithms.broadcast(rank, world_size, count, src, segment, ring) for rank in range(world_size)
            ]
            ranks = Lockstep(schedules, buffers, way=handed_over_where_long).run()
            assert ranks.all_heard()
            assert ranks.results == [own(src, count)] * world_size


@everywhere
def test_gather_brings_every_source_to_one_rank_and_leaves_the_others_alone(world_size, count):
    spans = even_spans(count, world_size)
    for dst in range(world_size):
        sources = [own(rank, count) for rank in range(world_size)]
        targets = [[None] * (world_size * count) for _ in range(world_size)]
        schedules = [algorithms.gather(rank, world_size, spans, dst, (0, count)) for rank in range(world_size)]
        ranks = Lockstep(schedules, sources, targets).run()
        assert ranks.all_heard()
        for rank in range(world_size):
            came = [own(other, count) if rank == dst != other else [None] * count for other in range(world_size)]
            assert ranks.results[rank] == [element for part in came for element in part]


@nightly_where(lambda world_size: world_size in (7, 16))
@everywhere
def test_scatter_brings_each_rank_its_part(world_size, count):
    spans = even_spans(count, world_size)
    for src in range(world_size):
        sources = [own(rank, world_size * count) for rank in range(world_size)]
        targets = [[None] * count for _ in range(world_size)]
        schedules = [algorithms.scatter(rank, world_size, spans, src, (0, count)) for rank in range(world_size)]
        ranks = Lockstep(schedules, sources, targets).run()
        assert ranks.all_heard()
        for rank in range(world_size):
            expected = [None] * count if rank == src else own(src, world_size * count)[slice(*spans[rank])]
            assert ranks.results[rank] == expected


@pytest.mark.parametrize("world_size", RANKS)
def test_all_to_all_brings_parts_of_any_size_to_where_they_belong(world_size):
    sizes = [[(3 * sender + 5 * receiver) % 4 for receiver in range(world_size)] for sender in range(world_size)]
    send = [spans_of(sizes[rank]) for rank in range(world_size)]
    receive = [spans_of([sizes[sender][rank] for sender in range(world_size)]) for rank in range(world_size)]
    sources = [own(rank, sum(sizes[rank])) for rank in range(world_size)]
    targets = [[None] * receive[rank][-1][1] for rank in range(world_size)]
    schedules = [algorithms.all_to_all(rank, world_size, send[rank], receive[rank]) for rank in range(world_size)]
    ranks = Lockstep(schedules, sources, targets).run()
    assert ranks.all_heard()
    for rank in range(world_size):
        for sender in range(world_size):
            expected = own(sender, 100)[slice(*send[sender][rank])]
            found = ranks.results[rank][slice(*receive[rank][sender])]
            assert found == ([None] * len(expected) if sender == rank else expected)


def spans_of(lengths):
    return [(sum(lengths[:index]), sum(lengths[: index + 1])) for index in range(len(lengths))]


@pytest.mark.parametrize("world_size", RANKS)
def test_agreement_ends_when_every_rank_has_heard_of_every_other(world_size):
    schedules = [algorithms.dissemination_barrier(rank, world_size) for rank in range(world_size)]
    assert Lockstep(schedules, [[] for _ in range(world_size)]).run().all_heard()
    assert {len(schedule) for schedule in schedules} == {(world_size - 1).bit_length()}


# --- few elements: by a tree ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", RANKS)
def test_the_tree_adds_higher_ranks_to_lower_ones(world_size):
    assert all(into < source for into, source in binary_tree(world_size))  # of two NaNs the lower rank's stays


def test_the_tree_is_known():
    assert [added_up(binary_tree(size), size) for size in range(1, 10)] == [
        0,
        (0, 1),
        ((0, 1), 2),
        ((0, 1), (2, 3)),
        (((0, 1), (2, 3)), 4),
        (((0, 1), (2, 3)), (4, 5)),
        (((0, 1), (2, 3)), ((4, 5), 6)),
        (((0, 1), (2, 3)), ((4, 5), (6, 7))),
        ((((0, 1), (2, 3)), ((4, 5), (6, 7))), 8),
    ]


@everywhere
def test_recursive_doubling_leaves_the_tree_on_every_rank(world_size, count):
    buffers = [own(rank, count) for rank in range(world_size)]
    schedules = [algorithms.recursive_doubling(rank, world_size, count) for rank in range(world_size)]
    ranks = Lockstep(schedules, buffers).run()
    assert ranks.all_heard()
    assert ranks.results == [summed(binary_tree(world_size), world_size, count)] * world_size
    rounds = (world_size - 1).bit_length()
    is_power = world_size & (world_size - 1) == 0
    assert max(map(len, schedules)) <= (rounds if is_power else 2 * rounds)


@everywhere
def test_telling_spans_brings_every_span_to_all(world_size, count):
    spans = even_spans(count, world_size)
    schedules = [[algorithms.multicast_spans(rank, world_size, spans[rank], spans)] for rank in range(world_size)]
    buffers = [[None] * (world_size * count) for _ in range(world_size)]
    for rank, (start, end) in enumerate(spans):
        buffers[rank][start:end] = own(rank, count)
    ranks = Lockstep(schedules, buffers, way=buffered).run()
    assert ranks.all_heard()
    assert ranks.results == [[element for rank in range(world_size) for element in own(rank, count)]] * world_size


@nightly_where(lambda world_size: world_size == 16)
@everywhere
def test_telling_of_one_brings_the_buffer_of_any_rank_to_all(world_size, count):
    for src in range(world_size):
        buffers = [own(rank, count) for rank in range(world_size)]
        schedules = [[algorithms.multicast_from(rank, world_size, count, src)] for rank in range(world_size)]
        ranks = Lockstep(schedules, buffers, way=buffered).run()
        assert ranks.all_heard()
        assert ranks.results == [own(src, count)] * world_size


@everywhere
def test_the_costs_are_what_the_docstrings_say(world_size, count):
    spans = chunks(count, world_size)
    for rank in range(world_size):
        rest = count - (spans[rank][1] - spans[rank][0])
        schedule = algorithms.reduce_scatter(rank, world_size, spans)
        assert len(schedule) == world_size - 1
        assert sum(step.send[1] - step.send[0] for step in schedule) == rest
        schedule = algorithms.all_gather(rank, world_size, spans, tuple(range(world_size)))
        assert len(schedule) == world_size - 1
        assert sum(step.receive[1] - step.receive[0] for step in schedule) == rest


def chain_from_rank_0(rank, world_size):
    return algorithms.broadcast(rank, world_size, 100, 0, 10, range(world_size))


@pytest.mark.parametrize("world_size", RANKS)
def test_every_schedule_first_speaks_to_the_next_rank_and_hears_the_previous(world_size):
    """So that ranks in different collectives meet in their first frame."""
    if world_size == 1:
        return
    spans = chunks(100, world_size)
    for rank in range(world_size):
        firsts = {
            (step.send_to, step.receive_from)
            for step in (
                algorithms.dissemination_barrier(rank, world_size)[0],
                algorithms.reduce_scatter(rank, world_size, spans)[0],
                algorithms.all_gather(rank, world_size, spans, range(world_size))[0],
                *([chain_from_rank_0(rank, world_size)[0]] if world_size > algorithms.FEW_RANKS else []),
                algorithms.gather(rank, world_size, spans, 0, (0, 1))[0],
                algorithms.scatter(rank, world_size, spans, 0, (0, 1))[0],
                algorithms.all_to_all(rank, world_size, spans, spans)[0],
            )
        }
        assert firsts == {((rank + 1) % world_size, (rank - 1) % world_size)}


@pytest.mark.parametrize("world_size", RANKS[1:])
def test_who_tells_all_directly_speaks_to_all_before_it_hears_anybody(world_size):
    """So that whoever is in another collective and waits for it hears of this one, whomever it waits for."""
    for rank in range(world_size):
        for schedule in (
            [algorithms.multicast_from(rank, world_size, 1, world_size - 1)],
            *([] if world_size > algorithms.FEW_RANKS else [chain_from_rank_0(rank, world_size)]),
        ):
            first = apart(schedule)[: world_size - 1]
            assert {step.send_to for step in first} == set(range(world_size)) - {rank}
            assert {step.receive_from for step in first} == {None}
