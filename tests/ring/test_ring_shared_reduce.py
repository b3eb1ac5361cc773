"""All_reduces that pass through memory in common: the bits of all others, on all ranks or on none, and nobody waits."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from rank_processes import rank_server, run_ranks  # noqa: F401 - a fixture
from ring_values import Op, all_reduce, bits, made, reduced, said_of, same, with_cores
from worlds import run_threads, wait_until

import cyxtrain as cx
from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CyxtrainError
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.schedules.selector import FEW_BYTES, LONGEST_STAGED_BYTES, ORDERS_WRITES, SHORT_BYTES
from cyxtrain.ring.wire.persistent import MAX_KEPT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share no memory on this system")
SHORTEST, LONGEST = SHORT_BYTES // 4 + 1, LONGEST_STAGED_BYTES // 4
COUNT = 5000
NIGHTLY = pytest.mark.nightly
WORLDS = with_cores((2, 2), (3, 1), *(pytest.param(*world, marks=NIGHTLY) for world in ((2, 1), (3, 3), (5, 8))))


def passes(group, tensor, op=Op.SUM):
    reduction = Reduction.AVG if op == Op.AVG else Reduction[op.name]
    return group._group._staged.find(tensor, reduction) is not None


def open_staged(group):
    """The first one that could pass makes the memory."""
    assert not passes(group, torch.zeros(COUNT))
    all_reduce(group, torch.zeros(COUNT), Op.SUM)


@WORLDS
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_bits_are_those_of_every_all_reduce(world_size, cores, op):
    counts = [SHORTEST, 30_001, FEW_BYTES // 4, FEW_BYTES // 4 + 1, 300_007, LONGEST]

    def rank_main(group):
        open_staged(group)
        wrong = []
        for dtype in (torch.float32, torch.float64):
            for count in counts:
                for seed in range(3):  # again and again, in the same memory
                    if count * dtype.itemsize > LONGEST_STAGED_BYTES:
                        continue
                    own = made(dtype, count, group.rank(), seed)
                    expected = reduced([made(dtype, count, rank, seed) for rank in range(world_size)], op)
                    if not passes(group, own, op) or not same(all_reduce(group, own, op), expected):
                        wrong.append((dtype, count, seed))
        return wrong

    assert run_threads(world_size, rank_main, seconds=60) == [[]] * world_size


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_whole_numbers_are_summed_there_and_averaged_elsewhere(dtype):
    def rank_main(group):
        open_staged(group)
        own, brought = made(dtype, COUNT, group.rank()), [made(dtype, COUNT, rank) for rank in range(3)]
        right = [same(all_reduce(group, own.clone(), op), reduced(brought, op)) for op in (Op.SUM, Op.AVG)]
        return passes(group, own), passes(group, own, Op.AVG), right

    assert run_threads(3, rank_main) == [(True, False, [True, True])] * 3


@pytest.mark.parametrize(
    ("count", "dtype", "op", "options"),
    [
        (SHORTEST - 1, torch.float32, Op.SUM, None),
        (LONGEST + 1, torch.float32, Op.SUM, None),
        (COUNT, torch.float32, Op.MAX, None),
        (2 * COUNT, torch.bfloat16, Op.SUM, None),
        (COUNT, torch.complex64, Op.SUM, None),
        (COUNT, torch.float32, Op.SUM, RingOptions(checksums=True)),
        (COUNT, torch.float32, Op.SUM, RingOptions(transport="tcp")),
    ],
    ids=["short", "long", "another reduction", "halves", "complex", "checksums", "tcp"],
)
def test_what_does_not_pass_goes_as_ever(count, dtype, op, options):
    def rank_main(group):
        all_reduce(group, torch.zeros(COUNT), Op.SUM)
        own, brought = made(dtype, count, group.rank()), [made(dtype, count, rank) for rank in range(2)]
        return passes(group, own, op), same(all_reduce(group, own, op), reduced(brought, op))

    assert run_threads(2, rank_main, options=options) == [(False, True)] * 2


@with_cores((2, 1), (2, 2))
def test_all_ranks_take_the_same_way_however_their_tensors_lie(world_size, cores):
    """Else one would pass while another sends: what a rank does follows from what all must have alike."""

    def rank_main(group):
        open_staged(group)
        own = torch.ones(100, 200) if group.rank() else torch.ones(200, 100).t()
        own.requires_grad_(group.rank() == 1)
        found = []
        for _ in range(2):
            with torch.no_grad():
                group.allreduce([own]).wait()
            found.append(own.unique().tolist())
        return found

    assert run_threads(world_size, rank_main) == [[[2.0], [4.0]]] * world_size


@with_cores((2, 1), (2, 2), pytest.param(3, 3, marks=NIGHTLY))
@pytest.mark.parametrize(
    "other",
    [
        lambda group: all_reduce(group, torch.zeros(COUNT + 1)),
        lambda group: all_reduce(group, torch.zeros(2, COUNT // 2)),
        lambda group: all_reduce(group, torch.zeros(COUNT), Op.AVG),
        lambda group: all_reduce(group, torch.zeros(COUNT), Op.MAX),
        lambda group: group.barrier().wait(),
    ],
    ids=["size", "shape", "reduction", "one that does not pass", "operation"],
)
def test_ranks_that_call_different_ones_are_told_both(world_size, cores, other):
    def rank_main(group):
        open_staged(group)
        all_reduce(group, torch.zeros(COUNT))
        with pytest.raises(CyxtrainError) as error:
            other(group) if group.rank() == 1 else all_reduce(group, torch.zeros(COUNT))
        return type(error.value), f"float32 [{COUNT}]" in str(error.value)

    assert run_threads(world_size, rank_main, seconds=10) == [(CollectiveMismatchError, True)] * world_size


@with_cores((2, 1), (2, 2))
def test_more_shapes_than_are_kept_ready(world_size, cores):
    def rank_main(group):
        open_staged(group)
        tensors = [torch.ones(COUNT + k) for k in range(MAX_KEPT + 3)] * 2
        return {value for tensor in tensors for value in all_reduce(group, tensor).unique().tolist()}

    assert run_threads(world_size, rank_main) == [{2.0, 4.0}] * world_size  # the second time they are twos


@with_cores((2, 1), (2, 2))
def test_what_was_first_reduced_in_inference_is_trained_with_later(world_size, cores):
    def rank_main(group):
        open_staged(group)
        with torch.inference_mode():
            all_reduce(group, torch.ones(COUNT))
        return all_reduce(group, torch.ones(COUNT)).unique().tolist()

    assert run_threads(world_size, rank_main) == [[2.0]] * world_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_two_nans_the_same_one_stays_as_where_they_travel(dtype):
    """Also of one element at the end of a piece."""
    kind, nan = (torch.int32, 0x7FC00001) if dtype is torch.float32 else (torch.int64, 0x7FF8000000000001)
    counts = [SHORTEST, 20_000, FEW_BYTES // dtype.itemsize + 1, 2 * FEW_BYTES // dtype.itemsize + 1, 200_003]

    def rank_main(group):
        all_reduce(group, torch.zeros(COUNT))
        own = [torch.full((count,), nan + group.rank(), dtype=kind).view(dtype) for count in counts]
        return [bits(all_reduce(group, tensor)) for tensor in own]

    read, sent = (run_threads(2, rank_main, options=RingOptions(transport=way)) for way in ("unix", "tcp"))
    assert read == sent


def test_a_tensor_without_memory_is_refused_before_anything_starts():
    def rank_main(group):
        open_staged(group)
        with pytest.raises(ValueError, match="NULL"):
            all_reduce(group, torch._efficientzerotensor((COUNT,)))
        return all_reduce(group, torch.ones(COUNT)).unique().tolist()

    assert run_threads(2, rank_main) == [[2.0]] * 2


@pytest.mark.skipif(not ORDERS_WRITES, reason="nothing is shown in memory on this system")
@with_cores((2, 2), pytest.param(3, 3, marks=NIGHTLY))
def test_a_question_is_found_though_another_has_been_asked_since(world_size, cores):
    """A rank that is late at the end of one looks for the question of that one, while it is asked in the next."""

    def rank_main(group):
        open_staged(group)
        all_reduce(group, torch.zeros(COUNT))
        if group.rank() == 1:
            reduction = group._group._staged.find(torch.zeros(COUNT), Reduction.SUM)
            meet, first, asks = reduction._barrier, group._group.sequence + 1, reduction.counters[0].has_asked
            wait_until(lambda: asks(first))
            meetings = itertools.count(1)

            def meet_late():
                exchanges = meet()
                if next(meetings) == 2:  # the others can see that this rank is through, and go on
                    wait_until(lambda: asks(first + 1))
                return exchanges

            reduction._barrier = meet_late
        return [all_reduce(group, torch.ones(COUNT)).unique().tolist() for _ in range(3)]

    assert run_threads(world_size, rank_main) == [[[float(world_size)]] * 3] * world_size


@with_cores((2, 1), (2, 2))
def test_another_thread_makes_them_too(world_size, cores):
    def rank_main(group):
        open_staged(group)
        tensors = [torch.full((COUNT + k,), float(group.rank() + k)) for k in range(4)]
        for work in [group.allreduce([tensor]) for tensor in tensors]:
            work.wait()
        return [tensor.unique().tolist() for tensor in tensors]

    assert run_threads(world_size, rank_main) == [[[1.0], [3.0], [5.0], [7.0]]] * world_size


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_has_no_room_all_go_as_ever_and_do_not_try_again(rank, monkeypatch):
    inner, ranks, asked = os.posix_fallocate, {}, []

    def fallocate(*arguments):
        asked.append(ranks[threading.get_ident()])
        if asked[-1] == rank:
            raise OSError("no room")
        return inner(*arguments)

    def rank_main(group):
        ranks[threading.get_ident()] = group.rank()
        found = [all_reduce(group, torch.ones(COUNT), Op.SUM).unique().tolist() for _ in range(3)]
        return found, passes(group, torch.ones(COUNT))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    assert run_threads(2, rank_main) == [([[2.0]] * 3, False)] * 2
    assert sorted(asked) == [0, 1]


@with_cores((2, 1), (2, 2))
def test_a_rank_that_does_not_come_is_named_at_the_deadline(world_size, cores):
    over = threading.Event()

    def rank_main(group):
        open_staged(group)
        if group.rank() == 1:
            return over.wait(10)
        with pytest.raises(CollectiveTimeoutError) as error:
            all_reduce(group, torch.ones(COUNT), Op.SUM)
        over.set()
        return error.value.rank

    assert run_threads(world_size, rank_main, collective_seconds=1.0) == [1, True]


@pytest.mark.usefixtures("rank_server")
def test_a_rank_that_is_killed_is_named():
    ended = run_ranks(2, reduce_until_one_is_killed, CYXTRAIN_TRANSPORT="unix")
    assert ended[0].value == "PeerLostError 1"
    assert ended[1].kind == "Killed"


def reduce_until_one_is_killed():
    cx.init()
    for _ in range(3):
        dist.all_reduce(torch.ones(COUNT))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return said_of(lambda: dist.all_reduce(torch.ones(COUNT)))
