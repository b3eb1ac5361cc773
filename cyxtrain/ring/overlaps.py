"""Several tensors in one call that share memory: what is done to one must not change the others before their turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cyxtrain.ring.wire.payload import check_target, replace


def parted(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns each tensor that is to be changed in place, with what is changed in its place: itself, or a copy.

    Where two share memory all are copied before the first is changed, so each element is reduced once; `bring_back`
    writes the results.
    """
    if len(tensors) == 1 or not _meet([(tensor, place) for place, tensor in enumerate(tensors)]):
        return [(tensor, tensor) for tensor in tensors]
    for tensor in tensors:
        if tensor.layout is torch.strided:
            check_target(tensor)
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def bring_back(part: Tensor, tensor: Tensor) -> None:
    """Writes a result to where it belongs, if it is not there."""
    if part is not tensor:
        replace(tensor, part)


def snapshot(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the inputs, or copies of them where writing one output would change another one's input."""
    sides = (inputs, outputs)
    if len(inputs) > 1 and _meet([(tensor, place) for side in sides for place, tensor in enumerate(side)]):
        return [tensor.detach().clone() for tensor in inputs]
    return inputs


def _meet(placed: Sequence[tuple[Tensor, int]]) -> bool:
    """Returns whether two tensors with different places share memory, or may: they lie interlaced, or are sparse."""
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
    """Returns where a tensor's memory begins and ends."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
