"""Whether numbers are finite, found out at the cost of reading them once."""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns whether no tensor holds NaN or an infinity.

    Cost: the sum of each tensor, and one wait for each device; a sum that is not finite by itself costs a closer look.
    """
    found = list(tensors)
    # Sums of 16 bits would overflow too often.
    sums = [tensor.sum(dtype=torch.float32) if tensor.dtype in _HALVES else tensor.sum() for tensor in found]
    # A sum hides nothing: NaN and infinities stay what they are, or become NaN. But it may overflow.
    return all(map(cmath.isfinite, _numbers(sums))) or all(bool(tensor.isfinite().all()) for tensor in found)


def _numbers(sums: Sequence[Tensor]) -> Sequence[complex]:
    """Returns one number per tensor, or per kind of tensors on another device, for which one waits."""
    numbers = [own.item() for own in sums if own.device.type == "cpu"]
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for own in sums:
        if own.device.type != "cpu":
            kinds.setdefault((own.device, own.dtype), []).append(own)
    return numbers + [torch.stack(kind).sum().item() for kind in kinds.values()]
