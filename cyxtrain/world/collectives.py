"""The collectives, with the arguments of `torch.distributed`'s and what they do in place, over the default group.

All ranks call the same ones in the same order; `send` and `recv` meet in pairs. Over the ring each waits no longer than
`collective_timeout_ms`, and raises on every rank

    PeerLostError               where a rank has ended, or the network to it is cut
    PeerSilentError             where a rank is stopped
    CollectiveTimeoutError      where a rank does not come before the deadline
    CollectiveMismatchError     where ranks call different ones, or with tensors that do not fit

with the rank and the call. Sums have the same bits on every rank and in every run: their order depends only on the
number of ranks, of elements and the dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from cyxtrain.ring import RingProcessGroup
from cyxtrain.world import runtime
from cyxtrain.world.consensus import backends_of


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduces a tensor in place, on all ranks. See `torch.distributed.all_reduce`.

    Cost over the ring of N ranks: 2 (N - 1) / N of its bytes each way; up to 256 KiB all of them, about log2 N times;
    up to 16 KiB on up to 8 ranks, N - 1 times in one round.

    Args:
        tensor: This rank's part; then the result, the same bits on every rank.
        op: A `ReduceOp`.
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("all_reduce")
    return dist.all_reduce(tensor, op, _carrier(group, tensor), async_op)


def broadcast(
    tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
) -> Any:
    """Copies the tensor of rank `src` to all, in place. See `torch.distributed.broadcast`.

    Cost over the ring of N ranks: its bytes once in and once out of each rank; up to 16 KiB on up to 8 ranks, from
    `src` to all at once.

    Args:
        tensor: What is sent on rank `src`, and what is overwritten on the others; all of one shape and dtype.
        src: The rank that sends; None: 0.
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.
        group_src: The same as its rank in `group`; one of the two.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("broadcast")
    return dist.broadcast(tensor, _named_or_0(src, group_src), _carrier(group, tensor), async_op, group_src)


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Copies the tensor of every rank to all. See `torch.distributed.all_gather`.

    Cost over the ring of N ranks: N - 1 times the bytes of `tensor` each way.

    Args:
        tensor_list: A tensor for each rank, which gets that rank's.
        tensor: This rank's.
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("all_gather")
    return dist.all_gather(tensor_list, tensor, _carrier(group, tensor), async_op)


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduces a list of tensors and leaves to each rank its own. See `torch.distributed.reduce_scatter`.

    Cost over the ring of N ranks: N - 1 times the bytes of `output` each way; of lists up to 256 KiB, as `all_reduce`.

    Args:
        output: Gets the sum (or what `op` says) of all ranks' tensors for this rank.
        input_list: A tensor for each rank.
        op: A `ReduceOp`.
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("reduce_scatter")
    return dist.reduce_scatter(output, input_list, op, _carrier(group, output), async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Copies to each rank its tensor of a list on rank `src`. See `torch.distributed.scatter`.

    Cost over the ring of N ranks: `src` sends the bytes of N - 1 tensors, the others receive those of one.

    Args:
        tensor: Gets this rank's.
        scatter_list: On rank `src`, a tensor for each rank; None elsewhere.
        src: The rank that sends; None: 0.
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.
        group_src: The same as its rank in `group`; one of the two.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("scatter")
    return dist.scatter(tensor, scatter_list, _named_or_0(src, group_src), _carrier(group, tensor), async_op, group_src)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Copies the tensor of every rank to rank `dst`. See `torch.distributed.gather`.

    Cost over the ring of N ranks: `dst` receives the bytes of N - 1 tensors, the others send those of one.

    Args:
        tensor: This rank's.
        gather_list: On rank `dst`, a tensor for each rank, which gets that rank's; None elsewhere.
        dst: The rank that receives; None: 0.
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.
        group_dst: The same as its rank in `group`; one of the two.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("gather")
    return dist.gather(tensor, gather_list, _named_or_0(dst, group_dst), _carrier(group, tensor), async_op, group_dst)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Reduces a tensor in place on rank `dst`. See `torch.distributed.reduce`.

    Cost over the ring of N ranks: (N - 1) / N of its bytes each way, then 1 / N from each rank to `dst`; up to 256 KiB
    as `all_reduce`.

    Args:
        tensor: This rank's part; on rank `dst` then the result.
        dst: The rank that receives; None: 0.
        op: A `ReduceOp`.
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.
        group_dst: The same as its rank in `group`; one of the two.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("reduce")
    return dist.reduce(tensor, _named_or_0(dst, group_dst), op, _carrier(group, tensor), async_op, group_dst)


def barrier(group: Any = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Returns when all ranks have called it. See `torch.distributed.barrier`.

    Cost over the ring of N ranks: ceil(log2 N) rounds of empty frames; of all ranks, also two small all_gathers, in
    which they see that all of them call it.

    Args:
        group: One of `torch.distributed`'s; None: all ranks.
        async_op: Go on at once: what is returned has a `wait()`.
        device_ids: The GPU that NCCL uses; None: this rank's.

    Returns:
        The work to wait for, where `async_op`; else None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("barrier")
    if (
        group is None
        and not async_op
        and dist.get_world_size() > 1
        and isinstance(runtime.cpu_group(), RingProcessGroup)
    ):
        runtime.roll_call("barrier")
    if group is None and device_ids is None and "nccl" in backends_of().values():
        device_ids = [torch.accelerator.current_device_index()]  # NCCL would take one by the rank
    return dist.barrier(group, async_op, device_ids)


def send(tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
    """Sends a tensor to one rank. See `torch.distributed.send`.

    Args:
        tensor: What is sent.
        dst: To which rank.
        group: One of `torch.distributed`'s; None: all ranks.
        tag: Which `recv` of that rank takes it: the one with the same.
        group_dst: The same as its rank in `group`; one of the two.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("send")
    dist.send(tensor, dst, _carrier(group, tensor), tag, group_dst)


def recv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
    """Receives a tensor from one rank, or from any; returns which. See `torch.distributed.recv`.

    Args:
        tensor: Is overwritten.
        src: From which rank; None: from any.
        group: One of `torch.distributed`'s; None: all ranks.
        tag: That of the `send`.
        group_src: The same as its rank in `group`.

    Returns:
        The rank that has sent it.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank is lost, silent or late, or calls something else.
    """
    runtime.require_rank("recv")
    return dist.recv(tensor, src, _carrier(group, tensor), tag, group_src)


def _carrier(group: Any, tensor: Tensor) -> Any:
    """Returns the group that carries a tensor: of all ranks, the default one or, for the CPU, the ring beside NCCL."""
    if group is not None or runtime._beside is None:  # a small call takes microseconds
        return group
    return runtime.group_for(tensor.device)


def _named_or_0(rank: int | None, group_rank: int | None) -> int | None:
    """Returns the rank that the caller named, or 0 where it named none in either way."""
    return 0 if rank is None and group_rank is None else rank
