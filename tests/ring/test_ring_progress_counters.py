"""Ranks with a core each show in memory how far they are: whoever waits long asks, and nobody waits for ever."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from markers import by_night, nightly_where
from rank_processes import run_ranks
from ring_values import Op, made, reduced, said_of, same, with_cores
from worlds import run_threads, wait_until

import cyxtrain as cx
from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CyxtrainError
from cyxtrain.ring.schedules.selector import ORDERS_WRITES

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not ORDERS_WRITES, reason="ranks publish no progress counters on this system"
)
COUNT = 5000
ROOMY = with_cores((2, 2), (3, 3), by_night(5, 8))


def mean_of(group):
    """A mean in whose memory the ranks show how far they are."""
    [mean] = group.make_gradient_buffers([(COUNT, torch.float32)])
    assert len(mean._reduction.barrier.counters) == group.size() - 1
    return mean


def average(mean, group, seed):
    mean.tensor.copy_(made(torch.float32, COUNT, group.rank(), seed))
    mean.all_reduce().wait()
    return same(mean.tensor, reduced([made(torch.float32, COUNT, rank, seed) for rank in range(group.size())], Op.AVG))


def until_asked(mean, sequence, by=lambda signs: signs):
    """Returns when ranks wait for this one so long that they have asked."""
    wait_until(lambda: all(sign.has_asked(sequence) for sign in by(mean._reduction.barrier.counters)))


@with_cores((2, 1), (3, 2), (4, 2))
def test_ranks_that_share_cores_tell_each_other_by_frames(world_size, cores):
    def rank_main(group):
        [mean] = group.make_gradient_buffers([(COUNT, torch.float32)])
        return mean._reduction.barrier.counters, average(mean, group, 0)

    assert run_threads(world_size, rank_main) == [([], True)] * world_size


@ROOMY
def test_bits_are_those_of_all_reduce_again_and_again(world_size, cores):
    def rank_main(group):
        mean = mean_of(group)
        return [average(mean, group, seed) for seed in range(20)]

    assert run_threads(world_size, rank_main) == [[True] * 20] * world_size


@nightly_where(lambda world_size: world_size == 3)
@ROOMY
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_is_asked_and_the_links_stay_whole(world_size, cores, late):
    def rank_main(group):
        mean, found = mean_of(group), []
        for seed in range(3):
            if group.rank() == late:
                until_asked(mean, group.group.engine.sequence + 1, lambda signs: signs if late == 0 else signs[:1])
            found.append(average(mean, group, seed))
            tensor = torch.full((3,), float(group.rank()))
            group.allreduce([tensor]).wait()
            found.append(tensor.tolist() == [sum(range(world_size))] * 3)
        group.barrier().wait()
        return found

    assert run_threads(world_size, rank_main) == [[True] * 6] * world_size


@with_cores((2, 2), by_night(3, 3))
def test_a_rank_that_is_slow_on_the_way_is_not_asked(world_size, cores):
    def rank_main(group):
        mean = mean_of(group)
        average(mean, group, 0)
        if group.rank() == 1:
            add = mean._reduction._add
            # Longer than anybody looks on.
            mean._reduction._add = lambda *terms, **out: [time.sleep(0.3), add(*terms, **out)]
        sequence = group.group.engine.sequence + 1
        found = average(mean, group, 1)
        group.barrier().wait()  # the links are whole
        return found, [sign.has_asked(sequence) for sign in mean._reduction.barrier.counters]

    assert run_threads(world_size, rank_main) == [(True, [False] * (world_size - 1))] * world_size


CALLS = {
    "all_reduce": lambda group: group.allreduce([torch.ones(7)]),
    "a broadcast that only hears": lambda group: group.broadcast([torch.ones(7)], broadcast_from(0)),
    "a broadcast that only tells": lambda group: group.broadcast([torch.ones(7)], broadcast_from(1)),
    "a large one": lambda group: group.allreduce([torch.ones(1_000_000)]),
    "barrier": lambda group: group.barrier(),
}


def broadcast_from(source):
    options = dist.BroadcastOptions()
    options.rootRank = source
    return options


@nightly_where(lambda call, world_size: (call, world_size) != ("all_reduce", 2))
@with_cores((2, 2), (3, 3))
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_in_another_collective_is_named(world_size, cores, call):
    def rank_main(group):
        mean = mean_of(group)
        own = functools.partial(CALLS[call], group) if group.rank() == 1 else mean.all_reduce
        with pytest.raises(CyxtrainError) as error:
            own()
        return type(error.value), "memory 0" in str(error.value)

    assert run_threads(world_size, rank_main, seconds=10) == [(CollectiveMismatchError, True)] * world_size


def test_a_rank_that_leaves_is_named():
    def rank_main(group):
        mean = mean_of(group)
        average(mean, group, 0)
        if group.rank() == 1:
            group.group.engine.leave()
            return "left"
        with pytest.raises(CollectiveMismatchError, match="rank 1 has left") as error:
            mean.all_reduce()
        return error.value.rank

    assert run_threads(2, rank_main) == [1, "left"]


def test_a_rank_that_does_not_come_is_named_at_the_deadline():
    def rank_main(group):
        mean = mean_of(group)
        own = mean.all_reduce
        if group.rank() == 1:
            until_asked(mean, group.group.engine.sequence + 1)
            own = group.recv([torch.zeros(1)], 0, 0).wait  # of which rank 0 never thinks
        with pytest.raises(CyxtrainError) as error:
            own()
        return type(error.value), error.value.rank

    assert run_threads(2, rank_main, collective_seconds=0.5)[0] == (CollectiveTimeoutError, 1)


def test_messages_move_while_a_rank_waits():
    def rank_main(group):
        mean, large = mean_of(group), torch.full((4_000_000,), 3.0)
        if group.rank() == 0:
            work = group.send([large], 1, 7)
            found = average(mean, group, 0)
            work.wait()
            return found
        landing = torch.zeros_like(large)
        until_asked(mean, group.group.engine.sequence + 1)
        group.recv([landing], 0, 7).wait()  # more than a socket holds: rank 0 must go on sending
        return average(mean, group, 0) and bool((landing == 3).all())

    assert run_threads(2, rank_main) == [True] * 2


@pytest.mark.nightly
@pytest.mark.usefixtures("rank_server")
def test_a_rank_that_is_killed_is_named():
    ended = run_ranks(2, wait_for_the_dead, CYXTRAIN_TRANSPORT="unix")
    assert ended[0].value == "PeerLostError 1"
    assert ended[1].kind == "Killed"


def wait_for_the_dead():
    cx.init()
    group = dist.group.WORLD
    [mean] = group.make_gradient_buffers([(COUNT, torch.float32)])
    mean.all_reduce().wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return said_of(mean.all_reduce)
