"""Callbacks that measure a fit while it runs, or end it by what they see."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import require_count, require_float
from cyxtrain.config.settings import require
from cyxtrain.optim.clipping import gradient_norm


class TerminateOnNaN(Callback):
    """Ends the fit, in good order, where a loss or a gradient is NaN or infinite, instead of raising NonFiniteError.

    The step is not taken; the fit is complete after it, on all ranks, also where one rank alone has this callback.
    """

    ends_on_nonfinite = True


class Timer(Callback):
    """Takes the time, and ends the fit when it is over.

    Args:
        seconds: That a fit may take, by the clock of the rank that has this callback; None: as many as it wants.

    Attributes:
        epoch_seconds: Of each epoch, with its validation, since the fit began or went on.

    Raises:
        ConfigError: That is no time.
    """

    def __init__(self, seconds: float | None = None) -> None:
        require_float("Timer", "seconds", 1.0 if seconds is None else seconds)
        require(seconds is None or seconds > 0, f"Timer.seconds must be above 0, got {seconds!r}.")
        self.seconds = seconds
        self.epoch_seconds: list[float] = []
        self._began = self._epoch_began = 0.0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins."""
        self.epoch_seconds = []
        self._began = self._epoch_began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Looks whether time is over."""
        if self.seconds is not None and time.monotonic() - self._began >= self.seconds:
            self.trainer.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Notes the epoch's time."""
        now = time.monotonic()
        self.epoch_seconds.append(now - self._epoch_began)
        self._epoch_began = now


class _Noting(Callback):
    """Keeps (step, number) in `values`, also in checkpoints.

    Args:
        every_n_steps: Steps from one to the next.
    """

    def __init__(self, every_n_steps: int) -> None:
        owner = type(self).__name__
        require_count(owner, every_n_steps=every_n_steps)
        require(every_n_steps > 0, f"{owner}.every_n_steps must be at least 1, got {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self._values: list[tuple[int, Tensor | float]] = []

    @property
    def values(self) -> list[tuple[int, float]]:
        """(step, number), counted from the training's first step; asking waits for the device."""
        found = [(step, float(value)) for step, value in self._values]
        self._values = [*found]
        return found

    def is_due(self) -> bool:
        """Whether the running step has an entry."""
        return self.trainer.step % self.every_n_steps == 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has noted."""
        return {"values": [[step, value] for step, value in self.values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what it had noted."""
        self._values = [(step, value) for step, value in state["values"]]


class GradientNormMonitor(_Noting):
    """Notes the norm of all gradients together, averaged over ranks, before they are clipped.

    Cost: the gradients are read once per entry; the device is not waited for.

    Args:
        every_n_steps: Steps from one entry to the next.

    Attributes:
        values: (step, norm); NaN where no parameter had a gradient.

    Raises:
        ConfigError: A number of steps cannot be.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps)

    def on_before_optimizer_step(self, batch: int, logs: Logs | None = None) -> None:
        """Notes the step's."""
        if self.is_due():
            norm = gradient_norm(self.model)
            self._values.append((self.trainer.step, math.nan if norm is None else norm))


class ThroughputMonitor(_Noting):
    """Notes how many samples per second all ranks together have trained on, by this rank's clock.

    Validation and what comes between two epochs is left out.

    Args:
        every_n_steps: Steps from one entry to the next.

    Attributes:
        values: (step, samples per second since the entry before).

    Raises:
        ConfigError: A number of steps cannot be.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__(every_n_steps)
        self._since = 0.0
        self._steps = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins anew."""
        self._since = 0.0
        self._steps = 0

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Starts the clock with the first step of an epoch."""
        if batch == 0 or not self._since:
            self._since, self._steps = time.perf_counter(), 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Notes a number where one is due."""
        self._steps += 1
        if self.is_due():
            now = time.perf_counter()
            rate = self._steps * self.params["samples_per_step"] / (now - self._since)
            self._values.append((self.trainer.step, rate))
            self._since, self._steps = now, 0
