"""Which schedule a collective takes: the sums follow from world size and bytes alone, the ways from where ranks run."""

from __future__ import annotations

import itertools
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep import Lockstep, buffered, own

from cyxtrain.environment.processes import Process
from cyxtrain.ring import engine
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import NOTHING, Multicast, even_spans
from cyxtrain.ring.schedules.selector import ORDERS_WRITES, SEGMENT_BYTES, SHORT_BYTES, AlgorithmSelector
from cyxtrain.ring.schedules.summation import FEW_BYTES, chunks, is_latency_bound

KIB = 1024
ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACES = {
    "one machine": "aaaa",
    "two machines in turns": "abab",
    "two machines, one with more": "aabaab",
    "three machines in turns": "abcabc",
    "three machines, mixed": "acbbac",
    "a machine each": "abcd",
}


def routes_of(places, *, cores=64, all_unix=False):
    """The routes of every rank; the ranks but for the first have so many cores."""
    ranks = range(len(places))
    table = [
        RankRecord(len(places), Process(place, 100 + rank, 0), host="127.0.0.1", cores=cores if rank else 64)
        for rank, place in enumerate(places)
    ]
    return [engine._selector(table, rank, all_unix=all_unix) for rank in ranks]


def crossings(links, places):
    return [(one, other) for one, other in links if places[one] != places[other]]


def gathered(routes, spans, item_bytes):
    """Runs an all_gather; returns how it went and what must come."""
    buffers = [[None] * spans[-1][1] for _ in routes]
    for rank, (start, end) in enumerate(spans):
        buffers[rank][start:end] = own(rank, end - start)
    schedules = [route.all_gather(spans, item_bytes) for route in routes]
    ranks = Lockstep(schedules, buffers, way=buffered).run()
    return ranks, [element for rank, (start, end) in enumerate(spans) for element in own(rank, end - start)]


# --- over several machines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_the_ring_visits_every_machine_once_and_is_the_same_for_all(places):
    routes = routes_of(places)
    ring = routes[0].ring
    assert all(route.ring == ring for route in routes)
    assert sorted(ring) == list(range(len(places)))
    visited = [place for place, _ in itertools.groupby(places[rank] for rank in ring)]
    assert sorted(visited) == sorted(set(places))


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_all_gather_enters_every_machine_over_one_link(places):
    machines = len(set(places))
    ranks, everything = gathered(routes_of(places), even_spans(3, len(places)), SHORT_BYTES)
    assert ranks.results == [everything] * len(places)
    assert len(crossings(ranks.links, places)) == (machines if machines > 1 else 0)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_broadcast_enters_every_machine_over_one_link(places):
    routes, size, machines = routes_of(places), len(places), len(set(places))
    ring = routes[0].ring
    for src in range(size):
        schedules = [route.broadcast(50, src, SHORT_BYTES) for route in routes]
        ranks = Lockstep(schedules, [own(rank, 50) for rank in range(size)], way=buffered).run()
        assert ranks.results == [own(src, 50)] * size
        # It ends before it has come round: the machine of the first is entered only where the first is in its middle.
        before = places[ring[ring.index(src) - 1]]
        entered = machines if machines > 1 and before == places[src] else machines - 1
        assert len(crossings(ranks.links, places)) == entered, src


@pytest.mark.parametrize(
    ("places", "cores", "crowded"),
    [
        ("aaaa", 3, True),  # one rank is bound to fewer cores: all do as it must
        ("aaaa", 4, False),
        ("aaa", 1, True),
        ("aa", 1, False),  # by way of rank 0 it would be as many frames
        ("aaab", 1, False),  # a second round over a network takes longer than what a core has to do
    ],
)
def test_ranks_that_share_the_cores_of_one_machine_meet_by_way_of_rank_0(places, cores, crowded):
    routes = routes_of(places, cores=cores)
    assert [route.oversubscribed for route in routes] == [crowded] * len(places)
    assert [route.is_summing for route in routes] == [True] + [not crowded] * (len(places) - 1)
    frames = [sum(len(tell.to) for tell in route.exchanges()) for route in routes]
    others = len(places) - 1
    assert frames == ([others] + [1] * others if crowded else [others] * len(places))


def exchanges_of(world_size, oversubscribed):
    """The exchanges of every rank, as two steps without elements."""
    ring = tuple(range(world_size))
    schedules = []
    for rank in range(world_size):
        selector = AlgorithmSelector(rank, world_size, ring, oversubscribed=oversubscribed)
        steps = [Multicast(to, NOTHING, sources, (NOTHING,) * len(sources)) for to, sources in selector.exchanges()]
        schedules.append(steps)
    return schedules


@pytest.mark.parametrize("oversubscribed", [False, True])
@pytest.mark.parametrize("world_size", range(2, 10))
def test_after_both_exchanges_every_rank_has_heard_of_all(world_size, oversubscribed):
    schedules = exchanges_of(world_size, oversubscribed)
    assert Lockstep(schedules, [[] for _ in schedules], way=buffered).run().all_heard()


@pytest.mark.parametrize("oversubscribed", [False, True])
@pytest.mark.parametrize("world_size", range(2, 10))
def test_after_the_first_exchange_ranks_that_sum_have_heard_of_all(world_size, oversubscribed):
    schedules = [steps[:1] for steps in exchanges_of(world_size, oversubscribed)]
    ranks = Lockstep(schedules, [[] for _ in schedules], way=buffered).run()
    summing = ranks.received[:1] if oversubscribed else ranks.received
    assert all(heard == set(range(world_size)) for heard in summing)


def test_ranks_of_one_machine_that_turn_up_one_after_the_other_keep_their_order():
    assert list(routes_of("abab")[0].ring) == [0, 2, 1, 3]
    assert list(routes_of("bbaa")[0].ring) == [0, 1, 2, 3]
    assert list(routes_of("acbbac")[0].ring) == [0, 4, 1, 5, 2, 3]


@pytest.mark.parametrize(
    ("places", "all_unix", "shares"),
    [
        ("aa", True, True),
        ("a" * 8, True, True),
        ("a" * 9, True, False),  # more words of counters than there are places for
        ("aaa", False, False),
        ("aab", False, False),
    ],
)
def test_few_ranks_whom_unix_sockets_connect_share_memory(places, all_unix, shares):
    routes = routes_of(places, all_unix=all_unix)
    assert [route.shares_memory for route in routes] == [shares] * len(places)
    for count, item_bytes in ((0, 4), (4 * KIB, 4), (4 * KIB + 1, 4), (16 * KIB + 1, 1), (2**30, 8)):
        long = count * item_bytes > 16 * KIB
        assert {route.is_staged(count, item_bytes) for route in routes} == {shares and long}


@pytest.mark.parametrize(("places", "cores", "counts"), [("aaa", 3, True), ("aaa", 2, False), ("aab", 64, False)])
def test_ranks_with_a_core_each_show_their_progress_in_memory(places, cores, counts):
    routes = routes_of(places, cores=cores, all_unix=True)
    assert [route.uses_counters for route in routes] == [counts and ORDERS_WRITES] * len(places)


# --- what sums in which order ---------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(0, 2**24), st.sampled_from([1, 2, 4, 8, 16]))
def test_whether_few_are_summed_by_a_tree_follows_from_their_bytes(world_size, count, item_bytes):
    assert is_latency_bound(world_size, count, item_bytes) == (world_size > 1 and count * item_bytes <= 256 * KIB)
    assert FEW_BYTES == 256 * KIB


@given(st.integers(2, 64), st.integers(0, 2**16), st.sampled_from([1, 2, 4, 8, 16]))
def test_all_are_told_only_what_fits_into_the_scratch_of_each(world_size, count, item_bytes):
    ring = tuple(range(world_size))
    for routes in (
        AlgorithmSelector(0, world_size, ring),
        AlgorithmSelector(world_size - 1, world_size, ring, shares_memory=True),
    ):
        is_tiny = routes.is_tiny(count, item_bytes)
        assert is_tiny == (1 < world_size <= 8 and count * item_bytes <= 16 * KIB)
        assert not is_tiny or (
            is_latency_bound(world_size, count, item_bytes) and world_size * count * item_bytes <= SEGMENT_BYTES
        )


@given(st.integers(2, 64), st.integers(0, 2**16), st.sampled_from([1, 2, 4, 8, 16]))
def test_nobody_sends_much_to_all_before_it_listens(world_size, count, item_bytes):
    """Such sends would wait for each other where the kernel's buffers are full."""
    routes, spans = AlgorithmSelector(0, world_size, tuple(range(world_size))), even_spans(count, world_size)
    for schedule in (routes.all_gather(spans, item_bytes), routes.broadcast(count, 1, item_bytes)):
        first = schedule[0]
        if isinstance(first, Multicast):
            assert world_size <= 8
            assert first.send == NOTHING or count * item_bytes <= 16 * KIB
        else:
            assert None not in (first.send_to, first.receive_from)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_over_machines_all_reduce_sums_in_the_same_order_as_on_one(world_size):
    """A ring that enters every machine once copies; what sums goes from rank to rank."""
    for count in (0, 1, world_size - 1, world_size, 2 * world_size + 1):
        spans = chunks(count, world_size)
        found = []
        for places in ("a" * world_size, "abcdefgh"[:world_size], "abababab"[:world_size]):
            schedules = [
                [
                    *algorithms.reduce_scatter(rank, world_size, spans),
                    *route.all_gather(spans, SHORT_BYTES + 1),
                ]
                for rank, route in enumerate(routes_of(places))
            ]
            buffers = [own(rank, count) for rank in range(world_size)]
            found.append(Lockstep(schedules, buffers, way=buffered).run().results)
        assert found == [[found[0][0]] * world_size] * 3, count


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gather_and_broadcast_bring_the_same_around_the_limit(world_size):
    item_bytes = SHORT_BYTES // 8
    for count in (0, 1, 7, 8, 9, 17):
        for places in ("a" * world_size, "abab"[:world_size]):
            routes = routes_of(places)
            ranks, everything = gathered(routes, even_spans(count, world_size), item_bytes)
            assert ranks.results == [everything] * world_size
            schedules = [route.broadcast(count, world_size - 1, item_bytes) for route in routes]
            buffers = [own(rank, count) for rank in range(world_size)]
            ranks = Lockstep(schedules, buffers, way=buffered).run()
            assert ranks.results == [own(world_size - 1, count)] * world_size


# --- the table of docs/ring.md ---------------------------------------------------------------------------------------

SIZES = {
    "up to 16 KiB": (1, 16 * KIB),
    "up to 256 KiB": (16 * KIB + 4, 256 * KIB),
    "more": (256 * KIB + 4, 100 * 1024 * KIB),
}
SHARED = {"shares_memory": True}
SELECTORS = {
    "Unix sockets": [*[(size, SHARED) for size in (2, 3, 8)], (3, {**SHARED, "oversubscribed": True})],
    "more than 8 ranks of one machine": [(9, {})],
    "TCP, or several machines": [(2, {}), (8, {})],
}
STAGED = "staged in shared memory"


def table_of_paths():
    """The rows of the table, as {size: {place: path}}."""
    lines = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| all_reduce of |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines[first:])]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def way_of(selector, count):
    """The way that a group takes for so many elements of 4 bytes: the first of these."""
    if selector.is_tiny(count, 4):
        return "small reduction"
    if selector.is_staged(count, 4):
        return STAGED
    return "recursive doubling" if is_latency_bound(selector.world_size, count, 4) else "ring"


def test_every_cell_of_the_table_is_what_the_selector_chooses():
    table = table_of_paths()
    assert list(table) == list(SIZES)
    for size, byte_counts in SIZES.items():
        assert list(table[size]) == list(SELECTORS)
        for place, worlds in SELECTORS.items():
            for (world_size, facts), byte_count in itertools.product(worlds, byte_counts):
                selector = AlgorithmSelector(0, world_size, tuple(range(world_size)), **facts)
                count = -(-byte_count // 4)
                assert way_of(selector, count) == table[size][place], (size, place, world_size, byte_count)
