"""Weights of ranks as integers in digits: their sum over ranks is the same in any order and over any transport."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

DIGITS = 8
_DIGIT_BITS = 12
"""A float32 holds the exact sum of such a digit over thousands of ranks, and gives it back from the mean."""
_FRACTION_BITS = 72
"""A weight is cut off below 2^-72 of a unit, which is about the total weight of all ranks."""
_BASE = 1 << _DIGIT_BITS
_SHIFTS = range(_DIGIT_BITS * (DIGITS - 1), -1, -_DIGIT_BITS)


@functools.lru_cache
def _place_values(device: torch.device) -> Tensor:
    """Return the value of a one in each digit, in 2^-72 of a unit."""
    return torch.tensor([2.0**shift for shift in _SHIFTS], dtype=torch.float64, device="cpu").to(device)


def whole_of(weight: float, unit: float) -> int | None:
    """Return a weight in 2^-72 of a unit, a power of two; None if it is not finite."""
    share = weight / unit
    return int(math.ldexp(share, _FRACTION_BITS)) if math.isfinite(share) else None


def total_of(wholes: Sequence[int | None], unit: float) -> float:
    """Return the sum of the weights of ranks; NaN if one is not finite."""
    finite = [whole for whole in wholes if whole is not None]
    if len(finite) < len(wholes):
        return math.nan
    return math.ldexp(sum(finite), -_FRACTION_BITS) * unit


def digits_of(weight: Tensor | float, unit: float, device: torch.device) -> Tensor:
    """Return the digits of a weight, the highest first; shape (8,), float64; a device is not waited for."""
    if isinstance(weight, Tensor) and not weight.is_cpu:
        return _digits_on_device(weight.detach().to(device, torch.float64), unit)
    whole = whole_of(float(weight), unit)
    digits = [math.nan] * DIGITS
    if whole is not None:
        # Only the highest digit may exceed the base: it takes the rest of the weight.
        highest = whole >> _SHIFTS[0]
        digits = [highest, *(float(whole >> shift & _BASE - 1) for shift in _SHIFTS[1:])]
    return torch.tensor(digits, dtype=torch.float64, device="cpu")


def _digits_on_device(weight: Tensor, unit: float) -> Tensor:
    """Return the digits of a float64 weight on its device."""
    in_each_place = torch.floor(weight.reshape(()) / unit * 2.0**_FRACTION_BITS / _place_values(weight.device))
    return torch.cat([in_each_place[:1], in_each_place[1:].remainder(_BASE)])


def total_of_means(means: Tensor | Sequence[float], world_size: int, unit: float) -> Tensor | float:
    """Return the sum of the weights of ranks from the means of their digits over ranks; a tensor stays where it is."""
    if isinstance(means, Tensor):
        digits = (means.double() * world_size).round()
        return (digits * _place_values(means.device)).sum() * (unit / 2.0**_FRACTION_BITS)
    if not all(map(math.isfinite, means)):
        return math.nan
    whole = 0
    for mean in means:
        whole = whole * _BASE + round(mean * world_size)
    return total_of([whole], unit)
