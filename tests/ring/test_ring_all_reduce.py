"""What the ring's all_reduce promises beyond the contract: a fixed order of summation, and the same bits everywhere.

test_contract.py holds it against what PyTorch documents.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random

import numpy as np
import pytest
import torch
from contract_values import DTYPES, LAYOUTS, lengths
from markers import by_night
from ring_values import Op, all_reduce, bits, made, reduced, reductions_of, same, with_cores
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import run_threads

from cyxtrain.config import RingOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


@with_cores(
    (1, 1),
    by_night(2, 1),
    by_night(3, 1),
    by_night(3, 3),
    by_night(4, 1),
    by_night(4, 4),
    by_night(5, 1),
    by_night(5, 5),
)
def test_all_reduce_gives_the_bits_of_the_documented_order_for_every_dtype_and_reduction(world_size, cores):
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


@with_cores((2, 1), by_night(3, 1), (3, 3))
def test_small_tensors_of_many_shapes_follow_each_other_in_any_order(world_size, cores):
    shapes = [(count,) * dimensions for count in (1, 2, 3) for dimensions in range(8)] + [
        (count,) for count in range(80)
    ]
    order = random.Random(0).choices(shapes, k=3 * len(shapes))

    def rank_main(group):
        wrong = []
        for number, shape in enumerate(order):
            tensor = torch.full(shape, float(number * (group.rank() + 1)), requires_grad=number % 2 == 0)
            found = all_reduce(group, tensor, Op.AVG if number % 3 == 0 else Op.SUM)
            total = number * world_size * (world_size + 1) / 2
            if not torch.equal(found.detach(), torch.full(shape, total / world_size if number % 3 == 0 else total)):
                wrong.append((number, shape))
        assert 0 < len(group._group.persistent._kept) <= 64
        return wrong

    assert run_threads(world_size, rank_main) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, by_night(3), by_night(5)])
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


def test_a_nan_on_any_rank_is_a_nan_in_the_smallest_and_the_largest():
    def rank_main(group):
        tensor = torch.arange(6.0)
        tensor[group.rank()] = float("nan")
        return [all_reduce(group, tensor.clone(), op).isnan().tolist() for op in (Op.MIN, Op.MAX)]

    assert run_threads(3, rank_main) == [[[True] * 3 + [False] * 3] * 2] * 3


STRIDED = [name for name in LAYOUTS if name not in ("0-dim", "no columns", "expanded", "conj", "neg")]


def test_the_bits_do_not_depend_on_how_a_tensor_lies_in_memory():
    def rank_main(group):
        wrong = []
        for layout in STRIDED:
            shape = (6, *LAYOUTS[layout].dimensions)
            numbers = made(torch.float32, math.prod(shape), group.rank()).view(shape)
            tensor = LAYOUTS[layout].view(shape, torch.float32).copy_(numbers)
            wrong += [] if same(all_reduce(group, tensor), all_reduce(group, numbers)) else [layout]
        return wrong

    assert run_threads(3, rank_main) == [[]] * 3


@with_cores((3, 1), (3, 3))
def test_a_rank_whose_tensor_is_not_plain_has_the_bits_of_the_others(world_size, cores):
    def rank_main(group):
        wrong = []
        kinds = itertools.product((0, 1), (Op.SUM, Op.AVG), (torch.float32, torch.int64), (1, 3, 500))
        for odd, op, dtype, count in kinds:
            tensor = made(dtype, count, group.rank())
            if group.rank() == odd:
                tensor = torch.stack([tensor, tensor], dim=1)[:, 0]
            assert tensor.is_contiguous() == (group.rank() != odd or count == 1)
            expected = reduced([made(dtype, count, rank) for rank in range(world_size)], op)
            found = torch.tensor(all_reduce(group, tensor, op).tolist(), dtype=dtype)
            wrong += [] if same(found, expected) else [(odd, op, dtype, count)]
        return wrong

    assert run_threads(world_size, rank_main) == [[]] * world_size


@with_cores((2, 1), (3, 1), (3, 3), (8, 7), (8, 8))
def test_where_ranks_share_cores_a_small_sum_takes_fewer_frames_and_has_the_same_bits(world_size, cores):
    def rank_main(group):
        frames = []
        for link in group.group.engine.links.values():
            send = link.send
            link.send = lambda frame, send=send: frames.append(frame) or send(frame)
        sums = [bits(all_reduce(group, made(torch.float32, 100, group.rank()))) for _ in range(3)]
        return set(sums), len(frames) / 3

    found = run_threads(world_size, rank_main)
    expected = reduced([made(torch.float32, 100, rank) for rank in range(world_size)], Op.SUM)
    assert [sums for sums, _ in found] == [{bits(expected)}] * world_size
    shared = [world_size - 1] + [1] * (world_size - 1)
    assert [frames for _, frames in found] == (shared if cores < world_size else [world_size - 1] * world_size)


def test_tensors_without_memory_of_their_own_are_never_read_where_they_seem_to_be():
    with FakeTensorMode():  # not in two threads at once, after which PyTorch 2.11 dies in the next backward
        fakes = torch.zeros(3), torch.zeros(3)

    def rank_main(group):
        for tensor in (fakes[group.rank()], torch._efficientzerotensor(3)):
            with contextlib.suppress(Exception):  # what PyTorch says of it is its own affair
                all_reduce(group, tensor)
        return all_reduce(group, torch.ones(3)).tolist()

    assert run_threads(2, rank_main) == [[2.0] * 3] * 2


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("count", [3, 100_003])
def test_sums_of_infinities_are_made_without_a_word_whatever_numpy_is_told(count, transport):
    def rank_main(group):
        tensor = torch.full((count * group.size(),), math.inf if group.rank() == 0 else -math.inf)
        part = torch.empty(count)
        with np.errstate(all="raise"):
            everything = all_reduce(group, tensor.clone())
            group.reduce_scatter_single(part, tensor)
        return bool(everything.isnan().all() and part.isnan().all())

    assert run_threads(2, rank_main, options=RingOptions(transport=transport)) == [True] * 2


def test_conjugate_and_negative_views_are_reduced_as_the_numbers_that_they_show():
    # PyTorch's own all_reduce refuses conjugate views before it asks the ring.
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
