"""Callbacks that set or record the learning rate.

A rate that is set on one rank between two steps applies to all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import Monitoring, require_float
from cyxtrain.config.settings import require, require_integer, takes
from cyxtrain.environment.standard_streams import show
from cyxtrain.errors import ConfigError
from cyxtrain.optim.learning_rates import rates_of


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))  # equal ones once


class _SettingRates(Callback):
    """Base of callbacks that set the learning rate."""

    def set_params(self, params: dict[str, Any]) -> None:
        """Check that neither a scheduler nor a warm-up sets it."""
        super().set_params(params)
        others = [type(each).__name__ for each in self.trainer.schedulers.values() if each is not None]
        if params["warmup_steps"]:
            others.insert(0, "warmup_steps")
        if others:
            raise ConfigError(
                f"{type(self).__name__} and {others[0]} both set the learning rate: leave one of them out."
            )


class LearningRateScheduler(_SettingRates):
    """Set the learning rate at the start of each epoch; Keras's arguments.

    Args:
        schedule: Takes the epoch, from 0, and the rate, or only the epoch; returns the new rate. It is called for each
            parameter group.
        verbose: 1: rank 0 prints the new rate.

    Raises:
        ConfigError: `schedule` is not callable.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        require(callable(schedule), f"LearningRateScheduler.schedule must be a function, got {schedule!r}.")
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = takes(schedule, 2)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the rate.

        Raises:
            ConfigError: The schedule returned something else than a finite number of at least 0.
        """
        before = rates_of(*self.trainer.optimizers.values())
        if self._takes_rate:
            returned = [self.schedule(epoch, rate) for rate in before]
        else:
            returned = [self.schedule(epoch) for _ in before]
        rates = [self._checked(value, epoch) for value in returned]
        self.trainer.set_learning_rates(rates)
        if self.verbose and self.trainer.is_master():
            show(f"epoch {epoch + 1}: the learning rate is {_listed(rates)}")

    def _checked(self, value: Any, epoch: int) -> float:
        """Return what the schedule returned as a number; refuse what cannot be a learning rate."""
        rate = math.nan
        with contextlib.suppress(TypeError, ValueError):
            rate = float(value)
        if not 0 <= rate < math.inf:
            raise ConfigError(f"LearningRateScheduler.schedule returned {value!r} for epoch {epoch}: no learning rate.")
        return rate


class ReduceLROnPlateau(_SettingRates, Monitoring):
    """Reduce the learning rate when a metric has not improved for some time; Keras's arguments.

    Args:
        monitor: As in `EarlyStopping`.
        factor: The rate is multiplied by it; between 0 and 1.
        patience: Epochs, or validations, without an improvement before the rate is reduced.
        verbose: 1: rank 0 prints the new rate.
        mode: "min", "max", or "auto": as the metric declares.
        min_delta: The smallest change that counts as an improvement.
        cooldown: Epochs, or validations, after a reduction that do not count.
        min_lr: The lowest rate.

    Raises:
        ConfigError: An argument is invalid.
    """

    _saved = ("best", "wait", "cooldown_counter")

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        Monitoring.__init__(self, monitor, mode, min_delta)
        owner = "ReduceLROnPlateau"
        require_integer(owner, "patience", patience, 0)
        require_integer(owner, "cooldown", cooldown, 0)
        require_float(owner, "min_lr", min_lr)
        require_float(owner, "factor", factor)
        require(0 < factor < 1, f"{owner}.factor must be between 0 and 1, got {factor!r}.")
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.on_train_begin()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.best = self.worst
        self.wait = 0
        self.cooldown_counter = 0

    def _compare(self, epoch: int, logs: Logs | None) -> None:
        value = self.value_in(logs)
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.is_better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter == 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._lower(epoch)

    def _lower(self, epoch: int) -> None:
        before = rates_of(*self.trainer.optimizers.values())
        # `min`, because a rate that is already below `min_lr` stays.
        rates = [min(rate, max(rate * self.factor, self.min_lr)) for rate in before]
        self.cooldown_counter = self.cooldown
        self.wait = 0
        if rates == before:
            return
        self.trainer.set_learning_rates(rates)
        if self.verbose and self.trainer.is_master():
            show(f"epoch {epoch + 1}: {self.monitor} has not improved, reducing the learning rate to {_listed(rates)}")


class LearningRateMonitor(Callback):
    """Record the learning rate.

    Args:
        every_n_steps: Steps between entries; 0: at the end of each epoch.

    Attributes:
        values: (step, rate of each group), from the first step of the training.

    Raises:
        ConfigError: `every_n_steps` is not a whole number of at least 0.
    """

    _saved = ("values",)

    def __init__(self, every_n_steps: int = 0) -> None:
        require_integer("LearningRateMonitor", "every_n_steps", every_n_steps, 0)
        self.every_n_steps = every_n_steps
        self.values: list[tuple[int, list[float]]] = []

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        step = self.trainer.step
        if self.every_n_steps and step % self.every_n_steps == 0:
            self._record(step)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not self.every_n_steps:
            self._record(self.trainer.step)

    def _record(self, step: int) -> None:
        self.values.append((step, rates_of(*self.trainer.optimizers.values())))
