"""What callbacks that look at one number of each epoch have in common."""

from __future__ import annotations

import math
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.config.settings import require, require_choice, require_integer, unknown_name
from cyxtrain.errors import ConfigError


class Monitoring(Callback):
    """Looks at one number of each epoch, which shall fall or grow. All ranks see the same.

    Args:
        monitor: "loss", "accuracy", a metric of the trainer's; with "val_" before it, that of the validation.
        mode: "min", "max", or "auto": what the metric says.
        min_delta: By how much it must become better to count.

    Raises:
        ConfigError: An argument cannot be.
    """

    def __init__(self, monitor: str, mode: str, min_delta: float = 0) -> None:
        owner = type(self).__name__
        require(isinstance(monitor, str) and bool(monitor), f"{owner}.monitor must be a name, got {monitor!r}.")
        require_choice(owner, "mode", mode, ("auto", "min", "max"))
        require_float(owner, "min_delta", min_delta)
        self.monitor = monitor
        self.mode = mode
        self.min_delta = abs(min_delta)
        self._sign = -1.0 if mode == "max" or (mode == "auto" and monitor.endswith("accuracy")) else 1.0

    @property
    def worst(self) -> float:
        """What any number is better than."""
        return self._sign * math.inf

    def set_params(self, params: dict[str, Any]) -> None:
        """Is told what is measured.

        Raises:
            ConfigError: What it looks at is not, or there is no validation.
        """
        super().set_params(params)
        name = self.monitor.removeprefix("val_")
        if name != self.monitor and name in params["metrics"] and not params["validation"]:
            raise ConfigError(
                f"{type(self).__name__} looks at {self.monitor!r}, and there are no validation data: give some, or "
                f'monitor="{name}".'
            )
        if self.monitor not in params["metrics"]:
            raise unknown_name("this fit", self.monitor, params["metrics"], "number in its history that is named")
        if self.mode == "auto":
            known = params["larger_is_better"].get(name, name.endswith("accuracy") or None)
            if known is None:
                raise ConfigError(
                    f"{type(self).__name__} looks at {self.monitor!r}, and nobody has said whether more of it is "
                    'better: give mode="min" or "max".'
                )
            self._sign = -1.0 if known else 1.0

    def value_in(self, logs: Logs | None) -> float | None:
        """Returns the number of an epoch; None: the epoch had no validation.

        Raises:
            ConfigError: There is no such number in this fit.
        """
        logs = logs or {}
        value = logs.get(self.monitor)
        if value is None and not (self.monitor.startswith("val_") and "val_loss" not in logs):
            raise ConfigError(
                f"{type(self).__name__} looks at {self.monitor!r}, which this fit does not measure: it has "
                f"{', '.join(logs)}. Look at one of those."
            )
        return value

    def is_better(self, value: float, than: float) -> bool:
        """Returns whether a number is better than another, by enough to count."""
        return self._sign * value < self._sign * than - self.min_delta


def require_float(owner: str, name: str, value: object) -> None:
    """Refuses what is no number."""
    require(
        isinstance(value, (int, float)) and not isinstance(value, bool),
        f"{owner}.{name} must be a number, got {value!r}.",
    )


def require_count(owner: str, **values: object) -> None:
    """Refuses what is no whole number of at least 0."""
    for name, value in values.items():
        require_integer(owner, name, value, 0)
