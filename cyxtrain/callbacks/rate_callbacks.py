"""Callbacks that set the learning rate from epoch to epoch, or write it down.

What a rate is set to on any rank, between two steps of `fit`, it is on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import Monitoring, require_count, require_float
from cyxtrain.config.settings import require, takes
from cyxtrain.errors import ConfigError
from cyxtrain.optim.learning_rates import rates_of
from cyxtrain.world import runtime


class _SettingRates(Callback):
    """Sets the learning rate."""

    def set_params(self, params: dict[str, Any]) -> None:
        """Looks whether anybody else sets it.

        Raises:
            ConfigError: A scheduler does, or a warm-up.
        """
        super().set_params(params)
        if self.trainer.scheduler is not None or params["warmup_steps"]:
            other = "warmup_steps" if params["warmup_steps"] else type(self.trainer.scheduler).__name__
            raise ConfigError(f"{type(self).__name__} and {other} both set the learning rate: leave one of them out.")


class LearningRateScheduler(_SettingRates):
    """Sets the learning rate at the beginning of each epoch; Keras's arguments.

    Args:
        schedule: Takes the epoch, from 0, and the rate; returns the new rate. One that takes the epoch alone works too.
            Of several groups each is asked for by itself.
        verbose: 1: rank 0 says the new rate.

    Raises:
        ConfigError: `schedule` cannot be called.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        require(callable(schedule), f"LearningRateScheduler.schedule must be a function, got {schedule!r}.")
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = takes(schedule, 2)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Sets it.

        Raises:
            ConfigError: The schedule returned no number.
        """
        before = rates_of(self.trainer.optimizer)
        found = [self.schedule(epoch, rate) if self._takes_rate else self.schedule(epoch) for rate in before]
        rates = []
        for rate in found:
            try:
                rates.append(float(rate))
            except (TypeError, ValueError):
                rates.append(math.nan)
            if not 0 <= rates[-1] < math.inf:
                raise ConfigError(f"LearningRateScheduler.schedule returned {rate!r} for epoch {epoch}: no rate.")
        self.trainer.set_learning_rates(rates)
        if self.verbose and runtime.is_master():
            print(f"epoch {epoch + 1}: the learning rate is {', '.join(f'{rate:g}' for rate in dict.fromkeys(rates))}")


class ReduceLROnPlateau(_SettingRates, Monitoring):
    """Lowers the learning rate when a number has not become better for some epochs; Keras's arguments.

    Args:
        monitor: As `EarlyStopping`.
        factor: What the rate is multiplied by, between 0 and 1.
        patience: Epochs without improvement after which it is.
        verbose: 1: rank 0 says so.
        mode: "min", "max", or "auto": what the metric says.
        min_delta: By how much the number must become better to count.
        cooldown: Epochs after that in which nothing is counted.
        min_lr: Below it no rate falls.

    Raises:
        ConfigError: An argument cannot be.
    """

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
        require_count(owner, patience=patience, cooldown=cooldown)
        require_float(owner, "min_lr", min_lr)
        require_float(owner, "factor", factor)
        require(0 < factor < 1, f"{owner}.factor must be between 0 and 1, got {factor!r}.")
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best = self.worst
        self.wait = 0
        self.cooldown_counter = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins anew."""
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compares the epoch with the best one."""
        value = self.value_in(logs)
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.is_better(value, self.best):
            self.best, self.wait = value, 0
        elif self.cooldown_counter == 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._lower(epoch)

    def _lower(self, epoch: int) -> None:
        before = rates_of(self.trainer.optimizer)
        rates = [max(rate * self.factor, self.min_lr) if rate > self.min_lr else rate for rate in before]
        self.cooldown_counter, self.wait = self.cooldown, 0
        if rates == before:
            return
        self.trainer.set_learning_rates(rates)
        if self.verbose and runtime.is_master():
            words = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
            print(f"epoch {epoch + 1}: {self.monitor} stands still, the learning rate falls to {words}")

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has seen."""
        return {"best": self.best, "wait": self.wait, "cooldown_counter": self.cooldown_counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what it had seen."""
        self.best, self.wait, self.cooldown_counter = state["best"], state["wait"], state["cooldown_counter"]


class LearningRateMonitor(Callback):
    """Writes down the learning rate.

    Args:
        every_n_steps: Steps from one entry to the next; 0: at the end of each epoch.

    Attributes:
        values: (step, rate of each group), from the first of the training on.

    Raises:
        ConfigError: A number of steps cannot be.
    """

    def __init__(self, every_n_steps: int = 0) -> None:
        require_count("LearningRateMonitor", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.values: list[tuple[int, list[float]]] = []

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Notes the rate that the step will have."""
        step = self.trainer.step
        if self.every_n_steps and step % self.every_n_steps == 0:
            self._note(step)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Notes the rate after the epoch."""
        if not self.every_n_steps:
            self._note(self.trainer.step)

    def _note(self, step: int) -> None:
        self.values.append((step, rates_of(self.trainer.optimizer)))

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has noted."""
        return {"values": [[step, rates] for step, rates in self.values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what it had noted."""
        self.values = [(step, list(rates)) for step, rates in state["values"]]
