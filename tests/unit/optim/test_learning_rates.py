"""A step that turns out to be bad one step later leaves the rates, and the schedule, as they were before it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fitting import make_model
from torch.optim import lr_scheduler as schedulers

from cyxtrain.optim.learning_rates import LearningRates
from cyxtrain.optim.schedule_classes import GivenSchedule

SCHEDULES: dict[str, Any] = {
    "none": lambda optimizer: None,
    "decay": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "milestones": lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 2, 4], 0.5),
    "cycle": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 3),
    "parts": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "another package's": lambda optimizer: GivenSchedule(Halving(optimizer), optimizer),
}


class Halving:
    """Halves the rate with each call."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.group = optimizer.param_groups[0]
        self.calls: list[float] = []

    def step(self) -> None:
        self.calls.append(float(self.group["lr"]))
        self.group["lr"] = self.group["lr"] / 2


def stepped(rates: LearningRates, steps: int) -> list[dict[str, float]]:
    """Step; return the rates after each step, those of the next one too."""
    found = []
    for _ in range(steps):
        rates.optimizer.step()
        rates.step()
        momentum = rates.optimizer.param_groups[0]["momentum"]
        found.append({**rates.by_name(), "next": rates.now()[0], "momentum": momentum})
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_are_the_same_again_after_what_was_kept_is_put_back(name: str, as_tensor: bool):
    optimizer = torch.optim.SGD(make_model().parameters(), torch.tensor(0.1) if as_tensor else 0.1, momentum=0.9)
    rates = LearningRates(optimizer, SCHEDULES[name](optimizer))
    rates.begin(1.0, warmup_steps=3, steps=20, schedule_steps=17)
    stepped(rates, 1)
    for _ in range(6):  # in the warm-up, at its end and after it
        rate, before = optimizer.param_groups[0]["lr"], rates.state_dict()
        undo = rates.keep()
        whole = stepped(rates, 2)
        undo()
        assert rates.state_dict() == before
        assert stepped(rates, 2) == whole
        assert all(math.isfinite(value) for each in whole for value in each.values())
        undo()
        assert not as_tensor or name == "another package's" or optimizer.param_groups[0]["lr"] is rate
        stepped(rates, 1)


def test_a_warm_up_that_did_not_end_leaves_the_base_of_an_advanced_schedule():
    optimizer = torch.optim.SGD(make_model().parameters(), 0.1)
    schedule = schedulers.ExponentialLR(optimizer, 0.5)
    rates = LearningRates(optimizer, schedule)
    for warmup_steps, steps in ((0, 2), (4, 1), (0, 1)):
        rates.begin(1.0, warmup_steps, steps=steps, schedule_steps=steps)
        assert schedule.base_lrs == [0.1]
        for _ in range(steps):
            optimizer.step()
            rates.step()
        rates.note_rates()
    assert rates.now() == [0.1 * 0.5**3]
