"""Whether numbers are finite, found out at the cost of reading them once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cyxtrain.environment import torch_compat
from cyxtrain.ring import is_finite

_FEW = 8
"""Up to so many tensors each is added up by itself: to sort them takes longer."""
_LARGE = 1 << 16
"""Elements from which an operation for each tensor costs less than to put them together."""


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether no tensor holds NaN or an infinity.

    Cost: on CPUs they are added up, many small ones of a dtype copied together. On an accelerator they are read by one
    operation for all of a dtype, and the host waits once for each device.

    Args:
        tensors: Of floats or complex numbers, without holes in memory, that no graph needs.
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
    """Return the largest absolute value in each tensor; NaN where it holds one. The host does not wait.

    Cost: each element is read once, by one operation for all tensors of a dtype.

    Args:
        tensors: Of floats or complex numbers, on one device.

    Returns:
        (numbers of the tensors that have elements; their magnitudes, a vector for each dtype).
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault(tensor.dtype, []).append(number)
    vectors = [torch.stack(torch_compat.max_norms([tensors[number] for number in kind])) for kind in kinds.values()]
    return [number for kind in kinds.values() for number in kind], vectors


def values_of(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient as a dense tensor: of a sparse one, what it holds for each row."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
