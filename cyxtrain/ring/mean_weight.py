"""The weight of a rank's terms in a mean over all ranks, added up exactly: the same in any order, over any transport.

A weight is counted in 2^-72 of a unit, as a whole number. Ranks that share memory read each other's weights. Otherwise
the whole number travels as eight digits of 12 bits among the gradients, and an average over ranks tells their sum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

DIGITS = 8
# A float32 holds the sum of a digit over thousands of ranks, so that the mean of a digit gives back its sum.
_DIGIT_BITS = 12
# The unit is about the weight of all ranks: what is smaller than 2^-72 of it is left out.
_FRACTION_BITS = 72
_BASE = 1 << _DIGIT_BITS
_SHIFTS = range(_DIGIT_BITS * (DIGITS - 1), -1, -_DIGIT_BITS)


@dataclasses.dataclass(frozen=True)
class MeanWeight:
    """The weight of one rank's terms. Before backward they were divided by `unit`, afterwards by the sum of weights.

    Args:
        value: The weight of this rank's terms, 0-dim if a tensor; an accelerator is not waited for.
        unit: A power of two near the sum of weights, the same on every rank: to divide by it rounds nothing.
    """

    value: Tensor | float
    unit: float

    def digits(self, device: torch.device) -> Tensor:
        """Return the weight as digits, the highest first; shape (8,), float64, on a `device`."""
        if isinstance(self.value, Tensor) and not self.value.is_cpu:
            return _digits_there(self.value.detach().to(device, torch.float64), self.unit)
        whole = _whole_of(float(self.value), self.unit)
        digits = [math.nan] * DIGITS
        if whole is not None:
            # The highest digit has no bound, so that a weight far above the unit is counted too.
            highest = whole >> _SHIFTS[0]
            digits = [float(highest), *(float(whole >> shift & _BASE - 1) for shift in _SHIFTS[1:])]
        return torch.tensor(digits, dtype=torch.float64, device="cpu")

    def factor_of_means(self, means: Tensor | Sequence[float], world_size: int) -> Tensor | float:
        """Return what averages are multiplied by; `means`: of the digits over ranks, a tensor stays where it is."""
        if isinstance(means, Tensor):
            digits = (means.double() * world_size).round()
            total = (digits * _values_of_digits(means.device)).sum() * (self.unit / 2.0**_FRACTION_BITS)
            return torch.where(total == 0, 0.0, self.unit / total)
        if not all(map(math.isfinite, means)):
            return math.nan
        whole = 0
        for mean in means:
            whole = whole * _BASE + round(mean * world_size)
        return self._factor_of(whole)

    def factor_of_weights(self, weights: Sequence[float]) -> float:
        """Return what averages are multiplied by; `weights`: of all ranks."""
        wholes = [_whole_of(weight, self.unit) for weight in weights]
        finite = [whole for whole in wholes if whole is not None]
        if len(finite) < len(wholes):
            return math.nan
        return self._factor_of(sum(finite))

    def _factor_of(self, whole: int) -> float:
        """Return `unit` over the sum of weights, which is `whole` in 2^-72 units; 0 if nothing counts."""
        total = math.ldexp(whole, -_FRACTION_BITS) * self.unit
        return self.unit / total if total else 0.0


def _whole_of(weight: float, unit: float) -> int | None:
    """Return a weight in 2^-72 of a unit; None: it is not finite."""
    share = weight / unit
    return int(math.ldexp(share, _FRACTION_BITS)) if math.isfinite(share) else None


def _digits_there(weight: Tensor, unit: float) -> Tensor:
    """Return the digits of a float64 weight on its device."""
    found = torch.floor(weight.reshape(()) / unit * 2.0**_FRACTION_BITS / _values_of_digits(weight.device))
    return torch.cat([found[:1], found[1:].remainder(_BASE)])


@functools.lru_cache
def _values_of_digits(device: torch.device) -> Tensor:
    """Return what a one in each digit is worth, in 2^-72 of a unit."""
    return torch.tensor([2.0**shift for shift in _SHIFTS], dtype=torch.float64, device="cpu").to(device)
