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
        larger_is_better = mode == "max" or (mode == "auto" and monitor.endswith("accuracy"))
        self._sign = -1.0 if larger_is_better else 1.0

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
        if self._is_of_validations and self._validated is not None:
            return self._validated.applied()
        return self.applied()

    def _compare(self, epoch: int, logs: Logs | None) -> None:
        """Compare the metric with the best one."""

    @property
    def worst(self) -> float:
        """A value that any other improves on."""
        return self._sign * math.inf

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        measured = params["metrics"]
        is_measured = self.monitor in measured
        name = self.monitor.removeprefix("val_")
        if not is_measured:
            self.runs_last = True  # another callback may log it
        if name != self.monitor and name in measured and not params["validation"]:
            raise ConfigError(
                f"{type(self).__name__} monitors {self.monitor!r}, but there is no validation data: pass some, or set "
                f'monitor="{name}".'
            )
        if not is_measured and not params["may_log"]:
            raise unknown_name("this fit", self.monitor, measured, "metric named")
        if self.mode == "auto":
            larger_is_better = _larger_is_better(name, params["larger_is_better"])
            if larger_is_better is None:
                raise ConfigError(
                    f"{type(self).__name__} monitors {self.monitor!r}, and it is unknown whether larger is better: set "
                    'mode="min" or "max".'
                )
            self._sign = -1.0 if larger_is_better else 1.0

    def value_in(self, logs: Logs | None) -> float | None:
        """Return the metric's value; None if the epoch had no validation, or the program has not logged it."""
        logs = logs or {}
        value = logs.get(self.monitor)
        if value is not None:
            return value
        available = ", ".join(logs)
        if self.monitor not in self.params["metrics"]:
            if not self._has_warned:
                warn_together(
                    f"{type(self).__name__} monitors {self.monitor!r}, which this epoch has not logged (available: "
                    f"{available}). It waits for an epoch that does."
                )
            self._has_warned = True
            return None
        has_no_validation = self.monitor.startswith("val_") and "val_loss" not in logs
        if has_no_validation:
            return None
        raise ConfigError(
            f"{type(self).__name__} monitors {self.monitor!r}, which this fit does not measure (it has {available})."
        )

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value improves on another by more than `min_delta`."""
        return self._sign * value < self._sign * than - self.min_delta


def require_float(owner: str, name: str, value: object) -> None:
    """Refuse a value that is not a number."""
    require(is_number(value), f"{owner}.{name} must be a number, got {value!r}.")


def _larger_is_better(name: str, declared: dict[str, bool | None]) -> bool | None:
    """Return what a metric declares, or else what its name says; None if neither does."""
    if name.endswith("accuracy"):
        return declared.get(name, True)
    return declared.get(name)
