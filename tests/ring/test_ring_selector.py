"""Which schedule a collective takes: the sums follow from world size and bytes alone, the ways from where ranks run."""

from __future__ import annotations

import itertools
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep import Lockstep, Way, own

from cyxtrain.environment.processes import Process
from cyxtrain.ring import group
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.rendezvous import RendezvousResult
from cyxtrain.ring.schedules.algorithms import NOTHING, Multicast, ReadReduce, chunks, even_spans
from cyxtrain.ring.schedules.selector import (
    ADVERTISED_BYTES,
    FEW_BYTES,
    SEGMENT_BYTES,
    AlgorithmSelector,
    Path,
    is_latency_bound,
)
from cyxtrain.ring.wire.transfers import is_advertised

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


def routes_of(places, unread=(), cores=64):
    """The routes of every rank, where each can read all of its machine but for the pairs (reader, other) named."""
    ranks = range(len(places))
    table = [
        RankRecord(len(places), Process(place, 100 + rank, 0), host="127.0.0.1", cores=cores if rank else 64)
        for rank, place in enumerate(places)
    ]
    readers = [
        {other for other in ranks if other != rank and places[other] == places[rank] and (rank, other) not in unread}
        for rank in ranks
    ]
    return [group._selector(RendezvousResult(table=table, readable_by_rank=readers), rank) for rank in ranks]


def way_of(routes, item_bytes):
    """What is offered where ranks of one machine read each other, as long as a payload is long enough."""

    def way(sender, receiver, length, then):
        return Way.OFFERED if is_advertised(routes[sender].can_read_peers, length * item_bytes, then) else Way.BUFFERED

    return way


def crossings(links, places):
    return [(one, other) for one, other in links if places[one] != places[other]]


def gathered(routes, spans, item_bytes):
    """Runs an all_gather; returns how it went and what must come."""
    buffers = [[None] * spans[-1][1] for _ in routes]
    for rank, (start, end) in enumerate(spans):
        buffers[rank][start:end] = own(rank, end - start)
    schedules = [route.all_gather(spans, item_bytes) for route in routes]
    ranks = Lockstep(schedules, buffers, way=way_of(routes, item_bytes)).run()
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
    assert [route.can_read_peers for route in routes] == [places == "aaaa"] * len(places)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_all_gather_enters_every_machine_over_one_link(places):
    machines = len(set(places))
    ranks, everything = gathered(routes_of(places), even_spans(3, len(places)), ADVERTISED_BYTES)
    assert ranks.results == [everything] * len(places)
    assert len(crossings(ranks.links, places)) == (machines if machines > 1 else 0)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_broadcast_enters_every_machine_over_one_link(places):
    routes, size, machines = routes_of(places), len(places), len(set(places))
    ring = routes[0].ring
    for src in range(size):
        schedules = [route.broadcast(50, src, ADVERTISED_BYTES) for route in routes]
        ranks = Lockstep(schedules, [own(rank, 50) for rank in range(size)], way=way_of(routes, ADVERTISED_BYTES)).run()
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
    frames = [sum(len(tell.to) for tell in route.exchanges(1)) for route in routes]
    others = len(places) - 1
    assert frames == ([others] + [1] * others if crowded else [others] * len(places))


def test_ranks_of_one_machine_that_turn_up_one_after_the_other_keep_their_order():
    assert list(routes_of("abab")[0].ring) == [0, 2, 1, 3]
    assert list(routes_of("bbaa")[0].ring) == [0, 1, 2, 3]
    assert list(routes_of("acbbac")[0].ring) == [0, 4, 1, 5, 2, 3]


@pytest.mark.parametrize("unread", [(0, 1), (2, 1)])
def test_one_pair_that_cannot_read_sends_all_of_them_around_the_ring(unread):
    routes = routes_of("aaa", unread=[unread])
    assert [route.can_read_peers for route in routes] == [False] * 3
    spans = chunks(90, 3)
    for route in routes:
        assert not any(isinstance(step, ReadReduce) for step in route.reduce_scatter(spans, ADVERTISED_BYTES))
        assert len(route.all_gather(spans, ADVERTISED_BYTES)) == 2


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
        AlgorithmSelector(world_size - 1, world_size, ring, can_read_peers=True),
    ):
        is_tiny = routes.is_tiny(count, item_bytes)
        assert is_tiny == (world_size <= 8 and count * item_bytes <= 16 * KIB)
        assert not is_tiny or (
            is_latency_bound(world_size, count, item_bytes) and world_size * count * item_bytes <= SEGMENT_BYTES
        )


@given(st.integers(2, 64), st.integers(0, 2**16), st.sampled_from([1, 2, 4, 8, 16]))
def test_nobody_sends_much_to_all_before_it_listens(world_size, count, item_bytes):
    """Such sends would wait for each other where the kernel's buffers are full; what is read is not sent."""
    routes, spans = AlgorithmSelector(0, world_size, tuple(range(world_size))), even_spans(count, world_size)
    for schedule in (routes.all_gather(spans, item_bytes), routes.broadcast(count, 1, item_bytes)):
        first = schedule[0]
        if isinstance(first, Multicast):
            assert world_size <= 8
            assert first.send == NOTHING or count * item_bytes <= 16 * KIB
        else:
            assert None not in (first.send_to, first.receive_from)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_what_is_read_is_summed_in_the_order_of_what_is_sent(world_size):
    """Elements are as large as an eighth of an advertised payload, so that a few of them lie around every limit."""
    item_bytes = ADVERTISED_BYTES // 8
    near, far = routes_of("a" * world_size), routes_of("abcdefgh"[:world_size])
    folded = []
    for count in range(2 * 8 * world_size + 2):
        spans = chunks(count, world_size)
        found = []
        for routes in (near, far):
            schedules = [
                [*route.reduce_scatter(spans, item_bytes), *route.all_gather(spans, item_bytes)] for route in routes
            ]
            buffers = [own(rank, count) for rank in range(world_size)]
            found.append(Lockstep(schedules, buffers, way=way_of(routes, item_bytes)).run().results)
        assert found[0] == found[1], count
        assert found[0] == found[0][:1] * world_size
        if any(isinstance(step, ReadReduce) for step in near[0].reduce_scatter(spans, item_bytes)):
            folded.append(count)
    assert folded == list(range(8 * world_size, 2 * 8 * world_size + 2))  # from an offer for each rank on


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gather_and_broadcast_bring_the_same_around_the_limit(world_size):
    for count in (0, 1, 7, 8, 9, 17):
        for places in ("a" * world_size, "abab"[:world_size]):
            routes = routes_of(places)
            ranks, everything = gathered(routes, even_spans(count, world_size), ADVERTISED_BYTES // 8)
            assert ranks.results == [everything] * world_size
            schedules = [route.broadcast(count, world_size - 1, ADVERTISED_BYTES // 8) for route in routes]
            buffers = [own(rank, count) for rank in range(world_size)]
            ranks = Lockstep(schedules, buffers, way=way_of(routes, ADVERTISED_BYTES // 8)).run()
            assert ranks.results == [own(world_size - 1, count)] * world_size


# --- the table of docs/ring.md ---------------------------------------------------------------------------------------

SIZES = {
    "up to 16 KiB": (1, 16 * KIB),
    "up to 256 KiB": (16 * KIB + 4, 256 * KIB),
    "up to 1 MiB": (256 * KIB + 4, 1024 * KIB),
    "up to 4 MiB": (2048 * KIB, 4096 * KIB),
    "more": (4096 * KIB + 4, 100 * 1024 * KIB),
}
SHARED = {"shares_memory": True, "can_read_peers": True}
SELECTORS = {
    "Unix sockets": [(2, SHARED), (3, SHARED), (8, SHARED)],
    "cores shared": [(size, {**SHARED, "oversubscribed": True}) for size in (3, 8)],
    "no reading": [(2, {"shares_memory": True}), (8, {"shares_memory": True})],
    "more than 8 ranks of one machine": [(9, {"can_read_peers": True})],
    "TCP, or several machines": [(2, {}), (8, {})],
}


def table_of_paths():
    """The rows of the table, as {size: {place: path}}."""
    lines = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| all_reduce of |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines[first:])]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def test_every_cell_of_the_table_is_what_the_selector_chooses():
    table = table_of_paths()
    assert list(table) == list(SIZES)
    for size, byte_counts in SIZES.items():
        assert list(table[size]) == list(SELECTORS)
        for place, worlds in SELECTORS.items():
            for (world_size, facts), byte_count in itertools.product(worlds, byte_counts):
                selector = AlgorithmSelector(0, world_size, tuple(range(world_size)), **facts)
                path = selector.path(-(-byte_count // 4), 4)
                assert path.value == table[size][place], (size, place, world_size, byte_count)


@given(st.integers(1, 16), st.integers(0, 2**23), st.booleans(), st.booleans(), st.booleans())
def test_what_is_not_staged_takes_a_path_with_the_same_order_of_sums(world_size, count, shares, reads, crowded):
    facts = {"shares_memory": shares, "can_read_peers": reads, "oversubscribed": crowded}
    selector = AlgorithmSelector(0, world_size, tuple(range(world_size)), **facts)
    other = selector.path(count, 4, may_stage=False)
    assert other is not Path.STAGED
    assert selector.path(count, 4) in (other, Path.STAGED)
    if world_size > 1:
        assert is_latency_bound(world_size, count, 4) == (other not in (Path.READ, Path.RING))
