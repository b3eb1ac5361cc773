"""Schedules of other packages, such as timm's: any object with `step`, `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from cyxtrain.config.settings import takes


class Schedule(Protocol):
    """What is needed of such an object, besides its `step`, whose arguments differ."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: Any, /) -> Any: ...  # noqa: D102


class GivenSchedule(LRScheduler):
    """Steps such an object, as PyTorch's schedules are stepped.

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
        """The unit that it counts, if it tells."""
        return ("epoch" if getattr(self.given, "t_in_epochs", True) else "step") if self._has_units else None

    def step(self, epoch: Any = None) -> None:
        """Set the next rate; the object is told how many steps, or epochs, are complete."""
        self.last_epoch += 1
        step = self.given.step_update if self.interval == "step" else self.given.step
        step(*[self.last_epoch] * self._takes_number)

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the state of the object."""
        return {"last_epoch": self.last_epoch, "given": self.given.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore both."""
        self.last_epoch = state_dict["last_epoch"]
        self.given.load_state_dict(state_dict["given"])


def is_schedule(given: Any) -> bool:
    """Return whether an object of another class can be stepped, saved and restored."""
    names = ("step", "state_dict", "load_state_dict")
    return all(callable(getattr(given, name, None)) for name in names) and not isinstance(given, type)


def given_schedule(scheduler: LRScheduler | None) -> Any:
    """Return a schedule as the user gave it."""
    return scheduler.given if isinstance(scheduler, GivenSchedule) else scheduler
