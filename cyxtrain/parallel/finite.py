"""Whether numbers are finite, found out at the cost of reading them once."""

from __future__ import annotations

import cmath
import functools
from collections.abc import Iterable

import torch
from torch import Tensor

_SUMMED = (torch.float32, torch.float64)
_LARGE = 1 << 16
"""Elements from which reading alone takes less time, though it is an operation for each."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns whether no tensor holds NaN or an infinity.

    Cost: large ones on CPUs are read. The others are read, and written back as they are, by one operation for all of a
    device and dtype, for which one waits. Source: what torch.amp.GradScaler does with gradients.

    Args:
        tensors: Of floats or complex numbers, without holes in memory, that no graph needs.
    """
    kinds: dict[tuple[torch.dtype, torch.device | None], list[Tensor]] = {}
    for tensor in tensors:
        dtype, is_cpu = tensor.dtype, tensor.is_cpu
        if (is_cpu and dtype in _SUMMED and tensor.numel() >= _LARGE) or dtype.is_complex:
            if not _is_sum_finite(tensor):
                return False
        else:
            kinds.setdefault((dtype, None if is_cpu else tensor.device), []).append(tensor)
    return all(map(_are_finite, kinds.values()))


def _are_finite(tensors: list[Tensor]) -> bool:
    device = tensors[0].device
    found = torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, _one(device))
    return found.item() == 0


def _is_sum_finite(tensor: Tensor) -> bool:
    # A sum hides nothing: NaN and infinities stay what they are, or become NaN. But it may overflow.
    return cmath.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)
