"""all_reduce on every dtype, reduction and layout: right, and the same bits everywhere."""

from __future__ import annotations

import itertools

import pytest
import torch
from ring_values import DTYPES, EVERYWHERE, Op, all_reduce, bits, lengths, made, reduced, reductions_of, same
from worlds import run_threads

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


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
