"""PyTorch's arguments, converted to the ring's and checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.errors import ConfigError
from cyxtrain.ring.schedules.algorithms import Span
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.wire.payload import check_target, flat_view_of, replace, write

_TENSORS = {Tensor}
_One = TypeVar("_One")
_Other = TypeVar("_Other")
_REDUCTIONS = {getattr(dist.ReduceOp, each.name): each for each in Reduction if each}


def reduction_of(opts: Any) -> Reduction:
    """Return a call's reduction, SUM by default; refuse those that the ring does not have."""
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    kind: Any = getattr(op, "op", op)  # a ReduceOp has it, its RedOpType is it
    try:
        return _REDUCTIONS[kind]
    except (KeyError, TypeError):
        if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            raise ConfigError(
                f"a reduction is one of torch.distributed.ReduceOp, as ReduceOp.SUM, not {op!r}."
            ) from None
        raise ConfigError(
            f"the ring has no reduction {kind}; it has {', '.join(r.name for r in Reduction if r)}."
        ) from None


def timeout_of(opts: Any) -> timedelta | None:
    """Return a call's own timeout; None for a negative one, which is how PyTorch says none."""
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


def as_list(tensors: Any, name: str, count: int | None = None) -> list[Tensor]:
    """Return a list of tensors, also for a single one; refuse anything else or, if given, another `count`."""
    if isinstance(tensors, Tensor):
        return [tensors]
    # The usual case; the rest takes longer.
    if type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return tensors
    if type(tensors) is list and count in (None, len(tensors)) and {*map(type, tensors)} == _TENSORS:
        return tensors
    if not isinstance(tensors, Sequence) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ConfigError(f"{name}: needs a tensor, or a list of tensors, got {_kind(tensors)}.")
    if not tensors or count not in (None, len(tensors)):
        raise ConfigError(f"{name}: needs {count or 'at least one'} tensor, got {len(tensors)}.")
    return list(tensors)


def as_lists(lists: Any, name: str) -> list[list[Tensor]]:
    """Return a list of lists of tensors, also for a single list."""
    if not isinstance(lists, (list, tuple, Sequence)) or not lists:
        raise ConfigError(f"{name}: needs a list of tensors, got {_kind(lists)}.")
    if isinstance(lists[0], Tensor):
        return [as_list(lists, name)]
    return [as_list(tensors, name) for tensors in lists]


def _kind(given: Any) -> str:
    """Name the type of an argument and of its items."""
    if isinstance(given, (list, tuple)):
        inside = {_kind(part) for part in given}
        return f"a {type(given).__name__} of {' and '.join(sorted(inside)) or 'nothing'}"
    return type(given).__name__


def pairs(one: Sequence[_One], other: Sequence[_Other], name: str) -> list[tuple[_One, _Other]]:
    """Return the items at the same place in two lists; refuse lists of different lengths."""
    if len(one) != len(other):
        raise ConfigError(f"{name}: needs as many outputs as inputs, got {len(one)} and {len(other)}.")
    return list(zip(one, other, strict=True))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors in one dimension."""
    return torch.cat([flat_view_of(tensor) for tensor in tensors])


def neighbouring(lengths: Sequence[int]) -> list[Span]:
    """Return consecutive spans of these lengths."""
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return spans


def split_spans(tensor: Tensor, splits: Sequence[int], parts: int) -> list[Span]:
    """Return the spans of a tensor's parts, in elements; `splits` counts rows, and is empty for even parts."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % parts:
            raise ConfigError(f"all_to_all: {rows} rows do not divide among {parts} ranks; give the sizes of parts.")
        splits = [rows // parts] * parts
    if len(splits) != parts or sum(splits) != rows:
        raise ConfigError(f"all_to_all: parts of {list(splits)} rows do not make {rows} rows for {parts} ranks.")
    per_row = tensor.numel() // max(rows, 1)
    return neighbouring([split * per_row for split in splits])


def check_length(tensors: Sequence[Tensor], count: int, name: str, per: str = "rank") -> None:
    """Refuse a list that does not have `count` tensors."""
    if len(tensors) != count:
        raise ConfigError(f"{name}: needs a list of {count} tensors, one per {per}, got {len(tensors)}.")


def check_dtypes(tensors: Sequence[Tensor], name: str) -> None:
    """Refuse tensors of different dtypes."""
    found = sorted({str(tensor.dtype) for tensor in tensors})
    if len(found) > 1:
        raise ConfigError(f"{name}: needs tensors of one dtype, got {' and '.join(found)}.")


def check_shapes(tensors: Sequence[Tensor], like: Tensor, count: int, name: str) -> None:
    """Refuse a list without one tensor per rank, as large as `like` and of its dtype."""
    check_length(tensors, count, name)
    for tensor in tensors:
        check_count(tensor, like.numel(), like.dtype, name)


def check_targets(tensors: Sequence[Tensor], like: Tensor, count: int, name: str) -> None:
    """Refuse a list that cannot receive one tensor as large as `like` per rank."""
    check_shapes(tensors, like, count, name)
    for tensor in tensors:
        check_target(tensor)


def check_count(tensor: Tensor, count: int, dtype: torch.dtype, name: str) -> None:
    """Refuse a tensor of another number of elements or another dtype."""
    if tensor.numel() != count or tensor.dtype != dtype:
        raise ConfigError(
            f"{name}: needs a tensor of {count} elements of {dtype}, got {tensor.numel()} of {tensor.dtype}."
        )


def unpack(flat: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor into the outputs."""
    for index, output in enumerate(outputs):
        count = output.numel()
        write(flat[index * count : (index + 1) * count], output)


def parted(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor with what to change in its place: itself or, if any two share memory, a copy."""
    if len(tensors) == 1 or not _meet([(tensor, place) for place, tensor in enumerate(tensors)]):
        return [(tensor, tensor) for tensor in tensors]
    for tensor in tensors:
        if tensor.layout is torch.strided:
            check_target(tensor)
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def bring_back(part: Tensor, tensor: Tensor) -> None:
    """Copy a result to its tensor, if it is elsewhere."""
    if part is not tensor:
        replace(tensor, part)


def snapshot(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the inputs, or copies if writing one output would change another one's input."""
    sides = (inputs, outputs)
    if len(inputs) > 1 and _meet([(tensor, place) for side in sides for place, tensor in enumerate(side)]):
        return [tensor.detach().clone() for tensor in inputs]
    return inputs


def _meet(placed: Sequence[tuple[Tensor, int]]) -> bool:
    """Return whether tensors of different places share memory or may: interlaced and sparse ones count."""
    if any(tensor.layout is not torch.strided for tensor, _ in placed):
        return True
    spans = sorted((*_span(tensor), place) for tensor, place in placed if tensor.numel())
    reached, whose = 0, -1
    for begin, end, place in spans:
        if begin < reached and place != whose:
            return True
        if end > reached:
            reached, whose = end, place
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and last address of a tensor's memory."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
