"""Learning-rate schedules: by name, which end with the fit, and of other packages, such as timm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from cyxtrain.config.settings import takes


class FitSchedule(LRScheduler):
    """A schedule over the steps of one fit; the next fit starts it again."""

    label = ""  # the name by which users choose it

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.total_steps = 0  # how many times the fit steps it; 0 before the first fit
        super().__init__(optimizer)

    def begin(self, total_steps: int) -> None:
        """Restart with so many steps until the end."""
        self.last_epoch = 0
        self.stretch(total_steps)

    def stretch(self, total_steps: int) -> None:
        """Continue at the same step of another number of steps."""
        self.total_steps = total_steps
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    @override
    def get_lr(self) -> list[float | torch.Tensor]:
        factor = self.factor() if self.total_steps else 1.0
        return [rate * factor for rate in self.base_lrs]

    def factor(self) -> float:
        """Return the factor of the learning rate at step `last_epoch` of `total_steps`."""
        return 1.0

    def part(self) -> float:
        """Return the completed fraction of the fit, 0 to 1."""
        return min(self.last_epoch / self.total_steps, 1.0)


class Constant(FitSchedule):
    """A constant learning rate."""

    label = "constant"


class Linear(FitSchedule):
    """A linear decay of the learning rate to zero."""

    label = "linear"

    @override
    def factor(self) -> float:
        return 1.0 - self.part()


class Cosine(FitSchedule):
    """A decay of the learning rate to zero along half a cosine.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts (2017), equation 5, without
    restarts.
    """

    label = "cosine"

    @override
    def factor(self) -> float:
        return (1 + math.cos(math.pi * self.part())) / 2


class OneCycle(FitSchedule):
    """A rise from 1/25 of the learning rate to the rate, then a decay to 1/250,000, along cosines.

    The rates equal PyTorch's OneCycleLR with max_lr=lr and cycle_momentum=False. The warm-up of the fit is the rise;
    without one, the rise takes 0.3 of the steps.
    Source: Smith and Topin, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates (2017).
    """

    label = "one_cycle"
    DEFAULT_RISE = 0.3

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rise = self.DEFAULT_RISE
        super().__init__(optimizer)

    def rise_in(self, warmup_steps: int, steps: int | None) -> None:
        """Set the rise of a fit of so many steps: its warm-up, or without one the default."""
        self.rise = self.DEFAULT_RISE
        if warmup_steps:
            self.rise = min(warmup_steps / (steps or 1), 1.0)

    @override
    def factor(self) -> float:
        last = self.total_steps - 1
        top = max(self.rise * self.total_steps - 1, 0.0)
        step = min(self.last_epoch, last)
        if step <= top and top > 0:
            return _between(1 / 25, 1.0, step / top)
        return _between(1.0, 1 / 250_000, (step - top) / max(last - top, 1))


def _between(start: float, end: float, part: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2  # half a cosine


SCHEDULERS: dict[str, type[FitSchedule]] = {kind.label: kind for kind in (Constant, Linear, Cosine, OneCycle)}


class Schedule(Protocol):
    """The methods that another package's schedule needs, besides `step`, whose arguments differ."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: Any, /) -> Any: ...  # noqa: D102


class GivenSchedule(LRScheduler):
    """A schedule of another package, with the interface of PyTorch's.

    One with `step_update` is timm's, which counts steps or epochs by its `t_in_epochs`.
    """

    def __init__(self, given: Any, optimizer: torch.optim.Optimizer) -> None:
        # LRScheduler's own __init__ would set the rate.
        self.optimizer = optimizer
        self.given = given
        self.last_epoch = 0
        self._schedulers = [given]  # where PyTorch keeps parts: their attributes are restored and copied, too
        self._has_units = callable(getattr(given, "step_update", None))
        self._takes_number = self._has_units or not takes(given.step, 0)

    @property
    def interval(self) -> str | None:
        """The unit that the schedule counts, if it has one: "step" or "epoch"."""
        if not self._has_units:
            return None
        return "epoch" if getattr(self.given, "t_in_epochs", True) else "step"

    def step(self, epoch: Any = None) -> None:
        """Set the next rate; pass the number of complete steps, or epochs, to the object if it takes one."""
        self.last_epoch += 1
        step = self.given.step_update if self.interval == "step" else self.given.step
        if self._takes_number:
            step(self.last_epoch)
        else:
            step()

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the state of the object."""
        return {"last_epoch": self.last_epoch, "given": self.given.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the count and the state of the object."""
        self.last_epoch = state_dict["last_epoch"]
        self.given.load_state_dict(state_dict["given"])


def is_schedule(given: Any) -> bool:
    """Return whether an object of another class can be stepped, saved and restored."""
    names = ("step", "state_dict", "load_state_dict")
    return all(callable(getattr(given, name, None)) for name in names) and not isinstance(given, type)


def given_schedule(scheduler: LRScheduler | None) -> Any:
    """Return a schedule as the user passed it."""
    return scheduler.given if isinstance(scheduler, GivenSchedule) else scheduler
