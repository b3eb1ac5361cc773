"""Checks for NaN and infinities that read the numbers once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cyxtrain.environment import torch_compat
from cyxtrain.ring import is_finite

_FEW = 8  # up to so many tensors are summed one by one: grouping them takes longer
_LARGE = 1 << 16  # elements from which one operation per tensor costs less than joining them


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether no tensor holds NaN or an infinity.

    Cost: CPU tensors are summed, many small ones of a dtype joined by a copy. On an accelerator one operation reads all
    of a dtype, and the host waits once for each device.
    """
    if len(tensors) <= _FEW and all(tensor.is_cpu for tensor in tensors):
        return all(map(is_finite, tensors))
    small: dict[torch.dtype, list[Tensor]] = {}
    elsewhere: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.is_cpu:
            elsewhere.setdefault(tensor.device, []).append(tensor)
        elif tensor.dtype.is_complex or tensor.numel() >= _LARGE:
            if not is_finite(tensor):
                return False
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    return all(is_finite(torch_compat.flatten(kind)) for kind in small.values()) and all(
        bool(torch.cat(found).isfinite().all()) for each in elsewhere.values() if (found := magnitudes(each)[1])
    )


def magnitudes(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return the numbers of the tensors with elements; the largest absolute values, a vector per dtype.

    The value is NaN if a tensor holds one. The tensors are on one device; the host does not wait.
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault(tensor.dtype, []).append(number)
    vectors = [torch.stack(torch_compat.max_norms([tensors[number] for number in kind])) for kind in kinds.values()]
    return [number for kind in kinds.values() for number in kind], vectors


def values_of(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient as a dense tensor; of a sparse one, its values."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
