"""Whether numbers are finite, found out at the cost of reading them once."""

from __future__ import annotations

import cmath
from collections.abc import Iterable

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns whether no tensor holds NaN or an infinity.

    Cost: the sum of each tensor, and one wait for each device; a sum that is not finite by itself costs a closer look.
    """
    found = list(tensors)
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in found:
        # Sums of 16 bits would overflow too often.
        own = tensor.sum(dtype=torch.float32) if tensor.dtype in _HALVES else tensor.sum()
        kinds.setdefault((own.device, own.dtype), []).append(own)
    totals = [torch.stack(sums).sum().item() if len(sums) > 1 else sums[0].item() for sums in kinds.values()]
    # A sum hides nothing: NaN and infinities stay what they are, or become NaN. But it may overflow.
    return all(map(cmath.isfinite, totals)) or all(bool(tensor.isfinite().all()) for tensor in found)
