"""Sums of sparse tensors: indices and values are gathered, and values of equal indices are added."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from cyxtrain.errors import CollectiveMismatchError, ConfigError
from cyxtrain.ring.group import Group
from cyxtrain.ring.schedules.algorithms import neighbouring
from cyxtrain.ring.schedules.kernels import Reduction, divide
from cyxtrain.ring.wire.payload import replace


def all_reduce(group: Group, tensor: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
    """Reduce a sparse COO tensor in place, on all ranks; the result is coalesced.

    An element is the sum over the ranks that have it, in their order; ranks may have different numbers of elements.
    Cost: one all_gather of a few numbers, and N - 1 frames each for the indices and the values of each rank.
    """
    if reduction not in (Reduction.SUM, Reduction.AVG):
        raise ConfigError(f"all_reduce: sparse tensors have SUM and AVG, not {reduction.name}. Call to_dense() first.")
    # PyTorch coalesces a tensor only in the mode it was made in.
    with torch.inference_mode(tensor.is_inference()):
        own = tensor.detach().coalesce()
        indices = own.indices().cpu()
        values = own.values().cpu()
    with group.engine.lock:
        counts = _counts(group, indices.shape[0], values.shape[0], tensor.shape, timeout)
        all_indices = _gather(group, indices.t().contiguous(), counts, timeout).t()
        all_values = _gather(group, values, counts, timeout)
    indices, values = _sum_by_index(all_indices, all_values, counts)
    if reduction is Reduction.AVG:
        divide(values.view(-1), group.world_size)
    whole = torch.sparse_coo_tensor(
        indices, values, tensor.shape, device=values.device, is_coalesced=True, check_invariants=False
    )
    replace(tensor, whole)


def _counts(group: Group, sparse_dim: int, count: int, shape: torch.Size, timeout: timedelta | None) -> list[int]:
    """Return the number of elements on each rank; raise on all ranks if the tensors differ in size."""
    own = torch.tensor([count, sparse_dim, *shape], device="cpu")
    facts = torch.empty(group.world_size * own.numel(), dtype=own.dtype, device="cpu")
    group.all_gather(facts, own, timeout)
    rows = facts.view(group.world_size, -1).tolist()
    for rank, row in enumerate(rows):
        if row[1:] != rows[0][1:]:
            raise CollectiveMismatchError(
                f"all_reduce of sparse tensors: rank {group.global_rank(0)} has {_size(rows[0])}, rank "
                f"{group.global_rank(rank)} has {_size(row)}. Pass tensors of the same size on all ranks.",
                rank=group.global_rank(rank),
            )
    return [row[0] for row in rows]


def _size(row: list[int]) -> str:
    return f"size {row[2:]} with {row[1]} sparse dimensions"


def _gather(group: Group, part: Tensor, counts: list[int], timeout: timedelta | None) -> Tensor:
    """Return the rows of all ranks, one rank after the other; `counts` has each rank's number of rows."""
    per_row = part.shape[1:].numel()
    source = part.reshape(-1)
    target = torch.empty(sum(counts) * per_row, dtype=part.dtype, device="cpu")
    receive = neighbouring([count * per_row for count in counts])
    group.all_to_all(target, receive, source, [(0, source.numel())] * group.world_size, timeout)
    return target.view(sum(counts), *part.shape[1:])


def _sum_by_index(indices: Tensor, values: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return each index once, in order, with the sum of its values, added rank by rank."""
    unique, places = torch.unique(indices, dim=1, return_inverse=True)
    sums = values.new_zeros(unique.shape[1], *values.shape[1:])
    for first, end in neighbouring(counts):
        sums.index_add_(0, places[first:end], values[first:end])
    return unique, sums
