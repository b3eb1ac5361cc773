"""Every collective beside all_reduce, on every dtype and layout."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ring_values import DTYPES, EIGHTS, EVERYWHERE, Op, all_reduce, made, options, reduced, reductions_of, same
from worlds import run_threads

from cyxtrain.ring import RingProcessGroup

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


@EVERYWHERE
def test_every_collective_moves_every_dtype_to_where_it_belongs(world_size):
    def rank_main(group):
        return [
            f"{check.__name__} {dtype} {count}"
            for check, dtype, count in itertools.product(COLLECTIVES, DTYPES, (0, world_size + 1))
            if not check(group, dtype, count)
        ]

    assert run_threads(world_size, rank_main) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_moves_what_is_longer_than_one_piece(world_size):
    def rank_main(group):
        return [check.__name__ for check in COLLECTIVES if not check(group, torch.int16, 600_011)]

    assert run_threads(world_size, rank_main) == [[]] * world_size


def broadcast(group, dtype, count):
    ok = True
    for src in range(group.size()):
        tensor = made(dtype, count, group.rank())
        group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=src)).wait()
        ok = ok and same(tensor, made(dtype, count, src))
    return ok


def all_gather(group, dtype, count):
    tensor = made(dtype, count, group.rank())
    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([outputs], [tensor]).wait()
    return all(same(output, made(dtype, count, rank)) for rank, output in enumerate(outputs))


def all_gather_single(group, dtype, count):
    tensor = made(dtype, count, group.rank())
    output = torch.empty(group.size() * count, dtype=dtype)
    group._allgather_base(output, tensor).wait()
    in_place = torch.empty_like(output)
    own = in_place[group.rank() * count : (group.rank() + 1) * count]
    own.copy_(tensor)
    group.all_gather_single(in_place, own).wait()
    expected = torch.cat([made(dtype, count, rank) for rank in range(group.size())])
    return same(output, expected) and same(in_place, expected)


def reduce(group, dtype, count):
    ok = True
    for dst, op in itertools.product(range(group.size()), reductions_of(dtype)[:2]):
        tensor = made(dtype, count, group.rank())
        group.reduce([tensor], options(dist.ReduceOptions, rootRank=dst, reduceOp=op)).wait()
        everyone = [made(dtype, count, rank) for rank in range(group.size())]
        ok = ok and same(tensor, reduced(everyone, op) if group.rank() == dst else everyone[group.rank()])
    return ok


def reduce_scatter(group, dtype, count):
    size, rank, ok = group.size(), group.rank(), True
    for op in reductions_of(dtype)[:2]:
        inputs = [made(dtype, count, rank, seed=part) for part in range(size)]
        kept = [tensor.clone() for tensor in inputs]
        output, single = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
        chosen = options(dist.ReduceScatterOptions, reduceOp=op)
        group.reduce_scatter([output], [inputs], chosen).wait()
        group.reduce_scatter_single(single, torch.cat(inputs), chosen).wait()
        everyone = [torch.cat([made(dtype, count, other, seed=part) for part in range(size)]) for other in range(size)]
        expected = reduced(everyone, op)[rank * count : (rank + 1) * count]
        ok = ok and same(output, expected) and same(single, expected)
        ok = ok and all(same(*pair) for pair in zip(inputs, kept, strict=True))
    return ok


def gather(group, dtype, count):
    ok = True
    for dst in range(group.size()):
        tensor = made(dtype, count, group.rank())
        outputs = [torch.empty_like(tensor) for _ in range(group.size())] if group.rank() == dst else []
        group.gather([outputs] if outputs else [], [tensor], options(dist.GatherOptions, rootRank=dst)).wait()
        ok = ok and all(same(output, made(dtype, count, rank)) for rank, output in enumerate(outputs))
    return ok


def scatter(group, dtype, count):
    ok = True
    for src in range(group.size()):
        output = torch.empty(count, dtype=dtype)
        inputs = [made(dtype, count, src, seed=rank) for rank in range(group.size())]
        given = [inputs] if group.rank() == src else []
        group.scatter([output], given, options(dist.ScatterOptions, rootRank=src)).wait()
        ok = ok and same(output, inputs[group.rank()])
    return ok


def all_to_all(group, dtype, count):
    inputs = [made(dtype, count, group.rank(), seed=rank) for rank in range(group.size())]
    outputs = [torch.empty(count, dtype=dtype) for _ in range(group.size())]
    group.alltoall(outputs, inputs).wait()
    single = torch.empty(group.size() * count, dtype=dtype)
    group.alltoall_base(single, torch.cat(inputs), [], []).wait()
    expected = [made(dtype, count, rank, seed=group.rank()) for rank in range(group.size())]
    return all(same(*pair) for pair in zip(outputs, expected, strict=True)) and same(single, torch.cat(expected))


def uneven_all_to_all(group, dtype, count):
    size, rank = group.size(), group.rank()
    send = [(rank + other) % 3 for other in range(size)]  # what goes from a to b is as long as what goes from b to a
    tensor = made(dtype, 2 * sum(send), rank).view(-1, 2)
    output = torch.empty_like(tensor)
    group.all_to_all_single(output, tensor, send, send).wait()
    came = []
    for other in range(size):
        rows = [(other + peer) % 3 for peer in range(size)]
        start = sum(rows[:rank])
        came.append(made(dtype, 2 * sum(rows), other).view(-1, 2)[start : start + rows[rank]])
    return same(output, torch.cat(came))


def several_at_once(group, dtype, count):
    size, rank = group.size(), group.rank()
    inputs = [made(dtype, count, rank, seed) for seed in (1, 2)]
    lists = [[torch.empty(count, dtype=dtype) for _ in inputs] for _ in range(size)]
    group.allgather_coalesced(lists, inputs).wait()
    outputs = [torch.empty(size * count, dtype=dtype) for _ in inputs]
    group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    ok = all(same(lists[other][seed - 1], made(dtype, count, other, seed)) for other in range(size) for seed in (1, 2))
    joined = [torch.cat([made(dtype, count, other, seed) for other in range(size)]) for seed in (1, 2)]
    ok = ok and all(same(*pair) for pair in zip(outputs, joined, strict=True))
    if dtype in EIGHTS:
        return ok
    group.allreduce_coalesced(inputs).wait()
    sums = [reduced([made(dtype, count, other, seed) for other in range(size)], Op.SUM) for seed in (1, 2)]
    parts = [torch.empty(count, dtype=dtype) for _ in inputs]
    everyone = [torch.cat([made(dtype, count, rank, part) for part in range(size)]) for _ in parts]
    group.reduce_scatter_tensor_coalesced(parts, everyone).wait()
    whole = [torch.cat([made(dtype, count, other, part) for part in range(size)]) for other in range(size)]
    share = reduced(whole, Op.SUM)[rank * count : (rank + 1) * count]
    return ok and all(same(*pair) for pair in zip(inputs, sums, strict=True)) and all(same(p, share) for p in parts)


COLLECTIVES = [
    broadcast,
    all_gather,
    all_gather_single,
    reduce,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
    uneven_all_to_all,
    several_at_once,
]


def test_every_collective_reads_and_writes_strided_tensors():
    def rank_main(group):
        size, rank = group.size(), group.rank()

        def strided(value=None):
            tensor = torch.zeros(4, 6).t()
            return tensor if value is None else tensor.fill_(value)

        tensor = strided(rank)
        group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=1)).wait()
        outputs = [strided() for _ in range(size)]
        group.allgather([outputs], [strided(rank)]).wait()
        wide = torch.zeros(4, 6 * size).t()
        group.all_gather_single(wide, strided(rank)).wait()
        part, total = strided(), strided()
        group.scatter(
            [part], [[strided(10 + r) for r in range(size)]] if rank == 0 else [], dist.ScatterOptions()
        ).wait()
        group.reduce_scatter([total], [[strided(r) for r in range(size)]]).wait()
        exchanged = torch.zeros(4, size).t()
        group.all_to_all_single(exchanged, torch.full((4, size), float(rank)).t(), [], []).wait()
        assert torch.equal(tensor, torch.full((6, 4), 1.0))
        assert torch.equal(torch.stack(outputs), torch.arange(3.0).view(3, 1, 1).expand(3, 6, 4))
        assert torch.equal(wide, torch.arange(3.0).repeat_interleave(6).view(18, 1).expand(18, 4))
        assert torch.equal(part, torch.full((6, 4), 10.0 + rank))
        assert torch.equal(total, torch.full((6, 4), 3.0 * rank))
        assert torch.equal(exchanged, torch.arange(3.0).view(3, 1).expand(3, 4))

    run_threads(3, rank_main)


@EVERYWHERE
def test_nobody_passes_a_barrier_before_all_have_come(world_size):
    came = []

    def rank_main(group):
        for turn in range(1, 20):
            came.append(group.rank())
            group.barrier().wait()
            assert len(came) >= turn * world_size

    run_threads(world_size, rank_main)


def test_hundreds_of_collectives_in_a_row_stay_in_step():
    def rank_main(group):
        for turn in range(300):
            src = turn % 4
            tensor = torch.full((turn % 7,), float(group.rank()))
            group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=src))
            all_reduce(group, tensor)
            assert tensor.tolist() == [4.0 * src] * (turn % 7)

    run_threads(4, rank_main)


def test_two_groups_at_once_do_not_mix():
    def rank_main(first):
        second = RingProcessGroup(store, first.rank(), 3, generation=1)
        try:
            for value in range(50):
                one, two = torch.full((5,), 1.0 * value), torch.full((7,), 2.0 * value)
                all_reduce(first, one)
                all_reduce(second, two)
                assert (one[0], two[0]) == (3 * value, 6 * value)
        finally:
            second.shutdown()

    store = dist.HashStore()
    run_threads(3, rank_main)


def test_a_work_says_that_it_is_done_and_holds_the_result():
    def rank_main(group):
        tensor = torch.ones(3)
        work = group.allreduce([tensor])
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is tensor
        assert work.get_future().wait()[0] is tensor

    run_threads(2, rank_main)
