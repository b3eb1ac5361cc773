"""Schedules that end with the fit, whatever its length: those that a trainer takes by name."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch.optim.lr_scheduler import LRScheduler


class FitSchedule(LRScheduler):
    """A schedule over the steps of one fit, which tells it how many there are; the next fit starts it again.

    Attributes:
        total_steps: Times that the fit steps it; 0 before the first fit.
    """

    label = ""
    """Its name, as a trainer takes it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.total_steps = 0
        super().__init__(optimizer)

    def begin(self, total_steps: int) -> None:
        """Starts again, with so many steps until the end."""
        self.last_epoch = 0
        self.stretch(total_steps)

    def stretch(self, total_steps: int) -> None:
        """Continues from the same step, on the way of so many steps."""
        self.total_steps = total_steps
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the rate of each group."""
        factor = self.factor() if self.total_steps else 1.0
        return [rate * factor for rate in self.base_lrs]

    @abstractmethod
    def factor(self) -> float:
        """Returns what the optimizer's learning rate is multiplied by at step `last_epoch` of `total_steps`."""

    def part(self) -> float:
        """Returns how much of the fit is complete, 0 to 1."""
        return min(self.last_epoch / self.total_steps, 1.0)


class Constant(FitSchedule):
    """Leaves the learning rate as it is."""

    label = "constant"

    def factor(self) -> float:
        """Returns 1."""
        return 1.0


class Linear(FitSchedule):
    """Lowers the learning rate to zero along a line."""

    label = "linear"

    def factor(self) -> float:
        """Returns 1 at the start and 0 at the end."""
        return 1.0 - self.part()


class Cosine(FitSchedule):
    """Lowers the learning rate to zero along half a cosine.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts (2017), equation 5, without
    restarts.
    """

    label = "cosine"

    def factor(self) -> float:
        """Returns 1 at the start and 0 at the end."""
        return (1 + math.cos(math.pi * self.part())) / 2


class OneCycle(FitSchedule):
    """Raises the learning rate from 1/25 of its value to the value, then lowers it to 1/250,000, each along a cosine.

    The rates are those of PyTorch's OneCycleLR with max_lr=lr and cycle_momentum=False. The warm-up of the fit is its
    rise; without one, the rise takes 0.3 of the steps.

    Source: Smith and Topin, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates (2017).
    """

    label = "one_cycle"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rise = 0.3
        super().__init__(optimizer)

    def factor(self) -> float:
        """Returns 1/25 at the start, 1 when it has risen, and 1/250,000 at the last step."""
        last, top = self.total_steps - 1, max(self.rise * self.total_steps - 1, 0.0)
        step = min(self.last_epoch, last)
        if step <= top and top > 0:
            return _between(1 / 25, 1.0, step / top)
        return _between(1.0, 1 / 250_000, (step - top) / max(last - top, 1))


def _between(start: float, end: float, part: float) -> float:
    """Returns a value between two, along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


SCHEDULERS: dict[str, type[FitSchedule]] = {each.label: each for each in (Constant, Linear, Cosine, OneCycle)}
"""By name."""
