"""Weights that ranks add up exactly, in any order."""

from __future__ import annotations

import math
import random

import pytest
import torch

from cyxtrain.ring import weight_digits
from cyxtrain.ring.weight_digits import digits_of, total_of, total_of_means, whole_of

CPU = torch.device("cpu")


def means(given: list[float], unit: float, dtype: torch.dtype) -> torch.Tensor:
    """What an all_reduce to the mean makes of the digits."""
    digits = torch.stack([digits_of(weight, unit, CPU).to(dtype) for weight in given])
    return digits.sum(0) / len(given)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e5])
def test_their_sum_does_not_depend_on_order_dtype_or_way(world_size, dtype, scale):
    drawn = random.Random(world_size)
    given = [drawn.random() * scale for _ in range(world_size)]
    unit = 2.0 ** round(math.log2(scale * world_size))
    total = total_of([whole_of(weight, unit) for weight in given], unit)
    assert total == pytest.approx(math.fsum(given), rel=1e-15)
    for _ in range(3):
        drawn.shuffle(given)
        assert total_of_means(means(given, unit, dtype).tolist(), world_size, unit) == total
        assert float(total_of_means(means(given, unit, dtype), world_size, unit)) == pytest.approx(total, rel=1e-15)


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0**20, 2.0**-60, 1 / 3])
def test_an_accelerators_digits_are_those_of_the_host(weight):
    there = weight_digits._digits_on_device(torch.tensor(weight, dtype=torch.float64), 8.0)
    assert there.tolist() == digits_of(weight, 8.0, CPU).tolist()
    assert there.shape == (weight_digits.DIGITS,)
    assert float(total_of_means(there, 1, 8.0)) == weight


def test_what_is_not_finite_stays_so():
    assert math.isnan(total_of([whole_of(math.nan, 1.0), whole_of(2.0, 1.0)], 1.0))
    assert math.isnan(float(total_of_means(means([math.inf, 1.0], 1.0, torch.float32).tolist(), 2, 1.0)))
    assert total_of([whole_of(0.0, 1.0)] * 2, 1.0) == 0.0
