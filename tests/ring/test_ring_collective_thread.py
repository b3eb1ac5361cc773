"""Collectives in their own thread: the caller continues, the order stays, and errors reach whoever waits."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ring_values import Op, error_of, options
from torch._C._distributed_c10d import AllgatherOptions
from worlds import run_threads, wait_until

from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CyxtrainError, PeerLostError
from cyxtrain.ring import collective_thread
from cyxtrain.ring.rendezvous import rendezvous
from cyxtrain.ring.rendezvous.listen import listen

BESIDE = RingOptions(communication="thread")
INLINE = RingOptions(communication="inline")


def run_beside(world_size, rank_main, **more):
    return run_threads(world_size, rank_main, options=BESIDE, **more)


def reducing(tensor, *, asynchronous=True, op=Op.SUM):
    return [tensor], options(dist.AllreduceOptions, reduceOp=op, asyncOp=asynchronous)


def test_the_caller_goes_on_while_a_collective_waits_for_another_rank():
    entered, computed = threading.Event(), threading.Event()

    def rank_main(group):
        tensor = torch.full((1000,), float(group.rank() + 1))
        if group.rank() == 1:
            assert entered.wait(20)
        work = group.allreduce(*reducing(tensor))
        if group.rank() == 0:
            assert not work.is_completed()  # rank 1 has not called it yet, and this call has returned
            entered.set()
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        computed.set()
        return tensor.tolist() == [3.0] * 1000 and work.result()[0] is tensor

    assert run_beside(2, rank_main) == [True, True]


def test_inline_a_call_returns_when_it_is_done_and_starts_no_thread():
    def rank_main(group):
        work = group.allreduce(*reducing(torch.ones(10)))
        assert work.is_completed()
        group.barrier()
        return [thread.name for thread in threading.enumerate() if thread.name == "cyxtrain-ring"]

    assert run_threads(2, rank_main, options=INLINE) == [[], []]


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_keep_the_order_in_which_they_were_asked_for(world_size):
    """Each of them changes what the one before left: in another order another number would come out."""

    def rank_main(group):
        tensor = torch.ones(5)
        works = [group.allreduce(*reducing(tensor)) for _ in range(3)]
        group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=0, asyncOp=False))  # behind those three
        found = tensor.tolist()
        works.append(group.allreduce(*reducing(tensor, op=Op.MAX)))
        group.allreduce(*reducing(tensor, asynchronous=False))
        for work in works:
            work.wait()
        return found, tensor.tolist()

    n = world_size
    assert run_beside(n, rank_main) == [([float(n**3)] * 5, [float(n**4)] * 5)] * n


def test_every_collective_gives_beside_the_caller_what_it_gives_inline():
    def rank_main(group):
        rank, n = group.rank(), group.size()
        mine = torch.arange(4.0) + rank
        gathered, parts = torch.empty(4 * n), [torch.empty(4) for _ in range(n)]
        scattered, exchanged = torch.empty(2), torch.empty(4)
        works = [
            group.all_gather_single(gathered, mine, options(AllgatherOptions)),
            group.allgather([parts], [mine], options(AllgatherOptions)),
            group.reduce_scatter_single(scattered, mine, options(dist.ReduceScatterOptions)),
            group.all_to_all_single(exchanged, mine, [], [], options(dist.AllToAllOptions)),
            group.reduce([reduced := mine.clone()], options(dist.ReduceOptions, rootRank=1)),
            group.barrier(options(dist.BarrierOptions)),
        ]
        for work in works:
            work.wait()
        everything = [gathered, torch.stack(parts), scattered, exchanged, reduced]
        return [tensor.tolist() for tensor in everything]

    assert run_beside(2, rank_main) == run_threads(2, rank_main, options=INLINE)


def test_a_collective_that_a_callback_asks_for_runs_at_once():
    """PowerSGD does so; behind the collective whose callback it is it would wait for itself."""

    def rank_main(group):
        tensor, second = torch.ones(3), torch.ones(3)

        def again(future):
            group.allreduce(*reducing(second)).wait()
            return future.value()[0] + second

        future = group.allreduce(*reducing(tensor)).get_future().then(again)
        return future.wait().tolist()

    assert run_beside(2, rank_main, seconds=20) == [[4.0] * 3] * 2


def test_a_callback_that_waits_for_a_later_collective_is_told_that_it_cannot():
    registered = threading.Event()

    def rank_main(group):
        if group.rank() == 1:
            assert registered.wait(20)  # rank 0's first one is not over before
        works = [group.allreduce(*reducing(torch.ones(3)))]
        outcome = works[0].get_future().then(lambda _: str(error_of(works[1].wait)) if group.rank() == 0 else "")
        works.append(group.allreduce(*reducing(torch.ones(3))))
        registered.set()
        told = outcome.wait()
        works[1].wait()
        return told

    told, _ = run_beside(2, rank_main, seconds=20)
    assert "waits for one that was started later" in told


@pytest.mark.parametrize("inference", [True, False])
def test_a_collective_is_made_in_the_mode_of_the_thread_that_asks(inference):
    def rank_main(group):
        with torch.inference_mode(inference):
            small, large = torch.ones(3), torch.ones(200_000)
            for tensor in (small, large):
                group.allreduce(*reducing(tensor)).wait()
        return small.tolist(), float(large.sum())

    assert run_beside(2, rank_main) == [([2.0] * 3, 400_000.0)] * 2


def test_a_future_that_is_asked_for_late_has_the_result_too():
    def rank_main(group):
        work = group.allreduce(*reducing(tensor := torch.ones(3)))
        work.wait()
        return work.get_future().wait()[0] is tensor

    assert run_beside(2, rank_main) == [True, True]


def test_an_error_reaches_wait_result_and_future_and_every_later_call():
    def rank_main(group):
        work = group.allreduce(*reducing(torch.ones(3 + group.rank())))
        first = error_of(work.wait)
        wait_until(lambda: work.is_completed())
        assert not work.is_success()
        assert isinstance(work.exception(), CollectiveMismatchError)
        with pytest.raises(RuntimeError, match="do not call the same collective"):
            work.get_future().wait()
        later = group.allreduce(*reducing(torch.ones(3)))
        return [type(first), type(error_of(work.result)), type(error_of(later.wait))]

    assert run_beside(2, rank_main) == [[CollectiveMismatchError] * 3] * 2


def test_wait_with_a_timeout_gives_up_and_the_collective_goes_on():
    given_up = threading.Event()

    def rank_main(group):
        tensor = torch.ones(3)
        if group.rank() == 1:
            assert given_up.wait(20)
        work = group.allreduce(*reducing(tensor))
        if group.rank() == 0:
            error = error_of(lambda: work.wait(timedelta(milliseconds=20)))
            assert isinstance(error, CollectiveTimeoutError)
            given_up.set()
        work.wait()
        return tensor.tolist()

    assert run_beside(2, rank_main) == [[2.0] * 3] * 2


def test_a_rank_that_leaves_has_done_before_what_it_was_asked_for():
    def rank_main(group):
        works = [group.allreduce(*reducing(torch.ones(100_000))) for _ in range(5)]
        group.shutdown()
        for work in works:
            work.wait()
        assert "has left this group" in str(error_of(lambda: group.allreduce(*reducing(torch.ones(1))).wait()))
        return [thread.name for thread in threading.enumerate() if thread.name == "cyxtrain-ring"] or "none"

    found = run_beside(2, rank_main)
    assert "none" in found  # the last one to leave sees no such thread


def test_a_rank_that_fails_ends_what_others_wait_for():
    def rank_main(group):
        if group.rank() == 0:
            work = group.allreduce(*reducing(torch.ones(3)))
            return type(error_of(work.wait))
        group.fail("its own reasons")
        return None

    assert run_beside(2, rank_main) == [PeerLostError, None]


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no fork")
def test_a_forked_child_is_told_that_it_is_no_rank():
    def rank_main(group):
        group.allreduce(*reducing(torch.ones(3))).wait()
        if group.rank() == 1:
            return 0
        child = os.fork()
        if child == 0:
            try:
                group.allreduce(*reducing(torch.ones(3))).wait()
            except CyxtrainError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_beside(2, rank_main) == [0, 0]


@pytest.mark.parametrize(
    ("wanted", "machines", "room", "expected"),
    [
        ("auto", "aa", [1, 1], False),  # no core is free
        ("auto", "aa", [2, 2], True),
        ("auto", "aa", [2, 1], False),  # one rank is bound to fewer cores: all do as it must
        ("auto", "aabb", [0, 0, 0, 0], True),  # there is a network to wait for
        ("inline", "ab", [64, 64], False),
        ("thread", "aa", [0, 0], True),
    ],
)
def test_a_thread_is_taken_where_cores_are_free_or_the_network_is_slow(wanted, machines, room, expected):
    assert collective_thread.is_worth_it(wanted, machines, room) is expected


@pytest.mark.parametrize(("cores", "threads", "room"), [(2, 1, 1), (4, 1, 2), (4, 3, 1), (2, 2, 0)])
def test_room_counts_a_free_core_for_each_rank(cores, threads, room, monkeypatch):
    monkeypatch.setattr(rendezvous, "count_usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with contextlib.closing(listen(0, dist.HashStore(), "tcp")) as listeners:
        assert rendezvous.own_record(0, 2, listeners, RingOptions()).room == room


def test_a_callback_that_fails_does_not_end_the_thread_that_others_wait_for(caplog):
    made = collective_thread.CollectiveThread()
    go = threading.Event()
    delivery = made.post(go.wait)
    delivery.when_done(lambda: 1 / 0)
    go.set()
    assert made.post(lambda: 5).wait(20)
    assert "a callback of a collective has failed" in caplog.text
    made.close(20)


def test_a_group_may_be_left_in_a_callback():
    made = collective_thread.CollectiveThread()
    assert made.post(lambda: made.close(20)).wait(20)  # it does not wait for its own end
    made.close(20)
