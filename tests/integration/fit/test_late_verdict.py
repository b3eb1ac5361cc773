"""On an accelerator the host does not wait for a step before it begins the next one, and nothing is lost by that."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from late_fits import BATCH, DEVICE, NAN, OTHERS, QUICK, STEPS, fit_each, loop_each
from markers import by_night
from stand_in import fakegpu
from stand_in.running import run_on_stand_in

from cyxtrain.parallel.finite import all_finite

DAILY = ["adamw", "NaN", "NaN in the last step", "NaN in the first step with momentum", "NaN before a checkpoint"]
DAILY += ["NaN, not fused", "NaN before a validation"]
ERROR = {**NAN, "model": "Running", "fails_at": 3}
"""Fails in the hook after a step that was not taken, before anybody could know."""
LATE = {"wish": {"stops_at": 3}, "wish in the last step": {"stops_at": STEPS - 1}}
BY_DESIGN = ("ring/", "data/", "metrics/sums.py")
"""Places whose stops other tests bound: the ring carries numbers by way of the host."""


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


def stops(found: dict[str, Any]) -> dict[str, int]:
    """Returns where the host has waited for the device, but by design."""
    places = {place.split()[-1]: place for place in found["stops"] if "SYNC" in place}
    return {place: found["stops"][name] for place, name in places.items() if not place.startswith(BY_DESIGN)}


def left(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "stops"}


def check(name: str, here: dict[str, Any], on_cpu: dict[str, Any], world_size: int) -> None:
    """Compares a fit on the stand-in with the same one on the CPU."""
    if name == "NaN":
        assert here["error"].startswith(f"NonFiniteError: epoch 1, step 4 (4 in all): on rank {world_size - 1}")
        assert "The step was not taken: the model is as before." in here["error"]
        assert here["position"]["step"] == 3
        assert here["position"]["samples"] == 3 * BATCH
    if name == "unused on one rank":
        assert ("took no part" in here["error"]) == (world_size == 2)
    assert left(here) == left(on_cpu), name
    if name in QUICK:
        assert here["stops"], name  # it is counted: copies without waiting are told, too
        assert stops(here) == {}, name


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(1, DAILY), by_night(2, DAILY), *(by_night(world_size, [*QUICK, *OTHERS]) for world_size in (1, 2))],
    ids=["1-some", "2-some", "1-all", "2-all"],
)
def test_fits_end_as_on_the_cpu_and_the_host_does_not_wait(fakegpu_folder, world_size, names):
    everything = {**QUICK, **OTHERS}
    cases = {name: everything[name] for name in names} | ({"error": ERROR} if world_size == 1 else LATE)
    for results in run_on_stand_in(fakegpu_folder, world_size, fit_each, cases, seconds=200.0):
        for name in names:
            check(name, *results[name], world_size)
        if world_size == 1:
            (failed, _), (raised, _) = results["error"], results["NaN"]
            assert failed["error"] == "KeyError: 'on purpose'"
            for name in ("parameters", "buffers", "state", "rates"):
                assert failed[name] == raised[name], name
        else:  # ranks hear of each other a step later, but not after an epoch
            steps = {name: [each["position"]["step"] for each in results[name]] for name in LATE}
            assert steps == {"wish": [6, 5], "wish in the last step": [12, 12]}
            assert [each["position"]["epoch"] for name in LATE for each in results[name]] == [1] * 4


@pytest.mark.nightly
def test_a_loop_of_ones_own_does_not_wait_and_hears_of_unused_parameters_in_the_next_backward(fakegpu_folder):
    for here, on_cpu, late, at_once in run_on_stand_in(fakegpu_folder, 2, loop_each):
        assert here["stops"]
        assert stops(here) == {}
        assert here["parameters"] == on_cpu["parameters"]
        assert (late["steps"], at_once["steps"]) == (5, 4)
        assert late["error"] == at_once["error"]
        assert late["error"].startswith("these parameters took no part")
