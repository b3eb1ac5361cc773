"""Weights and factors of losses in float64; on an accelerator they stay there, so that the host need not wait."""

from __future__ import annotations

import torch
from torch import Tensor

Number = Tensor | float


def as_double(number: Number, device: torch.device) -> Tensor:
    """Return a number as shape (1,), without a copy to an accelerator for which the host would wait."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64, non_blocking=number.is_cpu).reshape(1)
    return torch.full((1,), number, dtype=torch.float64, device=device)


def quotient(number: Number, divisor: Number) -> Number:
    """Return number / divisor in float64, and 0 if the divisor is 0, without waiting for an accelerator."""
    if not isinstance(divisor, Tensor):
        return number / divisor if divisor else 0.0
    # A Python number / tensor is number * (1 / divisor), which is rounded twice.
    above = number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64, device="cpu")
    return torch.div(above.double(), divisor).masked_fill_(divisor == 0, 0.0)


def times(loss: Tensor, factor: Number) -> Tensor:
    """Return loss * factor with the same bits for a float64 tensor as factor as for a number."""
    if not isinstance(factor, Tensor):
        return loss if factor == 1 else loss * factor
    wide = loss.float() if loss.dtype.itemsize == 2 else loss
    return (wide * factor.to(wide.dtype)).to(loss.dtype)
