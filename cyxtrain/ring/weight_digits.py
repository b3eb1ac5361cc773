"""Weights of ranks in whole numbers, whose sum over ranks is the same in any order and over any transport."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

DIGITS = 8
_DIGIT_BITS = 12
"""So that a float32 holds the sum of a digit over thousands of ranks, and its mean tells it."""
_FRACTION_BITS = 72
"""Of a unit, which is about the weight of all ranks: the rest is left out."""
_BASE = 1 << _DIGIT_BITS
_SHIFTS = range(_DIGIT_BITS * (DIGITS - 1), -1, -_DIGIT_BITS)


@functools.lru_cache
def _places(device: torch.device) -> Tensor:
    """Return what each digit counts, in 2^-72 of a unit."""
    return torch.tensor([2.0**shift for shift in _SHIFTS], dtype=torch.float64, device="cpu").to(device)


def whole_of(weight: float, unit: float) -> int | None:
    """Return a weight in 2^-72 of a unit, a power of two; None: it is not finite."""
    share = weight / unit
    return int(math.ldexp(share, _FRACTION_BITS)) if math.isfinite(share) else None


def total_of(wholes: Sequence[int | None], unit: float) -> float:
    """Return the sum of the weights of ranks; NaN if one is not finite."""
    known = [each for each in wholes if each is not None]
    return math.ldexp(sum(known), -_FRACTION_BITS) * unit if len(known) == len(wholes) else math.nan


def digits_of(weight: Tensor | float, unit: float, device: torch.device) -> Tensor:
    """Return the digits of a weight, the highest first; shape (8,), float64; a device is not waited for."""
    if isinstance(weight, Tensor) and not weight.is_cpu:
        return _digits_there(weight.detach().to(device, torch.float64), unit)
    whole, digits = whole_of(float(weight), unit), [math.nan] * DIGITS
    if whole is not None:
        digits = [whole >> _DIGIT_BITS * (DIGITS - 1), *(float(whole >> shift & _BASE - 1) for shift in _SHIFTS[1:])]
    return torch.tensor(digits, dtype=torch.float64, device="cpu")


def _digits_there(weight: Tensor, unit: float) -> Tensor:
    """Return the digits of a float64 weight on its device."""
    found = torch.floor(weight.reshape(()) / unit * 2.0**_FRACTION_BITS / _places(weight.device))
    return torch.cat([found[:1], found[1:].remainder(_BASE)])


def total_of_means(means: Tensor | Sequence[float], world_size: int, unit: float) -> Tensor | float:
    """Return the sum of the weights of ranks from the means of their digits over ranks; a tensor stays where it is."""
    if isinstance(means, Tensor):
        digits = (means.double() * world_size).round()
        return (digits * _places(means.device)).sum() * (unit / 2.0**_FRACTION_BITS)
    if not all(map(math.isfinite, means)):
        return math.nan
    whole = 0
    for mean in means:
        whole = whole * _BASE + round(mean * world_size)
    return total_of([whole], unit)
