"""The collectives of `torch.distributed` over the default group, with the same arguments.

All ranks make the same calls in the same order; `send` and `recv` meet in pairs. Over the ring none waits longer than
`collective_timeout_ms`. Before `init` they raise `NotInitializedError`; afterwards every rank raises, with the rank and
the call,

    PeerLostError               if a rank has ended, or the network to it is cut
    PeerSilentError             if a rank is suspended
    CollectiveTimeoutError      if a rank does not call before the deadline
    CollectiveMismatchError     if ranks make different calls, or with tensors that do not fit

After an error that a program has caught, the next call over the default group begins a new world, on all ranks; not
if a rank was lost or silent: then all ranks must be started again.

Sums have the same bits on every rank and in every run: their order depends only on the number of ranks, of elements and
the dtype.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import ParamSpec

from cyxtrain.ring import is_ring
from cyxtrain.world import runtime
from cyxtrain.world.consensus import backends_of

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

_ARGUMENTS = {
    "tensor": "This rank's tensor; overwritten with the result, unless a list or `output` takes it.",
    "tensor_list": "A tensor for each rank, which receives that rank's tensor.",
    "output": "Receives this rank's result.",
    "input_list": "A tensor for each rank.",
    "scatter_list": "On rank `src` a tensor for each rank; None elsewhere.",
    "gather_list": "On rank `dst` a tensor for each rank, which receives that rank's tensor; None elsewhere.",
    "op": "A `ReduceOp`.",
    "src": "The rank that sends.",
    "dst": "The rank that receives.",
    "group": "A group of `torch.distributed`; None: all ranks.",
    "async_op": "Return at once, with a work that has a `wait()`.",
    "tag": "A `recv` takes the `send` with the same tag.",
    "group_src": "The same as `src`, as a rank of `group`.",
    "group_dst": "The same as `dst`, as a rank of `group`.",
}
_ERRORS = """    NotInitializedError: Before `init`.
    CyxtrainError: Another rank died, is suspended or late, or makes another call.
    ValueError: PyTorch refuses an argument."""


def _collective(function: Callable[_P, _Result], doc: str, default: str = "") -> Callable[_P, _Result]:
    """Wrap a collective of PyTorch: require a rank, and choose the group by the tensor's device.

    `doc` describes it, with its cost over the ring of N ranks; `default` is the argument, "src" or "dst", that is 0 if
    the caller does not set it.
    """
    signature = inspect.signature(function)
    names = [*signature.parameters]
    tensor = "output" if "output" in names else "tensor"
    group_index = names.index("group")
    default_index = names.index(default) if default else 0

    def call_completed(*args: _P.args, **named: _P.kwargs) -> _Result:
        """Call it after completing a rank that is None, and the group that carries the tensor's device."""
        bound = signature.bind(*args, **named)
        given = bound.arguments
        if default and given.get(default) is None and given.get(f"group_{default}") is None:
            given[default] = 0
        if given.get("group") is None:
            given["group"] = runtime.group_for(given[tensor].device)
        return function(*bound.args, **bound.kwargs)

    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _Result:
        runtime.require_rank(function.__name__)
        if not (named.get("group") or any(args[group_index : group_index + 1])):
            runtime.rejoin_after_failure()
        is_absent = bool(default) and len(args) <= default_index and named.get(default) is None
        if is_absent and named.get(f"group_{default}") is None:
            named[default] = 0
        is_none = bool(default) and len(args) > default_index and args[default_index] is None
        # A small call takes microseconds: arguments are bound to their names only if that is needed.
        if not is_none and not runtime.has_side_ring():
            return function(*args, **named)
        return call_completed(*args, **named)

    arguments = "\n".join(f"    {name}: {_ARGUMENTS.get(name, 'See PyTorch.')}" for name in names)
    see = f"See `torch.distributed.{function.__name__}`."
    call.__module__ = __name__  # with PyTorch's module, pickle would return PyTorch's function
    call.__doc__ = f"{doc}\n\n{see}\n\nArgs:\n{arguments}\n\nRaises:\n{_ERRORS}\n"
    return call


all_reduce = _collective(
    dist.all_reduce,
    "Reduce a tensor in place, on all ranks. Cost: 2 (N - 1) / N of its bytes each way; up to 256 KiB all of them, "
    "about log2 N times; up to 16 KiB on up to 8 ranks, N - 1 times in one round.",
)
broadcast = _collective(
    dist.broadcast,
    "Copy the tensor of rank `src` (default: 0) to all, in place. Cost: its bytes once in and once out of each rank; "
    "up to 16 KiB on up to 8 ranks, from `src` to all at once.",
    default="src",
)
all_gather = _collective(
    dist.all_gather,
    "Copy the tensor of every rank to all. Cost: N - 1 times the bytes of `tensor` each way.",
)
reduce_scatter = _collective(
    dist.reduce_scatter,
    "Reduce a list of tensors, one per rank, and leave its own to each rank. Cost: N - 1 times the bytes of `output` "
    "each way; of lists up to 256 KiB, as `all_reduce`.",
)
scatter = _collective(
    dist.scatter,
    "Copy to each rank its tensor of a list on rank `src` (default: 0). Cost: `src` sends N - 1 tensors.",
    default="src",
)
gather = _collective(
    dist.gather,
    "Copy the tensor of every rank to rank `dst` (default: 0). Cost: `dst` receives N - 1 tensors.",
    default="dst",
)
reduce = _collective(
    dist.reduce,
    "Reduce a tensor in place on rank `dst` (default: 0). Cost: (N - 1) / N of its bytes each way, then 1 / N from "
    "each rank to `dst`; up to 256 KiB as `all_reduce`.",
    default="dst",
)
send = _collective(dist.send, "Send a tensor to rank `dst`; the `recv` with the same `tag` takes it.")
recv = _collective(dist.recv, "Receive a tensor from rank `src`, or from any (None); return the rank that sent it.")


def barrier(group: Any = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Wait until all ranks have called it. See `torch.distributed.barrier`.

    Cost over the ring of N ranks: ceil(log2 N) rounds of empty frames; for all ranks also two small all_gathers, which
    check that all of them call it.

    Args:
        group: One of `torch.distributed`; None: all ranks.
        async_op: Return at once, with a work that has a `wait()`.
        device_ids: The GPU that NCCL uses; None: this rank's.

    Returns:
        The work to wait for, if `async_op`; otherwise None.

    Raises:
        NotInitializedError: Before `init`.
        CyxtrainError: Another rank died, is suspended or late, or makes another call.
    """
    runtime.require_rank("barrier")
    if group is None:
        runtime.rejoin_after_failure()
    # Over other backends, ranks that make different calls would hang.
    checks_call = group is None and not async_op and dist.get_world_size() > 1
    if torch.compiler.is_compiling():
        checks_call = False  # torch.compile cannot look into a group
    if checks_call and is_ring(runtime.cpu_group()):
        runtime.current().check_same_call("barrier")
    if group is None and device_ids is None and "nccl" in backends_of().values():
        device_ids = [torch.accelerator.current_device_index()]  # NCCL would choose one by the rank
    return dist.barrier(group, async_op, device_ids)
