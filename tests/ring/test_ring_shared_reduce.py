"""Collectives that pass through memory in common: the bits of all others, on all ranks or on none, and nobody waits.

test_ring_large.py has what goes wrong meanwhile.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from markers import by_night, nightly_where
from rank_processes import run_ranks
from ring_values import DTYPES, Op, all_reduce, bits, made, options, reduced, said_of, same, tiled, with_cores
from worlds import run_threads, wait_until

import cyxtrain as cx
from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CyxtrainError
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.schedules.selector import ORDERS_WRITES, SHORT_BYTES, WINDOW_BYTES
from cyxtrain.ring.schedules.summation import FEW_BYTES
from cyxtrain.ring.shared_memory.staged import EVEN_BYTES
from cyxtrain.ring.wire.frames import Kind
from cyxtrain.ring.wire.persistent import MAX_KEPT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share no memory on this system")
SHORTEST = SHORT_BYTES // 4 + 1
COUNT = 5000
WORLDS = with_cores((2, 2), (3, 1), *(by_night(*world) for world in ((2, 1), (3, 3), (5, 8))))


REAL, COPIED = (torch.float32, torch.float64), (torch.float32, torch.bfloat16, torch.bool)


def around_windows(dtype, world_size):
    """Counts below and above every limit, and around those at which another window begins."""
    item = dtype.itemsize
    window = WINDOW_BYTES // item
    full = WINDOW_BYTES // world_size // EVEN_BYTES * EVEN_BYTES // item * world_size  # as many of each part
    few = [SHORT_BYTES // item + 1, 30_001, FEW_BYTES // item, FEW_BYTES // item + 1, 150_007]
    return sorted({*few, full, full + 1, window, window + 1, 3 * window + 1})


def passes(group, tensor, op=Op.SUM):
    reduction = Reduction.AVG if op == Op.AVG else Reduction[op.name]
    return group.group.engine.staged.find(Kind.ALL_REDUCE, tensor, reduction) is not None


def open_staged(group):
    """The first one that could pass makes the memory."""
    assert not passes(group, torch.zeros(COUNT))
    all_reduce(group, torch.zeros(COUNT), Op.SUM)


@nightly_where(lambda op, cores: op == Op.AVG or cores == 1)
@WORLDS
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_bits_are_those_of_every_all_reduce(world_size, cores, op):
    cases = [(dtype, count) for dtype in REAL for count in around_windows(dtype, world_size)]
    expected = {case: reduced([tiled(*case, rank) for rank in range(world_size)], op) for case in cases}

    def rank_main(group):
        open_staged(group)
        wrong = []
        for sign, case in itertools.product((1, -1), cases):  # again, in the same memory
            own = sign * tiled(*case, group.rank())
            if not passes(group, own, op) or not same(all_reduce(group, own, op), sign * expected[case]):
                wrong.append(case)
        return wrong

    assert run_threads(world_size, rank_main, seconds=60) == [[]] * world_size


@nightly_where(lambda op, cores: op == Op.AVG or cores == 1)
@WORLDS
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_bits_of_a_reduce_scatter_are_those_of_the_part_wherever_the_output_lies(world_size, cores, op):
    cases = [(dtype, -(-count // world_size)) for dtype in REAL for count in around_windows(dtype, world_size)]
    brought = {
        (dtype, count): [tiled(dtype, world_size * count, rank) for rank in range(world_size)] for dtype, count in cases
    }
    totals = {case: reduced(tensors, op) for case, tensors in brought.items()}

    def outputs(source, count, rank):
        """Its own part of the source; parts of those of two ranks; and elements that are apart."""
        yield source[rank * count : (rank + 1) * count]
        yield source[(world_size - 1) * count // 2 :][:count]
        yield torch.zeros(2 * count, dtype=source.dtype)[::2]

    def rank_main(group):
        rank, wrong = group.rank(), []
        scattering = options(dist.ReduceScatterOptions, reduceOp=op)
        open_staged(group)
        for dtype, count in cases:
            expected = totals[dtype, count][rank * count : (rank + 1) * count]
            source, output = brought[dtype, count][rank].clone(), torch.zeros(count, dtype=dtype)
            group.reduce_scatter_single(output, source, scattering).wait()
            if not same(output, expected) or not same(source, brought[dtype, count][rank]):
                wrong.append((dtype, count))
            for place, other in enumerate(outputs(source, count, rank)):
                source.copy_(brought[dtype, count][rank])
                group.reduce_scatter_single(other, source, scattering).wait()
                if not same(other, expected):
                    wrong.append((dtype, count, place))
        return wrong

    assert run_threads(world_size, rank_main, seconds=60) == [[]] * world_size


def transposed(tensor):
    """The same elements, that lie in columns."""
    rows = tensor[: len(tensor) // 3 * 3].view(-1, 3)
    return rows.t().contiguous().t()


@nightly_where(lambda world_size: world_size == 3)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@WORLDS
def test_broadcast_and_all_gather_bring_every_dtype_bit_by_bit(world_size, cores):
    cases = [(dtype, SHORT_BYTES // dtype.itemsize + 1) for dtype in DTYPES]
    cases += [(dtype, WINDOW_BYTES // dtype.itemsize + more) for dtype in COPIED for more in (0, 1)]
    cases += [(dtype, 3 * WINDOW_BYTES // dtype.itemsize + 1) for dtype in COPIED]
    brought = {case: [tiled(*case, rank) for rank in range(world_size)] for case in cases}

    def rank_main(group):
        rank, wrong = group.rank(), []
        open_staged(group)
        for number, case in enumerate(cases):
            src, tensors = number % world_size, brought[case]
            sending, own = options(dist.BroadcastOptions, rootRank=src), tensors[rank].clone()
            group.broadcast([own], sending).wait()
            # One rank has them in rows, the others in columns.
            columns = transposed(tensors[rank]) if rank != src else tensors[rank][: len(own) // 3 * 3].view(-1, 3)
            columns = columns.clone(memory_format=torch.preserve_format)
            group.broadcast([columns], sending).wait()
            whole = torch.zeros(world_size * len(own), dtype=own.dtype)
            group.all_gather_single(whole, tensors[rank]).wait()
            every = torch.zeros(world_size * len(own), 2, dtype=own.dtype)[:, 0]
            group.all_gather_single(every, tensors[rank]).wait()
            rows = [torch.zeros_like(own) for _ in tensors]
            group.allgather([rows], [tensors[rank]]).wait()
            found = [
                same(own, tensors[src]),
                same(columns, transposed(tensors[src])) and columns.is_contiguous() == (rank == src),
                same(whole, torch.cat(tensors)),
                same(every, torch.cat(tensors)) and not every.is_contiguous(),
                all(map(same, rows, tensors)),
            ]
            if not all(found):
                wrong.append((case, found))
        return wrong

    assert run_threads(world_size, rank_main, seconds=60) == [[]] * world_size


def test_an_all_gather_into_its_own_part_and_one_that_makes_the_memory():
    """Whatever comes first makes it: then what follows passes."""

    def rank_main(group):
        assert not passes(group, torch.zeros(COUNT))
        for value in (1.0, 5.0):
            whole = torch.full((3 * COUNT,), value + group.rank())
            group.all_gather_single(whole, whole[group.rank() * COUNT :][:COUNT]).wait()
            assert same(whole, torch.arange(value, value + 3).repeat_interleave(COUNT))
        return passes(group, torch.zeros(COUNT))

    assert run_threads(3, rank_main) == [True] * 3


@pytest.mark.parametrize("first", ["broadcast", "reduce_scatter", "all_gather"])
def test_whichever_could_pass_first_makes_the_memory(first):
    def rank_main(group):
        if first == "broadcast":
            group.broadcast([torch.zeros(COUNT)], options(dist.BroadcastOptions, rootRank=1)).wait()
        elif first == "all_gather":
            group.all_gather_single(torch.zeros(2 * COUNT), torch.zeros(COUNT)).wait()
        else:
            group.reduce_scatter_single(torch.zeros(COUNT), torch.zeros(2 * COUNT)).wait()
        return passes(group, torch.zeros(COUNT))

    assert run_threads(2, rank_main) == [True] * 2


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
        (COUNT, torch.float32, Op.MAX, None),
        (2 * COUNT, torch.bfloat16, Op.SUM, None),
        (COUNT, torch.complex64, Op.SUM, None),
        (COUNT, torch.float32, Op.SUM, RingOptions(checksums=True)),
        (COUNT, torch.float32, Op.SUM, RingOptions(transport="tcp")),
    ],
    ids=["short", "another reduction", "halves", "complex", "checksums", "tcp"],
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


def a_larger_one(group):
    all_reduce(group, torch.zeros(COUNT + 1))


@nightly_where(lambda cores, other: cores == 1 and other is not a_larger_one)
@with_cores((2, 1), (2, 2), by_night(3, 3))
@pytest.mark.parametrize(
    "other",
    [
        a_larger_one,
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


@nightly_where(lambda cores: cores == 1)
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


@nightly_where(lambda world_size, dtype: (world_size, dtype) == (3, torch.float64))
@pytest.mark.parametrize("world_size", [2, 3, by_night(5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_two_nans_the_same_one_stays_as_where_they_travel(dtype, world_size):
    """Also of one element at the end of a piece, and at the end of a window."""
    kind, nan = (torch.int32, 0x7FC00001) if dtype is torch.float32 else (torch.int64, 0x7FF8000000000001)
    item = dtype.itemsize
    counts = [SHORTEST, 20_000, FEW_BYTES // item + 1, 2 * FEW_BYTES // item + 1, 200_003]
    counts += [WINDOW_BYTES // item, WINDOW_BYTES // item + 1, 2 * WINDOW_BYTES // item + 3]

    def rank_main(group):
        all_reduce(group, torch.zeros(COUNT))
        own = [torch.full((count,), nan + group.rank(), dtype=kind).view(dtype) for count in counts]
        return [bits(all_reduce(group, tensor)) for tensor in own]

    ways = (RingOptions(transport=way) for way in ("unix", "tcp"))
    shared, sent = (run_threads(world_size, rank_main, options=way) for way in ways)
    assert shared == sent


def test_a_tensor_without_memory_is_refused_before_anything_starts():
    def rank_main(group):
        open_staged(group)
        with pytest.raises(ValueError, match="NULL"):
            all_reduce(group, torch._efficientzerotensor((COUNT,)))
        return all_reduce(group, torch.ones(COUNT)).unique().tolist()

    assert run_threads(2, rank_main) == [[2.0]] * 2


@pytest.mark.skipif(not ORDERS_WRITES, reason="nothing is shown in memory on this system")
@with_cores((2, 2), by_night(3, 3))
def test_a_question_is_found_though_another_has_been_asked_since(world_size, cores):
    """A rank that is late at the end of one looks for the question of that one, while it is asked in the next."""

    def rank_main(group):
        open_staged(group)
        all_reduce(group, torch.zeros(COUNT))
        if group.rank() == 1:
            meeting = group.group.engine.staged.find(Kind.ALL_REDUCE, torch.zeros(COUNT), Reduction.SUM)._barrier
            meet, first, asks = meeting.arrive, group.group.engine.sequence + 1, meeting.counters[0].has_asked
            wait_until(lambda: asks(first))
            meetings = itertools.count(1)

            def meet_late():
                exchanges = meet()
                if next(meetings) == 2:  # the others can see that this rank is through, and go on
                    wait_until(lambda: asks(first + 1))
                return exchanges

            meeting.arrive = meet_late
        found = [all_reduce(group, torch.ones(COUNT)).unique().tolist() for _ in range(3)]
        group.barrier().wait()  # of frames: no question may be left before them
        return found

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


@with_cores((2, 1), by_night(2, 2))
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

    assert run_threads(world_size, rank_main, collective_seconds=0.5) == [1, True]


@pytest.mark.nightly
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
