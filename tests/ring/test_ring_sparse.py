"""Sums of sparse tensors: what all ranks have of an index is added up, whatever each of them has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from markers import nightly_where
from ring_values import options
from worlds import run_threads

from cyxtrain.errors import CollectiveMismatchError, ConfigError

WORLDS = (1, 2, 3, 4)


def part(rank, *, dense=(), dtype=torch.float64, coalesced=False):
    """Rows that differ in number from rank to rank; rank 1 has none, and an index stands twice."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else 2 * rank + 3
    indices = torch.randint(0, 4, (2, count), generator=generator)
    values = torch.randint(-4, 5, (count, *dense), generator=generator).to(dtype)
    tensor = torch.sparse_coo_tensor(indices, values, (4, 5, *dense), check_invariants=False)
    return tensor.coalesce() if coalesced else tensor


def all_reduced(tensor, group, op=dist.ReduceOp.SUM):
    work = group.allreduce([tensor], options(dist.AllreduceOptions, reduceOp=op))
    work.wait()
    assert work.result()[0] is tensor
    return tensor


@nightly_where(lambda dense, dtype: dtype is not torch.float32 and dense != (3,))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("dense", [(), (3,), (2, 3)], ids=str)
def test_a_sparse_sum_is_the_dense_one(dense, dtype):
    def rank_main(group):
        wrong, ranks = [], range(group.size())
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            expected = sum(part(rank, dense=dense, dtype=dtype).to_dense() for rank in ranks)
            if op == dist.ReduceOp.AVG:
                whole = not (dtype.is_floating_point or dtype.is_complex)
                expected = expected.div(len(ranks), rounding_mode="trunc") if whole else expected / len(ranks)
            for coalesced in (True, False):
                tensor = all_reduced(part(group.rank(), dense=dense, dtype=dtype, coalesced=coalesced), group, op)
                assert tensor.is_coalesced()
                wrong += [] if torch.allclose(tensor.to_dense(), expected, rtol=1e-6) else [(op, coalesced)]
        return wrong

    for world_size in WORLDS:
        assert run_threads(world_size, rank_main) == [[]] * world_size


def test_sparse_sums_have_the_same_bits_on_every_rank_and_add_rank_after_rank():
    numbers = [1e8, 1.0, -1e8]

    def rank_main(group):
        tensor = torch.sparse_coo_tensor(
            [[3, 1]], torch.tensor([numbers[group.rank()], 0.1]), (5,), check_invariants=False
        )
        return all_reduced(tensor, group)

    first, *others = run_threads(3, rank_main)
    assert first.indices().tolist() == [[1, 3]]
    assert first.values()[1] == (torch.tensor(1e8) + 1.0) - 1e8 == 0.0
    assert all(torch.equal(first.values(), other.values()) for other in others)


def test_a_sparse_parameter_and_one_made_in_inference_mode_can_be_summed():
    def rank_main(group):
        with torch.inference_mode():
            closed = part(0)
        leaf = part(0).requires_grad_()
        for tensor in (closed, leaf):
            all_reduced(tensor, group)
            assert torch.equal(tensor.detach().to_dense(), 2 * part(0).to_dense())
        assert leaf.requires_grad

    run_threads(2, rank_main)


def error_of(tensor, group, **named):
    with pytest.raises((CollectiveMismatchError, ConfigError)) as caught:
        all_reduced(tensor, group, **named)
    return str(caught.value)


def test_what_does_not_fit_is_refused_on_every_rank_and_the_group_goes_on():
    def rank_main(group):
        size = (4, 5) if group.rank() else (5, 4)
        found = [
            error_of(torch.zeros(size).to_sparse(), group),
            error_of(torch.zeros(4, 5).to_sparse(2 - group.rank()), group),
            error_of(part(0), group, op=dist.ReduceOp.MAX),
        ]
        assert torch.equal(all_reduced(part(0), group).to_dense(), 2 * part(0).to_dense())
        return found

    one, other = run_threads(2, rank_main)
    assert one == other
    assert "rank 0 has size [5, 4] with 2 sparse dimensions, rank 1 has size [4, 5]" in one[0]
    assert "rank 1 has size [4, 5] with 1 sparse dimensions" in one[1]
    assert "sparse tensors have SUM and AVG, not MAX" in one[2]


def test_a_rank_with_a_dense_tensor_ends_the_group_with_both_calls_named():
    def rank_main(group):
        with pytest.raises(CollectiveMismatchError) as caught:
            group.allreduce([torch.zeros(3) if group.rank() else torch.zeros(3).to_sparse()]).wait()
        return str(caught.value)

    for text in run_threads(2, rank_main):
        assert "rank 1 is in all_reduce" in text
