"""Ranks that call different things: every one of them learns it, soon, and is shown both."""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from markers import nightly_where
from ring_values import (
    LARGE,
    WORLDS,
    Op,
    barrier,
    broadcast,
    error_of,
    exchange,
    gather_all,
    in_turn,
    reduce,
    reduce_all,
)
from worlds import run_threads, wait_until

from cyxtrain.errors import CollectiveMismatchError
from cyxtrain.world.world import World

MISMATCHES = {
    "shape": (
        reduce_all((3,)),
        reduce_all((4,)),
        "all_reduce #1 (SUM, float32 [3])",
        "all_reduce #1 (SUM, float32 [4])",
    ),
    "shape of as many elements": (reduce_all((2, 3)), reduce_all((3, 2)), "[2, 3]", "[3, 2]"),
    "shape, large": (reduce_all((LARGE,)), reduce_all((LARGE + 1,)), f"[{LARGE}]", f"[{LARGE + 1}]"),
    "nothing and something": (reduce_all((0,)), reduce_all((LARGE,)), "[0]", f"[{LARGE}]"),
    "dtype": (reduce_all(dtype=torch.int32), reduce_all(), "(SUM, int32 [3])", "(SUM, float32 [3])"),
    "reduction": (reduce_all(op=Op.MAX), reduce_all(), "(MAX, float32 [3])", "(SUM, float32 [3])"),
    "operation": (reduce_all(), barrier, "all_reduce #1", "barrier #1"),
    "operation, large": (broadcast(0, (LARGE,)), reduce_all((LARGE,)), "broadcast #1", "all_reduce #1"),
    "a broadcast of few and of many": (broadcast(0), broadcast(0, (LARGE,)), "[3], src 0", f"[{LARGE}], src 0"),
    "operation of the same shape": (gather_all(), reduce_all(), "all_gather #1", "all_reduce #1"),
    "src": (broadcast(0), broadcast(1), "(float32 [3], src 0)", "(float32 [3], src 1)"),
    "dst": (reduce(1), reduce(0), "dst 1", "dst 0"),
    "order": (in_turn(reduce_all(), barrier), in_turn(barrier, reduce_all()), "all_reduce #1", "barrier #1"),
    "one call more": (in_turn(barrier, reduce_all()), reduce_all(), "barrier #1", "all_reduce #1"),
    "sizes of parts": (exchange(2), exchange(3), "all_to_all #1 (float32)", "with other sizes"),
}


def is_nightly(what, place, world_size):
    """By day each mismatch is tried in some of the worlds, and each world with some of them, at either place."""
    return ([*MISMATCHES].index(what) + world_size + (place == "last")) % 4 > 0


@nightly_where(is_nightly)
@WORLDS
@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.parametrize("place", ["first", "last"])
def test_different_calls_are_an_error_on_every_rank_within_a_second_that_shows_both(what, place, world_size, cores):
    odd, even, odd_name, even_name = MISMATCHES[what]
    odd_rank = 0 if place == "first" else world_size - 1
    began = threading.Barrier(world_size)

    def rank_main(group):
        began.wait()
        start = time.monotonic()
        error = error_of(lambda: (odd if group.rank() == odd_rank else even)(group))
        return error, time.monotonic() - start

    for rank, (error, seconds) in enumerate(run_threads(world_size, rank_main)):
        assert isinstance(error, CollectiveMismatchError)
        assert odd_name in str(error)
        assert even_name in str(error)
        assert "Every rank must make the same calls" in str(error)
        assert (odd_name if rank == odd_rank else even_name) in f"{error.during} with other sizes"
        assert error.rank in range(world_size)
        assert seconds < 1.0


@WORLDS
def test_a_rank_that_leaves_early_is_named_to_all_who_still_need_it(world_size, cores):
    over = threading.Barrier(world_size)

    def rank_main(group):
        group.barrier()
        group.barrier()
        over.wait(20)  # else one that is slow may hear of the end while it is still in there
        if group.rank() == world_size - 1:
            return None
        start = time.monotonic()
        error = error_of(lambda: reduce_all()(group))
        return error, time.monotonic() - start

    for found in run_threads(world_size, rank_main)[:-1]:
        error, seconds = found
        assert isinstance(error, CollectiveMismatchError)
        assert (error.rank, error.during) == (world_size - 1, "all_reduce #3 (SUM, float32 [3])")
        assert f"rank {world_size - 1} has left" in str(error)
        assert "after 2 collectives" in str(error)
        assert seconds < 1.0


@WORLDS
def test_a_rank_that_makes_one_call_more_than_the_others_is_told_that_they_have_left(world_size, cores):
    over = threading.Barrier(world_size)

    def rank_main(group):
        group.barrier()
        over.wait(20)  # else one that is slow may hear of the end while it is still in there
        if group.rank() != world_size - 1:
            return None
        start = time.monotonic()
        error = error_of(lambda: reduce_all()(group))
        return error, time.monotonic() - start

    error, seconds = run_threads(world_size, rank_main)[-1]
    assert isinstance(error, CollectiveMismatchError)
    assert error.during == "all_reduce #2 (SUM, float32 [3])"
    assert error.rank in range(world_size - 1)
    assert f"rank {error.rank} has left" in str(error)
    assert "after 1 collectives" in str(error)
    assert seconds < 1.0


@WORLDS
def test_a_frame_of_another_generation_is_an_error_on_every_rank(world_size, cores):
    began = threading.Barrier(world_size)

    def rank_main(group):
        if group.rank() == world_size - 1:
            # As if it came from a group that the others have left behind.
            group.group.directory = replace(group.group.directory, generation=7)
            group.group.persistent._generation = 7
        began.wait()
        start = time.monotonic()
        error = error_of(lambda: reduce_all()(group))
        return error, time.monotonic() - start

    for error, seconds in run_threads(world_size, rank_main):
        assert isinstance(error, CollectiveMismatchError)
        assert "in all_reduce #1 (SUM, float32 [3], generation 7)" in str(error)
        assert "in all_reduce #1 (SUM, float32 [3]), " in str(error) or "in all_reduce #1 (SUM, float32 [3])." in str(
            error
        )
        assert seconds < 1.0


def test_ranks_that_leave_in_any_order_after_the_same_calls_leave_in_peace():
    def rank_main(group):
        for _ in range(3):
            reduce_all((LARGE,))(group)

    for _ in range(3):
        run_threads(4, rank_main)


def test_the_first_error_is_raised_again_by_whatever_comes_later():
    def rank_main(group):
        first = error_of(lambda: reduce_all((3 + group.rank(),))(group))
        later = [
            lambda: group.barrier(),
            lambda: group.send([torch.zeros(1)], 1 - group.rank()),
            lambda: group.recv([torch.zeros(1)], 1 - group.rank()),
            lambda: group.all_gather_single(torch.zeros(2), torch.zeros(1)),
        ]
        for call in later:
            error = error_of(call)
            assert (type(error), error.rank) == (type(first), first.rank)
            assert str(first).split(" This rank")[0] in str(error)
        assert error_of(barrier_of(group)).during == "barrier #2"

    def barrier_of(group):
        return lambda: group.barrier()

    run_threads(2, rank_main)


def test_a_rank_that_was_not_waiting_hears_of_the_error_at_its_next_call():
    def rank_main(group):
        if group.rank() < 2:
            error = error_of(lambda: reduce_all((3 + group.rank(),))(group))
            told.set()
            return error
        told.wait(10)
        wait_until(lambda: group.group.failure.error is not None)
        return error_of(lambda: group.barrier())

    told = threading.Event()
    errors = run_threads(4, rank_main)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 4
    assert all("[3]" in str(error) and "[4]" in str(error) for error in errors)
    assert errors[3].during == "barrier #1"
    assert "(reported by rank " in str(errors[3])


@pytest.mark.parametrize("what", ["shape", "shape, large"])
def test_the_traceback_leads_to_the_call_and_not_into_the_ring(what):
    def rank_main(group):
        error = error_of(lambda: MISMATCHES[what][group.rank()](group))
        files = [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
        return files[-2:]

    assert run_threads(2, rank_main) == [["ring_values.py", "work.py"]] * 2


@pytest.mark.parametrize("what", ["shape", "shape, large", "operation", "again"])
def test_an_error_does_not_hide_the_one_that_is_being_handled(what):
    """Such as a rank's own, where it meets the others once more on its way out."""

    def rank_main(group):
        if what == "again":
            error_of(lambda: MISMATCHES["shape"][group.rank()](group))
        try:
            raise ValueError("of this rank's own")
        except ValueError:
            error = error_of(lambda: MISMATCHES[what][group.rank()](group) if what in MISMATCHES else barrier(group))
        text = "".join(traceback.format_exception(error))
        return text.count("ValueError: of this rank's own"), text.count("Traceback")

    assert run_threads(2, rank_main) == [(1, 2)] * 2


def test_an_error_of_recv_does_not_hide_the_one_that_is_being_handled():
    def rank_main(group):
        if group.rank() == 1:
            group.fail("it had enough")
            return None
        try:
            raise ValueError("of this rank's own")
        except ValueError:
            error = error_of(lambda: group.recv([torch.zeros(3)], 1).wait())
        return "".join(traceback.format_exception(error)).count("ValueError: of this rank's own")

    assert run_threads(2, rank_main)[0] == 1


@pytest.mark.parametrize("odd_rank", [0, 1])
def test_a_rank_that_opens_a_call_or_leaves_is_said_to_do_so(odd_rank):
    def rank_main(group):
        if group.rank() == odd_rank:
            return error_of(lambda: World(group.rank(), 2, group, group).check_same_call("finalize"))
        return error_of(lambda: reduce_all()(group))

    for error in run_threads(2, rank_main):
        assert "The all_gather of one int64 is the handshake at the start of fit," in str(error)
        assert "and DistributedDataParallel, and at the end of a program (finalize)." in str(error)
        assert "caught an error gets there too early" in str(error)
