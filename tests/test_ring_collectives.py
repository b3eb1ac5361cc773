"""Every collective, on every dtype, shape and layout: right, and the same bits everywhere."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from worlds import run_threads

from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.algorithms import chunks

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
Op = dist.ReduceOp
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
DTYPES = [*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool, *EIGHTS]
WORLDS = [1, 2, 3, 4, 5]
EVERYWHERE = pytest.mark.parametrize("world_size", WORLDS)
ARITHMETIC = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX]
BITWISE = [Op.BAND, Op.BOR, Op.BXOR]
REAL = {Op.SUM: torch.add, Op.AVG: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum}
WHOLE = {Op.SUM: np.add, Op.AVG: np.add, Op.PRODUCT: np.multiply, Op.MIN: np.minimum, Op.MAX: np.maximum} | {
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}


def lengths(world_size):
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, 1037})


def made(dtype, count, rank, seed=0):
    """What a rank brings: the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    whole = torch.randint(-9, 10, (count,), generator=generator)
    if dtype is torch.bool:
        return whole > 0
    if dtype in UNSIGNED:
        return whole.abs().to(dtype)
    if dtype in SIGNED:
        return whole.to(dtype)
    real = torch.randn(count, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(real, real.flip(0)).to(dtype)
    return real.to(dtype)


def is_whole(dtype):
    return dtype is torch.bool or dtype in SIGNED or dtype in UNSIGNED


def reductions_of(dtype):
    if dtype in EIGHTS:
        return []
    if dtype.is_complex:
        return [Op.SUM, Op.AVG, Op.PRODUCT]
    return [*ARITHMETIC, *BITWISE] if is_whole(dtype) else ARITHMETIC


def reduced(tensors, op):
    """The documented result: chunk c is combined from rank c + 1 on, all around, with rank c as the last."""
    parts = []
    for chunk, (start, end) in enumerate(chunks(tensors[0].numel(), len(tensors))):
        order = [tensors[(chunk + 1 + step) % len(tensors)][start:end] for step in range(len(tensors))]
        parts.append(folded(order, op))
    return torch.cat(parts)


def folded(order, op):
    dtype = order[0].dtype
    if dtype.is_complex and op == Op.PRODUCT:
        total = torch.view_as_real(order[0].clone())
        for part in map(torch.view_as_real, order[1:]):
            (a, b), (c, d) = total.unbind(1), part.unbind(1)
            total = torch.stack([a * c - b * d, a * d + b * c], dim=1)
        return torch.view_as_complex(total)
    if dtype.is_complex:
        return torch.view_as_complex(folded([torch.view_as_real(part.clone()) for part in order], op))
    if is_whole(dtype):
        arrays = [part.numpy() for part in order]
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = WHOLE[op](total, array)
        if op == Op.AVG and dtype is not torch.bool:
            total = (np.sign(total) * (np.abs(total) // len(order))).astype(total.dtype)
        return torch.from_numpy(total)
    total = order[0].clone()
    for part in order[1:]:
        total = REAL[op](total, part)
    return total / len(order) if op == Op.AVG else total


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(found, expected):
    return found.dtype == expected.dtype and found.shape == expected.shape and bits(found) == bits(expected)


def options(kind, **fields):
    made_options = kind()
    for name, value in fields.items():
        setattr(made_options, name, value)
    return made_options


def all_reduce(group, tensor, op=Op.SUM):
    group.allreduce([tensor], options(dist.AllreduceOptions, reduceOp=op)).wait()
    return tensor


# --- all_reduce -----------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_all_reduce_gives_the_bits_of_the_documented_order_for_every_dtype_and_reduction(world_size):
    def rank_main(group):
        wrong = []
        for dtype in DTYPES:
            for op, count in itertools.product(reductions_of(dtype), lengths(world_size)):
                found = all_reduce(group, made(dtype, count, group.rank()), op)
                expected = reduced([made(dtype, count, rank) for rank in range(world_size)], op)
                if not same(found, expected):
                    wrong.append(f"{dtype} {op} {count}")
        return wrong

    assert run_threads(world_size, rank_main) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_reduce_gives_the_same_bits_on_every_rank_and_in_every_run(world_size):
    def rank_main(group):
        # Longer than the pieces in which the ring receives, and divisible by nothing.
        return bits(all_reduce(group, made(torch.float32, 1_000_003, group.rank())))

    first, second = run_threads(world_size, rank_main), run_threads(world_size, rank_main)
    assert len(set(first + second)) == 1
    expected = reduced([made(torch.float32, 1_000_003, rank) for rank in range(world_size)], Op.SUM)
    assert first[0] == bits(expected)


def test_the_sign_of_a_zero_does_not_depend_on_where_it_stands():
    def rank_main(group):
        zeros = torch.tensor([0.0, -0.0] * 20) * (1 if group.rank() == 0 else -1)
        return [bits(all_reduce(group, zeros.clone(), op)) for op in (Op.MIN, Op.MAX)]

    assert run_threads(2, rank_main) == [[bytes(160)] * 2] * 2


LAYOUTS = {
    "zero dimensions": lambda flat: flat[0].clone(),
    "one element": lambda flat: flat[:1].clone(),
    "every other": lambda flat: flat[::2],
    "reversed rows": lambda flat: flat[:60].view(6, 10).transpose(0, 1),
    "permuted": lambda flat: flat[:120].view(2, 3, 4, 5).permute(3, 1, 0, 2),
    "channels last": lambda flat: flat[:120].view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "a column": lambda flat: flat[:120].view(10, 12)[:, 3],
    "a middle piece": lambda flat: flat[7:77],
    "seven dimensions": lambda flat: flat[:128].view(2, 2, 2, 2, 2, 2, 2),
    "no elements": lambda flat: flat[:0].view(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce_works_in_place_on_any_layout_and_touches_nothing_else(layout):
    def rank_main(group):
        base = made(torch.float32, 1037, group.rank())
        tensor = LAYOUTS[layout](base)
        strides = tensor.stride()
        all_reduce(group, tensor)
        others = [LAYOUTS[layout](made(torch.float32, 1037, rank)) for rank in range(3)]
        expected = reduced([other.reshape(-1) for other in others], Op.SUM).view(others[0].shape)
        assert same(tensor, expected)
        assert tensor.stride() == strides
        outside = torch.ones(1037, dtype=torch.bool)
        if tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
            LAYOUTS[layout](outside).fill_(False)
        assert torch.equal(base[outside], made(torch.float32, 1037, group.rank())[outside])

    run_threads(3, rank_main)


def test_conjugate_and_negative_views_are_reduced_as_the_numbers_that_they_show():
    def rank_main(group):
        conjugate = made(torch.complex64, 50, group.rank()).conj()
        assert conjugate.is_conj()
        expected = reduced([made(torch.complex64, 50, rank).conj().resolve_conj() for rank in range(3)], Op.SUM)
        assert same(all_reduce(group, conjugate).resolve_conj(), expected)
        negative = torch._neg_view(made(torch.float64, 50, group.rank()))
        assert negative.is_neg()
        expected = reduced([-made(torch.float64, 50, rank) for rank in range(3)], Op.SUM)
        assert same(all_reduce(group, negative).resolve_neg(), expected)

    run_threads(3, rank_main)


def test_average_of_whole_numbers_is_cut_towards_zero():
    def rank_main(group):
        signed = torch.tensor([-7, 7, -1, 1], dtype=torch.int32) if group.rank() == 0 else torch.zeros(4).int()
        unsigned = torch.tensor([255, 7], dtype=torch.uint8) if group.rank() == 0 else torch.zeros(2).byte()
        return all_reduce(group, signed, Op.AVG).tolist(), all_reduce(group, unsigned, Op.AVG).tolist()

    assert run_threads(2, rank_main) == [([-3, 3, 0, 0], [127, 3])] * 2


def test_a_leaf_that_requires_a_gradient_is_reduced_in_place():
    def rank_main(group):
        weight = torch.nn.Parameter(torch.full((3,), 1.0 + group.rank()))
        all_reduce(group, weight)
        assert weight.grad_fn is None
        (2 * weight).sum().backward()
        return weight.tolist(), weight.grad.tolist()

    assert run_threads(2, rank_main) == [([3.0] * 3, [2.0] * 3)] * 2


def test_the_storage_of_a_tensor_stays_resizable():
    def rank_main(group):
        tensor = all_reduce(group, torch.ones(4))
        tensor.resize_(100)

    run_threads(2, rank_main)


# --- the other collectives ------------------------------------------------------------------------------------------


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


# --- works ----------------------------------------------------------------------------------------------------------


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


# --- errors before anything starts ----------------------------------------------------------------------------------


def three(group, dtype=torch.float32):
    return [torch.zeros(3, dtype=dtype) for _ in range(group.size())]


REFUSED = {
    "a list that is too short": (
        lambda group: group.allgather([three(group)[:-1]], [torch.zeros(3)]),
        "all_gather: needs a list of 2 tensors, one per rank, got 1",
    ),
    "another length": (
        lambda group: group.allgather([three(group)], [torch.zeros(4)]),
        "all_gather: needs a tensor of 4 elements of torch.float32, got 3 of torch.float32",
    ),
    "another dtype": (
        lambda group: group.allgather([three(group)], [torch.zeros(3).double()]),
        "needs a tensor of 3 elements of torch.float64, got 3 of torch.float32",
    ),
    "an output that is too small": (
        lambda group: group.all_gather_single(torch.zeros(5), torch.zeros(3)),
        "needs a tensor of 6 elements",
    ),
    "inputs that do not fit": (
        lambda group: group.reduce_scatter([torch.zeros(2)], [three(group)]),
        "reduce_scatter: needs a tensor of 2 elements",
    ),
    "one input that does not fit": (
        lambda group: group.reduce_scatter_single(torch.zeros(2), torch.zeros(5)),
        "reduce_scatter: needs a tensor of 4 elements",
    ),
    "rows that do not divide": (
        lambda group: group.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []),
        "3 rows do not divide among 2 ranks",
    ),
    "parts that do not add up": (
        lambda group: group.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 1], [1, 2]),
        "do not make 3 rows",
    ),
    "two dtypes": (
        lambda group: group.all_to_all_single(torch.zeros(2), torch.zeros(2).double(), [], []),
        "all_to_all: needs tensors of one dtype, got torch.float32 and torch.float64",
    ),
    "a list of another length": (
        lambda group: group.alltoall(three(group), [torch.zeros(3)]),
        "all_to_all: needs a list of 2 tensors, one per rank, got 1",
    ),
    "a part for itself of two lengths": (
        lambda group: group.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 2], [2, 1]),
        "to itself",
    ),
    "a rank that is not there": (
        lambda group: group.broadcast([torch.zeros(3)], options(dist.BroadcastOptions, rootRank=2)),
        "rank 2 is not in this group of 2",
    ),
    "a message to nobody": (
        lambda group: group.send([torch.zeros(3)], 5),
        "rank 5 is not in this group of 2",
    ),
    "a message to itself": (
        lambda group: group.send([torch.zeros(3)], group.rank()),
        "cannot send to or receive from itself",
    ),
    "a sum of eighths": (
        lambda group: group.allreduce([torch.zeros(3).to(torch.float8_e5m2)]),
        "has no arithmetic",
    ),
    "an order of complex numbers": (
        lambda group: all_reduce(group, torch.zeros(3, dtype=torch.complex64), Op.MAX),
        "complex numbers have no order",
    ),
    "bits of floats": (lambda group: all_reduce(group, torch.zeros(3), Op.BAND), "whole numbers and booleans"),
    "a scaled sum": (
        lambda group: all_reduce(group, torch.zeros(3), dist._make_nccl_premul_sum(2.0)),
        "it has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR",
    ),
    "a sparse tensor": (
        lambda group: group.allreduce([torch.zeros(3).to_sparse()]),
        r"this one is torch.sparse_coo; call to_dense\(\) first",
    ),
    "a tensor elsewhere": (
        lambda group: group.allreduce([torch.zeros(3, device="meta")]),
        "carries CPU tensors, this one is on meta",
    ),
    "a quantised tensor": (
        lambda group: group.allreduce([torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)]),
        "qint8",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(what):
    call, message = REFUSED[what]

    def rank_main(group):
        if group.rank() == 0:  # the other rank does not notice: nothing has been sent, nothing counted
            with pytest.raises(CyxtrainError, match=message):
                call(group)
        return all_reduce(group, torch.ones(2)).tolist()

    assert run_threads(2, rank_main) == [[2.0, 2.0]] * 2


# --- the end --------------------------------------------------------------------------------------------------------


def test_a_world_of_one_binds_no_port_and_starts_no_thread():
    threads = threading.active_count()
    group = RingProcessGroup(dist.HashStore(), 0, 1)
    assert threading.active_count() == threads
    assert group._group._ring is None
    group.shutdown()


def test_a_group_that_was_left_refuses_everything_and_can_be_left_again():
    def rank_main(group):
        group.shutdown()
        group.shutdown()
        tensor = torch.full((3,), 7.0)
        for call in (
            lambda: group.allreduce([tensor]),
            lambda: group.barrier(),
            lambda: group.send([tensor], 1 - group.rank()),
        ):
            with pytest.raises(CyxtrainError, match=rf"rank {group.rank()} has left this group"):
                call()
        assert tensor.tolist() == [7.0] * 3

    run_threads(2, rank_main)


def test_a_message_to_itself_is_a_config_error_in_a_world_of_one_too():
    group = RingProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(ConfigError, match="rank 0 cannot send to or receive from itself"):
        group.send([torch.zeros(1)], 0)
    group.shutdown()
