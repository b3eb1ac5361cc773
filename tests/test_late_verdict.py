"""On an accelerator the host does not wait for a step before it begins the next one, and nothing is lost by that."""

from __future__ import annotations

import math
from typing import Any

import torch
from stand_in import fakegpu
from stand_in.running import run_on_stand_in

from cyxtrain.parallel.finite import all_finite

DEVICE = f"{fakegpu.NAME}:0"


def look_for(bad: float) -> list[Any]:
    """Returns (verdict, host stops) with a number in a tensor of each type, and, first, in none."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16]
    found = []
    for spoilt in range(-1, len(dtypes)):
        tensors = [torch.ones(0, 2, device=DEVICE), *(torch.ones(2, 3, dtype=dtype, device=DEVICE) for dtype in dtypes)]
        if spoilt >= 0:
            tensors[1 + spoilt][1, 1] = bad
        with fakegpu.counting() as stops:
            found.append([all_finite(tensors), sum(stops.values())])
    return found


def look_for_each() -> list[Any]:
    return [look_for(bad) for bad in (math.nan, math.inf, -math.inf)]


def test_what_is_not_finite_is_found_in_every_type_with_one_look(fakegpu_folder):
    [found] = run_on_stand_in(fakegpu_folder, 1, look_for_each)
    assert found == [[[True, 1], *[[False, 1]] * 5]] * 3
