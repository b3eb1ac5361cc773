"""Ranks that read each other's memory while something goes wrong, or while its owner has long gone on.

test_ring_peer_read.py has the schedules; here are whole groups, as threads, so that every rank is seen.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ring_values import WORLDS, Op, all_reduce, barrier, broadcast, error_of, exchange, gather_all, options, reduce_all
from worlds import run_threads

from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError, PeerLostError
from cyxtrain.ring import group as group_module
from cyxtrain.ring.executor import Executor
from cyxtrain.ring.schedules.kernels import Combiner
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.wire.peer_read import PeerMemory, allow_peer_reads

pytestmark = pytest.mark.skipif(not allow_peer_reads(), reason="no process can read another's memory on this system")
MIB = 2**20
LARGE = 500_003
GARBAGE = -7.0


CMA, UNIX = RingOptions(transport="cma"), RingOptions(transport="unix")
TRANSPORTS = pytest.mark.parametrize("options_of_ring", [CMA, UNIX], ids=["cma", "unix"])


def travels(group):
    return group._group.transport


# --- a rank that goes on at once ------------------------------------------------------------------------------------


def summed(group, count, turn):
    tensor = torch.full((count,), float(turn + group.rank()))
    all_reduce(group, tensor)
    return [tensor], tensor, sum(turn + rank for rank in range(group.size()))


def scattered(group, count, turn):
    part, whole = torch.empty(count // group.size()), torch.full((count // group.size() * group.size(),), float(turn))
    group.reduce_scatter_single(part, whole, options(dist.ReduceScatterOptions, reduceOp=Op.SUM))
    return [part, whole], part, turn * group.size()


def gathered(group, count, turn):
    mine = torch.full((count // group.size(),), float(turn + group.rank()))
    whole = torch.empty(len(mine) * group.size())
    group.all_gather_single(whole, mine)
    expected = torch.arange(turn, turn + group.size()).float().repeat_interleave(len(mine))
    return [mine, whole], whole, expected


def copied(group, count, turn):
    src = turn % group.size()
    tensor = torch.full((count,), float(turn if group.rank() == src else GARBAGE))
    group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=src))
    return [tensor], tensor, turn


def reduced_to_one(group, count, turn):
    dst = turn % group.size()
    tensor = torch.full((count,), float(turn))
    group.reduce([tensor], options(dist.ReduceOptions, rootRank=dst, reduceOp=Op.SUM))
    return [tensor], tensor, turn * group.size() if group.rank() == dst else turn


def exchanged(group, count, turn):
    each = count // group.size()
    mine = torch.full((each * group.size(),), float(turn + group.rank()))
    whole = torch.empty_like(mine)
    group.all_to_all_single(whole, mine, [], [])
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


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 200), (3, 200), (4, 100)])
def test_a_rank_that_overwrites_its_tensor_at_once_changes_nothing_for_the_others(world_size, rounds):
    assert (
        run_threads(world_size, lambda group: go_through(group, rounds, world_size), options=CMA)
        == [("cma", [])] * world_size
    )


@pytest.mark.nightly
@TRANSPORTS
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_and_not_in_a_thousand_rounds(world_size, options_of_ring):
    found = run_threads(
        world_size, lambda group: go_through(group, 1000, 7 * world_size), seconds=110.0, options=options_of_ring
    )
    assert found == [(options_of_ring.transport, [])] * world_size


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_late_reader_still_reads_what_was_offered(call, monkeypatch):
    """Rank 1 begins each of its reads only when the others have nothing more to do than to wait for it."""
    read, slow = Link.read, []

    def slowly(link, address, into):
        if threading.current_thread().name == "rank 1" and len(slow) < 8:
            slow.append(link.rank)
            time.sleep(0.01)
        read(link, address, into)

    def rank_main(group):
        tensors, found, expected = call(group, 3 * MIB // 4, 2)
        right = bool((found == expected).all())
        for tensor in tensors:
            tensor.fill_(GARBAGE)
        group.barrier()
        return right

    monkeypatch.setattr(Link, "read", slowly)
    assert run_threads(3, rank_main, options=CMA) == [True] * 3
    assert slow


def test_without_the_last_word_of_the_readers_this_would_be_noticed(monkeypatch):
    monkeypatch.setattr(Executor, "_acknowledge", lambda mesh, call: None)
    found = run_threads(3, lambda group: go_through(group, 40, 5), options=CMA)
    assert any(wrong for _, wrong in found)


# --- a rank that is interrupted, or that another has lost -----------------------------------------------------------


@TRANSPORTS
@WORLDS
@pytest.mark.parametrize("at", [1, 2, 4])
def test_nobody_returns_from_a_call_in_which_a_rank_was_interrupted_while_it_was_read(
    world_size, at, options_of_ring, monkeypatch, cores
):
    """The rank overwrites its memory as soon as it is interrupted, as a user's program would that goes on."""

    def interrupting(combiner, first, end, **keywords):
        if threading.current_thread().name == "rank 1":
            combines.append(first)
            if len(combines) == at:
                raise KeyboardInterrupt
        combine(combiner, first, end, **keywords)

    def rank_main(group):
        tensor = torch.full((4 * LARGE,), 1.0)
        if group.rank() != 1:
            return error_of(lambda: all_reduce(group, tensor))
        with pytest.raises(KeyboardInterrupt):
            all_reduce(group, tensor)
        tensor.fill_(GARBAGE)
        return error_of(lambda: group.barrier())

    combine, combines = Combiner.combine, []
    monkeypatch.setattr(Combiner, "combine", interrupting)
    for error in run_threads(world_size, rank_main, options=options_of_ring):
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert "rank 1 was interrupted in all_reduce #1 (SUM, float32 [2000012]) by KeyboardInterrupt" in str(error)


@WORLDS
def test_who_did_return_before_a_rank_was_interrupted_has_the_right_result(world_size, monkeypatch, cores):
    """Rank 1 is interrupted as it waits for its readers to say that they have read: only they may still be at work."""

    def interrupted(mesh, call):
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        settle(mesh, call)

    def rank_main(group):
        tensor = torch.full((LARGE,), 1.0 + group.rank())
        try:
            all_reduce(group, tensor)
        except KeyboardInterrupt:
            tensor.fill_(GARBAGE)
            return "interrupted"
        except PeerLostError as error:
            return error.rank
        return bool((tensor == sum(range(world_size + 1))).all())

    settle = Executor._acknowledge
    monkeypatch.setattr(Executor, "_acknowledge", interrupted)
    found = run_threads(world_size, rank_main, options=CMA)
    assert found[1] == "interrupted"
    assert all(result in (1, True) and result is not False for result in found[:1] + found[2:]), found


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_that_cannot_be_read_any_more_is_the_end_of_a_group_and_no_wrong_result(world_size, monkeypatch):
    """As where its owner has just ended: the kernel finds no such process."""

    def gone(memory, address, into, count):
        if threading.current_thread().name == "rank 0" and count > 100:
            raise ProcessLookupError(3, "No such process")
        read(memory, address, into, count)

    def rank_main(group):
        return error_of(lambda: reduce_all((LARGE,))(group))

    read = PeerMemory.read
    monkeypatch.setattr(PeerMemory, "read", gone)
    for error in run_threads(world_size, rank_main, options=CMA):
        assert isinstance(error, PeerLostError)
        assert error.rank in range(world_size)


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
}
SECONDS = 1.0
HOW = pytest.mark.parametrize("how", ["cma", "unix", "unix, in turns"])
"""In turns: as if the ranks ran on two machines, every second one on each."""


def check_differing(what, how, world_size, odd_ranks, monkeypatch):
    """Whichever rank is the odd one, and whichever calls what, all must learn it soon."""
    transport, _, in_turns = how.partition(",")
    if in_turns:
        routes = group_module._selector
        ring = (*range(0, world_size, 2), *range(1, world_size, 2))
        monkeypatch.setattr(group_module, "_selector", lambda *of: dataclasses.replace(routes(*of), ring=ring))
    for odd_rank, (even, odd) in itertools.product(odd_ranks, (MISMATCHES[what], MISMATCHES[what][::-1])):
        for rank, (error, seconds, travelled) in enumerate(differing(world_size, even, odd, odd_rank, transport)):
            story = f"rank {rank}, with rank {odd_rank} in {MISMATCHES[what].index(odd)}: {error}"
            assert isinstance(error, CollectiveMismatchError), story
            assert "Every rank must make the same calls" in str(error)
            assert seconds < SECONDS, story
            assert travelled == transport


@HOW
@pytest.mark.parametrize("what", MISMATCHES)
def test_large_calls_that_differ_are_an_error_on_every_rank_within_a_second(what, how, monkeypatch):
    check_differing(what, how, 3, [0], monkeypatch)


@pytest.mark.nightly
@HOW
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("what", MISMATCHES)
def test_and_on_any_number_of_ranks_whichever_is_the_odd_one(what, world_size, how, monkeypatch):
    check_differing(what, how, world_size, range(world_size), monkeypatch)


def differing(world_size, even, odd, odd_rank, transport):
    """How each rank learns that one calls something else: the error, after how long, and how collectives travel."""
    began = threading.Barrier(world_size)

    def rank_main(group):
        began.wait()
        start = time.monotonic()
        error = error_of(lambda: (odd if group.rank() == odd_rank else even)(group))
        return error, time.monotonic() - start, travels(group)

    # The deadline of a collective is the end of a mismatch that nobody notices.
    return run_threads(world_size, rank_main, collective_seconds=3.0, options=RingOptions(transport=transport))
