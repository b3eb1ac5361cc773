"""Large collectives, through shared memory and over plain links, while ranks go on, are interrupted or do not agree.

Here are whole groups, as threads, so that every rank is seen. test_ring_shared_reduce.py has the bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from markers import by_night, nightly_where
from ring_values import (
    Op,
    all_reduce,
    barrier,
    broadcast,
    error_of,
    exchange,
    gather_all,
    options,
    reduce_all,
    scatter_all,
    with_cores,
)
from worlds import run_threads, wait_until

from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError, PeerLostError
from cyxtrain.ring import engine
from cyxtrain.ring.schedules.kernels import Combiner, Reduction
from cyxtrain.ring.schedules.selector import ORDERS_WRITES, WINDOW_BYTES
from cyxtrain.ring.shared_memory.barrier import SharedMemoryBarrier
from cyxtrain.ring.wire.frames import Kind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share no memory on this system")
MIB = 2**20
LARGE = 500_003
MEETINGS = 8
"""Of an all_reduce of 4 * LARGE elements: two in each window."""
GARBAGE = -7.0
MEET = SharedMemoryBarrier.arrive
TCP = RingOptions(transport="tcp")


def travels(group):
    """How, and whether through shared memory."""
    staged = group.group.engine.staged.find(Kind.ALL_REDUCE, torch.zeros(LARGE), Reduction.SUM)
    return group.group.engine.transport, staged is not None


SHARED, PLAIN = ("unix", True), ("tcp", False)


def open_shared_memory(group):
    """The first large one makes it."""
    all_reduce(group, torch.zeros(LARGE))
    assert travels(group) == SHARED


# --- a rank that goes on at once ------------------------------------------------------------------------------------


def summed(group, count, turn):
    tensor = torch.full((count,), float(turn + group.rank()))
    all_reduce(group, tensor)
    return [tensor], tensor, sum(turn + rank for rank in range(group.size()))


def scattered(group, count, turn):
    part, whole = torch.empty(count // group.size()), torch.full((count // group.size() * group.size(),), float(turn))
    group.reduce_scatter_single(part, whole, options(dist.ReduceScatterOptions, reduceOp=Op.SUM)).wait()
    return [part, whole], part, turn * group.size()


def gathered(group, count, turn):
    mine = torch.full((count // group.size(),), float(turn + group.rank()))
    whole = torch.empty(len(mine) * group.size())
    group.all_gather_single(whole, mine).wait()
    expected = torch.arange(turn, turn + group.size()).float().repeat_interleave(len(mine))
    return [mine, whole], whole, expected


def copied(group, count, turn):
    src = turn % group.size()
    tensor = torch.full((count,), float(turn if group.rank() == src else GARBAGE))
    group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=src)).wait()
    return [tensor], tensor, turn


def reduced_to_one(group, count, turn):
    dst = turn % group.size()
    tensor = torch.full((count,), float(turn))
    group.reduce([tensor], options(dist.ReduceOptions, rootRank=dst, reduceOp=Op.SUM)).wait()
    return [tensor], tensor, turn * group.size() if group.rank() == dst else turn


def exchanged(group, count, turn):
    each = count // group.size()
    mine = torch.full((each * group.size(),), float(turn + group.rank()))
    whole = torch.empty_like(mine)
    group.all_to_all_single(whole, mine, [], []).wait()
    return [mine, whole], whole, torch.arange(turn, turn + group.size()).float().repeat_interleave(each)


COLLECTIVES = [summed, scattered, gathered, copied, reduced_to_one, exchanged]


def go_through(group, rounds, seed):
    """Overwrites every tensor as soon as its collective has returned; returns the rounds with a wrong result."""
    shared, own, wrong = random.Random(seed), random.Random(f"{seed} {group.rank()}"), []
    for turn in range(1, rounds + 1):
        call, count = shared.choice(COLLECTIVES), shared.choice([MIB // 4, MIB // 4 + 1, 600_001, MIB])
        if own.random() < 0.5:
            time.sleep(own.random() * 0.002)  # another rank comes first each time
        tensors, found, expected = call(group, count, turn)
        if not bool((found == expected).all()):
            wrong.append((turn, call.__name__, count))
        for tensor in tensors:
            tensor.fill_(GARBAGE)
    return travels(group), wrong


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 100), by_night(2, 200), by_night(3, 200), by_night(4, 100)])
def test_a_rank_that_overwrites_its_tensor_at_once_changes_nothing_for_the_others(world_size, rounds):
    found = run_threads(world_size, lambda group: go_through(group, rounds, world_size))
    assert found == [(SHARED, [])] * world_size


@pytest.mark.nightly
@pytest.mark.parametrize(("ring_options", "way"), [(None, SHARED), (TCP, PLAIN)], ids=["auto", "tcp"])
@with_cores(*((size, cores) for size in (2, 3, 4, 5) for cores in (1, 5)))
def test_and_not_in_a_thousand_rounds(world_size, cores, ring_options, way):
    found = run_threads(
        world_size, lambda group: go_through(group, 1000, 7 * world_size), seconds=110.0, options=ring_options
    )
    assert found == [(way, [])] * world_size


def count_meetings(monkeypatch, change):
    """Has `change(number, meeting)` called for each of rank 1; returns how often each rank has come to one."""
    came = {}

    def counted(meeting):
        name = threading.current_thread().name
        came[name] = came.get(name, 0) + 1
        return change(came[name], meeting) if name == "rank 1" else MEET(meeting)

    monkeypatch.setattr(SharedMemoryBarrier, "arrive", counted)
    return came


@nightly_where(lambda call, cores: cores == 1 and call is not summed)
@with_cores((3, 1), (3, 3))
@pytest.mark.parametrize("call", COLLECTIVES[:4])
def test_nobody_goes_on_before_the_last_one_has_come(world_size, cores, call, monkeypatch):
    """Rank 1 comes to each meeting only when the others have nothing more to do than to wait for it."""

    def come_last(number, meeting):
        wait_until(lambda: min(came.get("rank 0", 0), came.get("rank 2", 0)) >= number)
        return MEET(meeting)

    def rank_main(group):
        open_shared_memory(group)
        tensors, found, expected = call(group, 3 * WINDOW_BYTES // 4 + 7, 2)
        right = bool((found == expected).all())
        for tensor in tensors:
            tensor.fill_(GARBAGE)
        group.barrier()
        return right

    came = count_meetings(monkeypatch, come_last)
    assert run_threads(world_size, rank_main) == [True] * world_size
    assert came["rank 1"] >= 4
    assert len(set(came.values())) == 1


@nightly_where(lambda at, world_size: at == 3 or world_size == 3)
@pytest.mark.skipif(not ORDERS_WRITES, reason="nothing is shown in memory on this system")
@with_cores((2, 2), (3, 3))
@pytest.mark.parametrize("at", [1, 3])
def test_a_rank_that_comes_late_to_a_window_is_asked_and_the_links_stay_whole(world_size, cores, at, monkeypatch):
    def come_late(number, meeting):
        if number == at:
            wait_until(lambda: all(counter.has_asked(meeting.operation.sequence) for counter in meeting.counters))
            asked.append(len(meeting.counters))
        return MEET(meeting)

    def rank_main(group):
        open_shared_memory(group)
        found = [all_reduce(group, torch.ones(4 * LARGE)).unique().tolist() for _ in range(2)]
        group.barrier().wait()  # of frames: no question may be left before them
        return found

    asked = []
    count_meetings(monkeypatch, come_late)
    assert run_threads(world_size, rank_main) == [[[float(world_size)]] * 2] * world_size
    assert asked == [world_size - 1]


@nightly_where(lambda cores: cores == 1)
@with_cores((3, 1), (3, 3))
def test_without_meetings_this_would_be_noticed(world_size, cores, monkeypatch):
    monkeypatch.setattr(SharedMemoryBarrier, "arrive", lambda meeting: ())
    found = run_threads(world_size, lambda group: go_through(group, 40, 5))
    assert any(wrong for _, wrong in found)


# --- a rank that is interrupted -------------------------------------------------------------------------------------


def check_interrupted(world_size, rank_main_before, ring_options):
    """The rank overwrites its memory as soon as it is interrupted, as a user's program would that goes on."""

    def rank_main(group):
        rank_main_before(group)
        tensor, number = torch.full((4 * LARGE,), 1.0), group.group.engine.sequence + 1
        if group.rank() != 1:
            return number, error_of(lambda: all_reduce(group, tensor))
        with pytest.raises(KeyboardInterrupt):
            all_reduce(group, tensor)
        tensor.fill_(GARBAGE)
        return number, error_of(lambda: group.barrier())

    for number, error in run_threads(world_size, rank_main, options=ring_options):
        assert (type(error), error.rank) == (PeerLostError, 1)
        call = f"all_reduce #{number} (SUM, float32 [2000012])"
        assert f"rank 1 was interrupted in {call} by KeyboardInterrupt" in str(error)


@nightly_where(lambda at, world_size, cores: world_size > 2 and (at == 2 or (world_size, cores) != (3, 3)))
@with_cores((2, 1), (3, 1), (3, 3), (4, 3), (4, 4))
@pytest.mark.parametrize("at", [1, 2, 5, MEETINGS])
def test_nobody_returns_from_a_call_in_which_a_rank_was_interrupted_in_shared_memory(
    world_size, at, monkeypatch, cores
):
    def interrupting(number, meeting):
        if number == at:
            raise KeyboardInterrupt
        return MEET(meeting)

    came = count_meetings(monkeypatch, interrupting)
    check_interrupted(world_size, open_shared_memory, None)
    assert came["rank 1"] == at


@nightly_where(lambda at, world_size: world_size == 3 or (world_size == 4 and at != 2))
@with_cores((2, 1), (3, 1), (4, 4))
@pytest.mark.parametrize("at", [1, 2, 4])
def test_nor_over_plain_links(world_size, at, monkeypatch, cores):
    def interrupting(combiner, first, end, **keywords):
        if threading.current_thread().name == "rank 1":
            combines.append(first)
            if len(combines) == at:
                raise KeyboardInterrupt
        combine(combiner, first, end, **keywords)

    combine, combines = Combiner.combine, []
    monkeypatch.setattr(Combiner, "combine", interrupting)
    check_interrupted(world_size, lambda group: None, TCP)


@nightly_where(lambda world_size, cores: (world_size, cores) in ((3, 1), (4, 4)))
@with_cores((2, 1), (3, 1), (3, 3), (4, 4))
def test_who_did_return_before_a_rank_was_interrupted_has_the_right_result(world_size, monkeypatch, cores):
    """Rank 1 is interrupted when it has told that all is there, before it takes it."""

    def interrupted(number, meeting):
        exchanges = MEET(meeting)
        if number == MEETINGS:
            raise KeyboardInterrupt
        return exchanges

    def rank_main(group):
        open_shared_memory(group)
        tensor = torch.full((4 * LARGE,), 1.0 + group.rank())
        try:
            all_reduce(group, tensor)
        except KeyboardInterrupt:
            tensor.fill_(GARBAGE)
            return "interrupted"
        except PeerLostError as error:
            return f"lost rank {error.rank}"
        return "right" if bool((tensor == sum(range(world_size + 1))).all()) else "wrong"

    count_meetings(monkeypatch, interrupted)
    found = run_threads(world_size, rank_main)
    assert found[1] == "interrupted"
    assert set(found[:1] + found[2:]) <= {"lost rank 1", "right"}, found


# --- ranks that call something else ---------------------------------------------------------------------------------

MANY, TREE, FEW = reduce_all((LARGE,)), reduce_all((60_000,)), reduce_all((3,))
MISMATCHES = {
    "shape": (MANY, reduce_all((LARGE + 1,))),
    "shape, broadcast": (broadcast(0, (LARGE,)), broadcast(0, (LARGE + 1,))),
    "shape, all_gather": (gather_all((LARGE,)), gather_all((LARGE + 1,))),
    "dtype": (MANY, reduce_all((LARGE,), torch.int32)),
    "reduction": (MANY, reduce_all((LARGE,), op=Op.MAX)),
    "broadcasts of few and of many": (broadcast(0, (3,)), broadcast(0, (LARGE,))),
    "operation": (MANY, broadcast(0, (LARGE,))),
    "operation, of all": (MANY, gather_all((LARGE,))),
    "many and few": (MANY, FEW),
    "many and a tree": (MANY, TREE),
    "a tree and few": (TREE, FEW),
    "a tree and a barrier": (TREE, barrier),
    "a tree and a broadcast": (TREE, broadcast(0, (LARGE,))),
    "a tree and an all_gather": (TREE, gather_all((LARGE,))),
    "a tree and an exchange": (TREE, exchange(LARGE)),
    "many and a barrier": (MANY, barrier),
    "an all_gather and a barrier": (gather_all((LARGE,)), barrier),
    "src": (broadcast(0, (LARGE,)), broadcast(1, (LARGE,))),
    "shape of as many": (reduce_all((LARGE, 2)), reduce_all((2, LARGE))),
    "dtype of as many bytes": (MANY, reduce_all((LARGE // 2,), torch.float64)),
    "sum and mean": (MANY, reduce_all((LARGE,), op=Op.AVG)),
    "dtype, broadcast": (broadcast(0, (LARGE,)), broadcast(0, (LARGE,), torch.int32)),
    "dtype, all_gather": (gather_all((LARGE,)), gather_all((LARGE,), torch.int32)),
    "a broadcast and an all_gather": (broadcast(0, (LARGE,)), gather_all((LARGE,))),
    "shape, reduce_scatter": (scatter_all(LARGE), scatter_all(LARGE + 1)),
    "reduction, reduce_scatter": (scatter_all(LARGE), scatter_all(LARGE, Op.AVG)),
    "a reduce_scatter and an all_reduce": (scatter_all(LARGE), MANY),
    "a reduce_scatter and a barrier": (scatter_all(LARGE), barrier),
    "one window and many": (MANY, reduce_all((6 * LARGE,))),
}
BY_DAY = {
    "shape",
    "dtype",
    "reduction",
    "operation",
    "many and few",
    "many and a tree",
    "a tree and a barrier",
    "many and a barrier",
    "src",
    "sum and mean",
    "a broadcast and an all_gather",
    "a reduce_scatter and an all_reduce",
    "one window and many",
}
"""One of each way in which two calls can differ, and of each pair of routes."""
SECONDS = 1.0
WAYS = ["unix", "unix, in turns", "tcp"]
"""In turns: as if the ranks ran on two machines, every second one on each. The first of all goes over plain links."""


def check_differing(what, world_size, odd_ranks, *, ring_options=None, before=None):
    """Whichever rank is the odd one, and whichever calls what, all must learn it soon."""
    for odd_rank, (even, odd) in itertools.product(odd_ranks, (MISMATCHES[what], MISMATCHES[what][::-1])):
        for rank, (error, seconds) in enumerate(differing(world_size, even, odd, odd_rank, ring_options, before)):
            story = f"rank {rank}, with rank {odd_rank} in {MISMATCHES[what].index(odd)}: {error}"
            assert isinstance(error, CollectiveMismatchError), story
            assert "Every rank must make the same calls" in str(error)
            assert seconds < SECONDS, story


def differing(world_size, even, odd, odd_rank, ring_options, before):
    """How each rank learns that one calls something else: the error, and after how long."""
    began = threading.Barrier(world_size)

    def rank_main(group):
        if before is not None:
            before(group)
        began.wait()
        start = time.monotonic()
        error = error_of(lambda: (odd if group.rank() == odd_rank else even)(group))
        return error, time.monotonic() - start

    # The deadline of a collective is the end of a mismatch that nobody notices.
    return run_threads(world_size, rank_main, collective_seconds=3.0, options=ring_options)


def over_plain_links(way, monkeypatch):
    """The options of a ring whose first large collective goes that way."""
    transport, _, in_turns = way.partition(",")
    if in_turns:
        routes = engine._selector

        def in_another_order(records, rank, *, all_unix):
            found = routes(records, rank, all_unix=all_unix)
            return dataclasses.replace(found, ring=(*range(0, found.world_size, 2), *range(1, found.world_size, 2)))

        monkeypatch.setattr(engine, "_selector", in_another_order)
    return RingOptions(transport=transport)


@nightly_where(lambda what: what not in BY_DAY)
@pytest.mark.parametrize("way", [WAYS[0], *map(by_night, WAYS[1:])])
@pytest.mark.parametrize("what", MISMATCHES)
def test_large_calls_that_differ_are_an_error_on_every_rank_within_a_second(what, way, monkeypatch):
    check_differing(what, 3, [0], ring_options=over_plain_links(way, monkeypatch))


@nightly_where(lambda what, cores: cores == 3 or what not in BY_DAY)
@with_cores((3, 1), (3, 3))
@pytest.mark.parametrize("what", MISMATCHES)
def test_also_where_they_pass_through_shared_memory(what, world_size, cores):
    """With a core each they find each other out by progress counters, otherwise by frames."""
    check_differing(what, world_size, [0], before=open_shared_memory)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("what", MISMATCHES)
def test_and_on_any_number_of_ranks_whichever_is_the_odd_one(what, world_size, way, monkeypatch):
    check_differing(what, world_size, range(world_size), ring_options=over_plain_links(way, monkeypatch))


@pytest.mark.nightly
@with_cores(*((size, cores) for size in (2, 3, 4, 5) for cores in (1, size)))
@pytest.mark.parametrize("what", MISMATCHES)
def test_and_so_through_shared_memory(what, world_size, cores):
    check_differing(what, world_size, range(world_size), before=open_shared_memory)
