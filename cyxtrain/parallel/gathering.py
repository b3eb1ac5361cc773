"""Rows of all ranks in one tensor, with gradients: for losses that compare the rows of a batch with each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.errors import CollectiveMismatchError, ConfigError, on_all_ranks
from cyxtrain.parallel.consistency.tensor_parts import bytes_of
from cyxtrain.world import runtime

_NAME = "all_gather_with_grad"
_MOST_DIMENSIONS = 8
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


class GatherCall(NamedTuple):
    """A call of `all_gather_with_grad` that a forward makes, in each batch alike."""

    row_shape: tuple[int, ...]
    dtype: torch.dtype


class _Layout(NamedTuple):
    """What the ranks give to one call, the same on every rank."""

    rows: list[int]
    row_shape: list[int]
    dtype: torch.dtype
    needs_gradient: bool


class Gathered(NamedTuple):
    """Rows of all ranks, and the node of the graph that made them; None: they need no gradient."""

    rows: Tensor
    node: Any


class _Calls:
    """How calls are made now: over all ranks, which may keep their results, or by this rank alone, which notes them."""

    alone: list[GatherCall] | None = None
    kept: list[Gathered] | None = None


def all_gather_with_grad(tensor: Tensor) -> Tensor:
    """Concatenates the rows of all ranks, in rank order, with gradients. All ranks call it.

    For losses over pairs: each rank compares its rows with those of all. Ranks may have different numbers of rows, also
    none. In backward, each row gets the sum over ranks of its gradients. If gradients of parameters are then averaged
    over ranks, as `DistributedDataParallel` does, the result is the gradient of the mean of the ranks' losses: if every
    rank computes the same loss over all rows, it is the gradient of that loss. `fit` weights the ranks' losses by rows,
    with the same result. In `evaluate` and `predict`, where each rank has batches of its own, it returns `tensor`.

    Cost: a gather of some numbers; then a gather of the rows, and in backward a reduce-scatter, both padded to the
    largest number of rows.

    Args:
        tensor: This rank's rows, shape (rows, ...).

    Returns:
        Shape (rows of all ranks, ...). In a world of one: `tensor`.

    Raises:
        NotInitializedError: Before `init`.
        CollectiveMismatchError: Ranks have rows of different shapes or dtypes; on every rank.
        ConfigError: The tensor has no rows: its shape is ().
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_world(_NAME)
    if not 1 <= tensor.dim() <= _MOST_DIMENSIONS:
        raise ConfigError(
            f"{_NAME} needs shape (rows, ...), up to {_MOST_DIMENSIONS} dimensions, got {[*tensor.shape]}."
        )
    if _Calls.alone is not None:
        _Calls.alone.append(GatherCall(tuple(tensor.shape[1:]), tensor.dtype))
        return tensor
    return tensor if dist.get_world_size() == 1 else _gathered(tensor, _layout_of(tensor))


@contextlib.contextmanager
def gathering_alone() -> Iterator[list[GatherCall]]:
    """Within, `all_gather_with_grad` returns this rank's rows without asking the others; gives what was called."""
    before, _Calls.alone = _Calls.alone, []
    try:
        yield _Calls.alone
    finally:
        _Calls.alone = before


@contextlib.contextmanager
def gathers_kept() -> Iterator[list[Gathered]]:
    """Within, keeps what `all_gather_with_grad` returns, for `backward_alike`."""
    before, _Calls.kept = _Calls.kept, []
    try:
        yield _Calls.kept
    finally:
        _Calls.kept = before


def gather_nothing(calls: Sequence[GatherCall], device: torch.device) -> None:
    """Makes the calls of a rank without rows.

    Args:
        calls: That the other ranks make.
        device: Where they make them.
    """
    with torch.enable_grad():
        for call in calls:
            empty = torch.empty((0, *call.row_shape), dtype=call.dtype, device=device)
            layout = _layout_of(empty)
            _gathered(empty.requires_grad_(layout.needs_gradient), layout)


def backward_alike(loss: Tensor | None, kept: Sequence[Gathered]) -> None:
    """Runs backward of a loss, with that of each gather that the loss of any rank depends on. All ranks call it.

    Each gather's backward is a collective: a rank without rows takes part in those that the others run, which are not
    those of gathers that their losses detach. Cost: a walk over the graph, and an all_reduce of a few bytes.

    Args:
        loss: Of this rank, 0-dim; None: it has no rows.
        kept: What this rank has gathered in the forward.
    """
    own = _depends_on(loss, kept)
    anyone = torch.tensor(own, dtype=torch.uint8, device="cpu")
    dist.all_reduce(anyone, dist.ReduceOp.MAX, group=runtime.cpu_group())
    others = [each.rows for each, here, there in zip(kept, own, anyone.tolist(), strict=True) if there and not here]
    if loss is not None or others:
        torch.autograd.backward(
            [*([] if loss is None else [loss]), *others],
            [*([] if loss is None else [None]), *map(torch.zeros_like, others)],
        )


def _depends_on(loss: Tensor | None, kept: Sequence[Gathered]) -> list[bool]:
    found, waiting = set(), [] if loss is None else [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [each.node in found for each in kept]


def _gathered(tensor: Tensor, layout: _Layout) -> Tensor:
    gathered: Tensor = _Gather.apply(tensor, layout)  # type: ignore[no-untyped-call]
    if _Calls.kept is not None:
        _Calls.kept.append(Gathered(gathered, gathered.grad_fn))
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: _Layout) -> Tensor:
        ctx.rows, most = layout.rows, max(layout.rows)
        own = _padded(tensor.detach().to(layout.dtype).reshape(len(tensor), *layout.row_shape), most)
        parts = [torch.empty_like(own) for _ in layout.rows]
        if own.is_cpu:
            dist.all_gather(parts, own, group=runtime.group_for(own.device))
        else:
            dist.all_gather([*map(bytes_of, parts)], bytes_of(own), group=runtime.group_for(own.device))
        return torch.cat([part[:rows] for part, rows in zip(parts, layout.rows, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = [_padded(part, max(ctx.rows)) for part in gradient.split(ctx.rows)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=runtime.group_for(own.device))
        return own[: ctx.rows[dist.get_rank()]], None


def _padded(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    return rows.contiguous() if missing == 0 else torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def _layout_of(tensor: Tensor) -> _Layout:
    """Returns what the ranks give; raises on every rank if it does not fit."""
    asks = tensor.requires_grad and torch.is_grad_enabled()
    kind = [len(tensor), int(asks), _DTYPES.index(tensor.dtype), *tensor.shape[1:]]
    own = torch.full([3 + _MOST_DIMENSIONS], -1, dtype=torch.int64, device="cpu")
    own[: len(kind)] = torch.tensor(kind, device="cpu")
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own, group=runtime.cpu_group())
    kinds = [each.tolist() for each in everyone]
    first = next((kind for kind in kinds if kind[0]), kinds[0])
    for rank, kind in enumerate(kinds):
        if kind[0] and kind[2:] != first[2:]:
            error = CollectiveMismatchError(
                f"{_NAME}: rows have {_described(first)} on rank {kinds.index(first)}, and {_described(kind)} on rank "
                f"{rank}: all ranks must give rows of one shape and dtype.",
                rank=rank,
                during=_NAME,
            )
            raise on_all_ranks(error)
    needs_gradient = any(kind[1] for kind in kinds)
    return _Layout([kind[0] for kind in kinds], _row_shape(first), _DTYPES[first[2]], needs_gradient)


def _row_shape(kind: list[int]) -> list[int]:
    return [size for size in kind[3:] if size >= 0]


def _described(kind: list[int]) -> str:
    return f"shape {_row_shape(kind)} and dtype {str(_DTYPES[kind[2]]).removeprefix('torch.')}"
