"""Gradients of sparse embeddings: the rows that a batch has used are exchanged instead of whole tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.parallel.bucket import checked_gradient
from cyxtrain.parallel.exchange import MeanWork, multiply
from cyxtrain.parallel.finite import values_of
from cyxtrain.parallel.gathering import gathered_rows
from cyxtrain.world.world import World

# What a rank has instead of a number of rows:
_ABSENT = -1  # no samples
_NONE = -2  # no gradient
_DENSE = -3  # a dense gradient, as tied weights make one


def makes_sparse_gradients(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters of modules with `sparse=True`, by name: their gradients are sparse."""
    return {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, module in model.named_modules()
        if getattr(module, "sparse", False) is True  # nn.Embedding, nn.EmbeddingBag and modules made after them
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def split_sparse(
    parameters: Sequence[tuple[str, nn.Parameter]], model: nn.Module
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return the (name, parameter) pairs of a model whose gradients are dense, and those whose are sparse."""
    sparse = {id(parameter) for parameter in makes_sparse_gradients(model).values()}
    dense = [each for each in parameters if id(each[1]) not in sparse]
    return dense, [each for each in parameters if id(each[1]) in sparse]


class SparseGradients:
    """The parameters whose gradients are sparse, with names, averaged over any backend.

    Cost of an average: a number from each rank for each parameter; then, for each, the rows that any rank has used,
    with their numbers: of each rank as many as the longest has.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.parameters = parameters

    def average(self, world: World, *, absent: bool, factor: Tensor | float) -> list[nn.Parameter]:
        """Give each parameter its averaged gradient, times a factor: sparse and coalesced, dense if any rank's is.

        Returns the parameters that some rank with samples has not used. Those used on no rank keep no gradient.
        """
        if not self.parameters:
            return []
        group = world.group_for(self._device)
        nothing = _ABSENT if absent else _NONE
        own = [_own_rows(name, parameter, nothing) for name, parameter in self.parameters]
        counts_by_rank = self._gathered(own, world)
        unused = []
        for (_, parameter), rows in zip(self.parameters, zip(*counts_by_rank, strict=True), strict=True):
            if _NONE in rows:
                unused.append(parameter)
            if _DENSE in rows:
                _average_dense(parameter, group)
            elif max(rows) >= 0:
                _average_rows(parameter, [max(count, 0) for count in rows], group)
            if parameter.grad is not None and (isinstance(factor, Tensor) or factor != 1):
                multiply(values_of(parameter.grad), factor)
        return unused

    @property
    def _device(self) -> torch.device:
        return self.parameters[0][1].device

    def _gathered(self, own: Sequence[int], world: World) -> list[list[int]]:
        mine = torch.tensor(own, device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(gathered, mine, world.group_for(self._device))
        return [each.tolist() for each in gathered]


def _own_rows(name: str, parameter: nn.Parameter, nothing: int) -> int:
    """Coalesce a parameter's gradient; return its number of rows, or what stands for a gradient without rows."""
    if parameter.grad is None:
        return nothing
    gradient = checked_gradient(name, parameter)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
    parameter.grad = gradient
    is_by_rows = gradient.is_sparse and gradient.sparse_dim() == 1
    return gradient.indices().shape[1] if is_by_rows else _DENSE


def _average_dense(parameter: nn.Parameter, group: Any) -> None:
    gradient = parameter.grad
    dense = torch.zeros_like(parameter) if gradient is None else gradient.to_dense().contiguous()
    MeanWork(dense, group).wait()
    parameter.grad = dense


def _average_rows(parameter: nn.Parameter, counts: Sequence[int], group: Any) -> None:
    gradient = parameter.grad
    rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty((0, *parameter.shape[1:]))
    if gradient is not None:
        rows = gradient.indices()[0]
        values = gradient.values()
    rows = gathered_rows(rows, counts, group)
    values = gathered_rows(values, counts, group)
    # check_invariants: PyTorch warns unless it is set; the rows come from sparse gradients of the same shape.
    total = torch.sparse_coo_tensor(
        rows[None], values / len(counts), parameter.shape, device=values.device, check_invariants=False
    )
    parameter.grad = total.coalesce()  # the same sums, in the same order, on every rank
