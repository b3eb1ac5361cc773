"""Whether numbers are finite, found out at the cost of reading them once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cyxtrain import torch_compat
from cyxtrain.ring.tensors import is_finite

_FEW = 8
"""Up to so many tensors each is added up by itself: to sort them takes longer."""
_LARGE = 1 << 16
"""Elements from which an operation for each tensor costs less than to put them together."""


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Returns whether no tensor holds NaN or an infinity.

    Cost: on CPUs they are added up, many small ones of a dtype copied together. On GPUs they are read, and written back
    as they are, by one operation for all of a dtype, for which one waits. Source: what torch.amp.GradScaler does.

    Args:
        tensors: Of floats or complex numbers, without holes in memory, that no graph needs.
    """
    if len(tensors) <= _FEW and all(tensor.is_cpu for tensor in tensors):
        return all(map(is_finite, tensors))
    kinds: dict[tuple[torch.dtype, torch.device | None], list[Tensor]] = {}
    for tensor in tensors:
        dtype, is_cpu = tensor.dtype, tensor.is_cpu
        if dtype.is_complex or (is_cpu and tensor.numel() >= _LARGE):
            if not is_finite(tensor):
                return False
        else:
            kinds.setdefault((dtype, None if is_cpu else tensor.device), []).append(tensor)
    return all(
        is_finite(torch_compat.flatten(kind)) if device is None else torch_compat.are_finite(kind, _one(device))
        for (_, device), kind in kinds.items()
    )


def values_of(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient as a dense tensor: of a sparse one, what it holds for each row."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)
