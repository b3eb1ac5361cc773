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
    on_cpu: list[Tensor] = []
    elsewhere: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cpu:
            on_cpu.append(tensor)
        else:
            elsewhere.setdefault(tensor.device, []).append(tensor)
    return _all_finite_on_cpu(on_cpu) and all(map(_all_finite_on_accelerator, elsewhere.values()))


def _all_finite_on_cpu(tensors: Sequence[Tensor]) -> bool:
    if len(tensors) <= _FEW:
        return all(map(is_finite, tensors))
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype.is_complex or tensor.numel() >= _LARGE:
            if not is_finite(tensor):
                return False
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    return all(is_finite(torch_compat.flatten(alike)) for alike in small.values())


def _all_finite_on_accelerator(tensors: Sequence[Tensor]) -> bool:
    _, vectors = magnitudes(tensors)
    return not vectors or bool(torch.cat(vectors).isfinite().all())


def magnitudes(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return the numbers of the tensors with elements; the largest absolute values, a vector per dtype.

    The value is NaN if a tensor holds one. The tensors are on one device; the host does not wait.
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault(tensor.dtype, []).append(number)
    numbers: list[int] = []
    vectors: list[Tensor] = []
    for alike in kinds.values():
        numbers += alike
        norms = torch_compat.max_norms([tensors[number] for number in alike])
        vectors.append(torch.stack(norms))
    return numbers, vectors


def values_of(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient as a dense tensor; of a sparse one, its values."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
