"""A differentiable all_gather, for losses that compare the samples of a batch with each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config.settings import names_checked
from cyxtrain.errors import CollectiveMismatchError, ConfigError, on_all_ranks
from cyxtrain.tensors.layouts import bytes_of
from cyxtrain.world import runtime
from cyxtrain.world.world import World

_NAME = "all_gather_with_grad"
_MOST_DIMENSIONS = 8
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


class GatherCall(NamedTuple):
    """A call of `all_gather_with_grad` in a forward; unless local, its result, and the result's node."""

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Tensor | None = None
    node: Any = None


class _Layout(NamedTuple):
    """The arguments of all ranks to one call; the same on every rank."""

    rows: list[int]
    row_shape: list[int]
    dtype: torch.dtype
    needs_gradient: bool


class _Recording:
    """The calls that are recorded now, and whether they are local."""

    calls: list[GatherCall] | None = None
    is_local = False


@names_checked
def all_gather_with_grad(tensor: Tensor) -> Tensor:
    """Concatenate the rows (samples) of all ranks, in rank order, with gradients. All ranks call it.

    Use it in contrastive losses: each rank compares its rows with the rows of all ranks. Ranks may have different
    numbers of rows, or none. In backward, each row gets the sum over ranks of its gradients. If gradients of parameters
    are then averaged over ranks, as `DistributedDataParallel` does, the result is the gradient of the mean of the
    ranks' losses: if every rank computes the same loss over all rows, it is the gradient of that loss. `fit` weights
    the ranks' losses by rows, with the same result. In `evaluate` and `predict`, where ranks have separate batches, it
    returns `tensor`.

    Cost: a gather of a few numbers; then a gather of the rows, and in backward a reduce-scatter, both padded to the
    largest number of rows.

    Args:
        tensor: This rank's rows, shape (rows, ...).

    Returns:
        Shape (rows of all ranks, ...). In a world of one: `tensor`.

    Raises:
        NotInitializedError: Before `init`.
        CollectiveMismatchError: Ranks have rows of different shapes or dtypes; on every rank.
        ConfigError: The tensor has no rows: its shape is ().
        CyxtrainError: Another rank died, is suspended or late, or calls another collective.
    """
    runtime.require_rank(_NAME)
    runtime.rejoin_after_failure()
    if not 1 <= tensor.dim() <= _MOST_DIMENSIONS:
        raise ConfigError(
            f"{_NAME} needs shape (rows, ...), up to {_MOST_DIMENSIONS} dimensions, got {[*tensor.shape]}."
        )
    if _Recording.is_local and _Recording.calls is not None:
        _Recording.calls.append(GatherCall(tuple(tensor.shape[1:]), tensor.dtype))
        return tensor
    world = runtime.current()
    if world.size == 1:
        return tensor
    return _gathered(tensor, _layout_of(world, tensor), world)


@contextlib.contextmanager
def _recording(*, is_local: bool) -> Iterator[list[GatherCall]]:
    calls_before = _Recording.calls
    was_local = _Recording.is_local
    calls: list[GatherCall] = []
    _Recording.calls = calls
    _Recording.is_local = is_local
    try:
        yield calls
    finally:
        _Recording.calls = calls_before
        _Recording.is_local = was_local


gathering_alone = functools.partial(_recording, is_local=True)
"""Within, `all_gather_with_grad` returns this rank's rows without asking the others; yields the calls."""
gathers_kept = functools.partial(_recording, is_local=False)
"""Within, records the calls of `all_gather_with_grad` with their results, for `backward_alike`; yields them."""


def gather_no_rows(world: World, calls: Sequence[GatherCall], device: torch.device) -> None:
    """Make the calls that other ranks make, on a device, without rows."""
    with torch.enable_grad():
        for call in calls:
            empty = torch.empty((0, *call.row_shape), dtype=call.dtype, device=device)
            layout = _layout_of(world, empty)
            _gathered(empty.requires_grad_(layout.needs_gradient), layout, world)


def backward_alike(world: World, loss: Tensor | None, kept: Sequence[GatherCall]) -> None:
    """Run backward of a loss, and of each gather that any rank's loss needs. All ranks call it.

    Each gather's backward is a collective: a rank without rows, whose loss is None, takes part in those that the others
    run, except for gathers that their losses detach. Cost: a walk over the graph, and an all_reduce of a few bytes.
    """
    if loss is not None and not loss.requires_grad:
        loss = None
    own = _depends_on(loss, kept)
    anyone = world.reduce(torch.tensor(own, dtype=torch.uint8, device="cpu"), dist.ReduceOp.MAX)
    roots: list[Tensor] = []
    gradients: list[Tensor | None] = []
    if loss is not None:
        roots.append(loss)
        gradients.append(None)
    for call, is_needed_here, is_needed in zip(kept, own, anyone.tolist(), strict=True):
        if is_needed and not is_needed_here and call.rows is not None:
            roots.append(call.rows)
            gradients.append(torch.zeros_like(call.rows))
    if roots:
        torch.autograd.backward(roots, gradients)


def depending_on(loss: Tensor, kept: Sequence[GatherCall]) -> Tensor:
    """Return a constant loss whose backward runs the backward of all gathers, for which other ranks wait."""
    for call in kept:
        if call.rows is not None and call.node is not None:
            # Times 0 before the sum, which may be too large for 16 bits.
            loss = loss + (call.rows * 0.0).sum()
    return loss


def _depends_on(loss: Tensor | None, kept: Sequence[GatherCall]) -> list[bool]:
    """Return for each gather whether the graph of a loss has it."""
    found = set()
    waiting = [] if loss is None else [loss.grad_fn]  # a stack: graphs are deeper than Python recurses
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [each.node in found for each in kept]


def _gathered(tensor: Tensor, layout: _Layout, world: World) -> Tensor:
    gathered: Tensor = _Gather.apply(tensor, layout, world)  # type: ignore[no-untyped-call]
    if _Recording.calls is not None:
        _Recording.calls.append(GatherCall(tuple(tensor.shape[1:]), tensor.dtype, gathered, gathered.grad_fn))
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: _Layout, world: World) -> Tensor:
        ctx.rows = layout.rows
        ctx.world = world
        own = tensor.detach().to(layout.dtype).reshape(len(tensor), *layout.row_shape)
        return gathered_rows(own, layout.rows, world.group_for(own.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        parts = [_padded(part, max(ctx.rows)) for part in gradient.split(ctx.rows)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.world.group_for(own.device))
        return own[: ctx.rows[ctx.world.rank]], None, None


def gathered_rows(own: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Return the rows of all ranks, in the order of ranks, which have `counts` of them."""
    padded = _padded(own, max(counts))
    parts = [torch.empty_like(padded) for _ in counts]
    if own.is_cpu:
        dist.all_gather(parts, padded, group=group)
    else:
        dist.all_gather([*map(bytes_of, parts)], bytes_of(padded), group=group)  # NCCL has no int16, say
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _padded(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    if missing == 0:
        return rows.contiguous()  # NCCL takes nothing else
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def _layout_of(world: World, tensor: Tensor) -> _Layout:
    """Return the arguments of all ranks; raise on every rank if they do not match."""
    needs_own = tensor.requires_grad and torch.is_grad_enabled()
    kind = [len(tensor), int(needs_own), _DTYPES.index(tensor.dtype), *tensor.shape[1:]]
    own = torch.full([3 + _MOST_DIMENSIONS], -1, dtype=torch.int64, device="cpu")  # not on the user's default device
    own[: len(kind)] = torch.tensor(kind, device="cpu")
    gathered = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(gathered, own, group=world.cpu_group)
    kinds = [each.tolist() for each in gathered]
    # Only ranks with rows are compared: the form of an empty tensor does not matter.
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
