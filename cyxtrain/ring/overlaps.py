"""Several tensors in one call that share memory: what is done to one must not change the others before their turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cyxtrain.ring.tensors import check_target, replace


@contextlib.contextmanager
def parted(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Within, tensors that are changed in place, one after the other, in the place of those that share memory.

    Where two do, all are copied before and written at the end: as often as an element stands there, it is reduced once.
    """
    if len(tensors) == 1 or not _meet([(tensor, place) for place, tensor in enumerate(tensors)]):
        yield tensors
        return
    for tensor in tensors:
        if tensor.layout is torch.strided:
            check_target(tensor)
    copies = [tensor.detach().clone() for tensor in tensors]
    yield copies
    for tensor, copy in zip(tensors, copies, strict=True):
        replace(tensor, copy)


def untouched(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
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
