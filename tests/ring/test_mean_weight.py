"""Weights that ranks add up exactly, in any order."""

from __future__ import annotations

import math
import random

import pytest
import torch
from markers import nightly_where

from cyxtrain.ring import mean_weight
from cyxtrain.ring.mean_weight import MeanWeight

CPU = torch.device("cpu")


def means(given: list[float], unit: float, dtype: torch.dtype) -> torch.Tensor:
    """What an all_reduce to the mean makes of the digits."""
    digits = torch.stack([MeanWeight(weight, unit).digits(CPU).to(dtype) for weight in given])
    return digits.sum(0) / len(given)


@nightly_where(lambda world_size, scale: world_size == 1000 and scale != 1.0)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e5])
def test_their_sum_does_not_depend_on_order_dtype_or_way(world_size, dtype, scale):
    drawn = random.Random(world_size)
    given = [drawn.random() * scale for _ in range(world_size)]
    unit = 2.0 ** round(math.log2(scale * world_size))
    own = MeanWeight(given[0], unit)
    factor = own.factor_of_weights(given)
    assert factor == pytest.approx(unit / math.fsum(given), rel=1e-15)
    for _ in range(3):
        drawn.shuffle(given)
        averages = means(given, unit, dtype)
        assert own.factor_of_weights(given) == factor
        assert own.factor_of_means(averages.tolist(), world_size) == factor
        assert float(own.factor_of_means(averages, world_size)) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0**20, 2.0**-60, 1 / 3])
def test_an_accelerators_digits_are_those_of_the_host(weight):
    there = mean_weight._digits_there(torch.tensor(weight, dtype=torch.float64), 8.0)
    own = MeanWeight(weight, 8.0)
    assert there.tolist() == own.digits(CPU).tolist()
    assert there.shape == (mean_weight.DIGITS,)
    assert float(own.factor_of_means(there, 1)) == (8.0 / weight if weight else 0.0)


def test_a_weight_that_is_not_finite_makes_the_factor_nan():
    assert math.isnan(MeanWeight(2.0, 1.0).factor_of_weights([math.nan, 2.0]))
    assert math.isnan(MeanWeight(1.0, 1.0).factor_of_means(means([math.inf, 1.0], 1.0, torch.float32).tolist(), 2))


def test_the_factor_is_zero_if_nothing_counts():
    assert MeanWeight(0.0, 1.0).factor_of_weights([0.0, 0.0]) == 0.0
    assert MeanWeight(0.0, 1.0).factor_of_means(means([0.0, 0.0], 1.0, torch.float32).tolist(), 2) == 0.0
