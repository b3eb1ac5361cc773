"""The base of callbacks that monitor one metric, and checks of arguments."""

from __future__ import annotations

import contextlib
import math
from typing import Any, ClassVar

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.config.settings import is_number, require, require_choice, unknown_name
from cyxtrain.errors import ConfigError, warn_together


class Monitoring(Callback):
    """Monitors one metric after each epoch, or each validation if that measures it; the same on all ranks."""

    _saved: ClassVar[tuple[str, ...]] = ("best",)

    def __init__(self, monitor: str, mode: str, min_delta: float = 0) -> None:
        owner = type(self).__name__
        require(isinstance(monitor, str) and bool(monitor), f"{owner}.monitor must be a name, got {monitor!r}.")
        require_choice(owner, "mode", mode, ("auto", "min", "max"))
        require_float(owner, "min_delta", min_delta)
        self.monitor = monitor
        self._has_warned = False
        self.mode = mode
        self.min_delta = abs(min_delta)
        self._sign = -1.0 if mode == "max" or (mode == "auto" and monitor.endswith("accuracy")) else 1.0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._is_of_validations:
            self._compare(epoch, logs)

    def on_validation_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._is_of_validations:
            self._compare(epoch, logs)

    @property
    def _is_of_validations(self) -> bool:
        """Whether a validation measures it; a callback may log a number with such a name in an epoch."""
        if not self.monitor.startswith("val_"):
            return False
        is_known = self.monitor in self.params["metrics"]
        return is_known or any(self.monitor in row for row in self.trainer.history.validations[-1:])

    def _measured_weights(self) -> contextlib.AbstractContextManager[Any]:
        """Put the weights with which the metric was measured into the model."""
        return ((self._is_of_validations and self._validated) or self).applied()

    def _compare(self, epoch: int, logs: Logs | None) -> None:
        """Compare the metric with the best one."""

    @property
    def worst(self) -> float:
        """A value that any other improves on."""
        return self._sign * math.inf

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self.runs_last = self.runs_last or self.monitor not in params["metrics"]
        name = self.monitor.removeprefix("val_")
        own = self.monitor not in params["metrics"] and params["may_log"]
        if name != self.monitor and name in params["metrics"] and not params["validation"]:
            raise ConfigError(
                f"{type(self).__name__} monitors {self.monitor!r}, but there is no validation data: pass some, or set "
                f'monitor="{name}".'
            )
        if not own and self.monitor not in params["metrics"]:
            raise unknown_name("this fit", self.monitor, params["metrics"], "metric named")
        if self.mode == "auto":
            known = params["larger_is_better"].get(name, name.endswith("accuracy") or None)
            if known is None:
                raise ConfigError(
                    f"{type(self).__name__} monitors {self.monitor!r}, and it is unknown whether larger is better: set "
                    'mode="min" or "max".'
                )
            self._sign = -1.0 if known else 1.0

    def value_in(self, logs: Logs | None) -> float | None:
        """Return the metric's value; None if the epoch had no validation, or the program has not logged it."""
        logs = logs or {}
        value, known = logs.get(self.monitor), ", ".join(logs)
        if value is None and self.monitor not in self.params["metrics"]:
            if not self._has_warned:
                warn_together(
                    f"{type(self).__name__} monitors {self.monitor!r}, which this epoch has not logged (available: "
                    f"{known}). It waits for an epoch that does."
                )
            self._has_warned = True
        elif value is None and not (self.monitor.startswith("val_") and "val_loss" not in logs):
            raise ConfigError(
                f"{type(self).__name__} monitors {self.monitor!r}, which this fit does not measure (it has {known})."
            )
        return value

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value improves on another by more than `min_delta`."""
        return self._sign * value < self._sign * than - self.min_delta


def require_float(owner: str, name: str, value: object) -> None:
    """Raise a ConfigError unless a value is a number."""
    require(is_number(value), f"{owner}.{name} must be a number, got {value!r}.")
