"""Callbacks that measure a fit or stop it: NaN, time limit, gradient norm, throughput, slow ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import require_float
from cyxtrain.config.settings import require, require_integer
from cyxtrain.errors import warn_together
from cyxtrain.optim.clipping import gradient_norm

_COMPUTE = ("forward", "backward", "optimizer")


class TerminateOnNaN(Callback):
    """Stop the fit if a loss or gradient is NaN or infinite, instead of raising NonFiniteError.

    The step is skipped, and the fit ends normally on all ranks, even if only one rank has this callback.
    """

    ends_on_nonfinite = True

    def __init__(self) -> None:
        super().__init__()


class Timer(Callback):
    """Measure time and stop training at a time limit.

    Args:
        seconds: Time limit, by the clock of the rank that has this callback; None: no limit.

    Attributes:
        epoch_seconds: Duration of each epoch, with its validation, since the fit started or resumed.

    Raises:
        ConfigError: `seconds` is not above 0.
    """

    def __init__(self, seconds: float | None = None) -> None:
        if seconds is not None:
            require_float("Timer", "seconds", seconds)
            require(seconds > 0, f"Timer.seconds must be above 0, got {seconds!r}.")
        self.seconds = seconds
        self.on_train_begin()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.epoch_seconds: list[float] = []
        self._began = time.monotonic()
        self._epoch_began = self._began

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self.seconds is not None and time.monotonic() - self._began >= self.seconds:
            self.stop_reason = f"{self.seconds:g} seconds have passed (Timer)"
            self.trainer.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        now = time.monotonic()
        self.epoch_seconds.append(now - self._epoch_began)
        self._epoch_began = now


class _Recording(Callback):
    """Base of callbacks that record (step, number) every few steps, also in checkpoints."""

    def __init__(self, every_n_steps: int) -> None:
        require_integer(type(self).__name__, "every_n_steps", every_n_steps, 1)
        self.every_n_steps = every_n_steps
        self._values: list[tuple[int, Tensor | float]] = []

    @property
    def values(self) -> list[tuple[int, float]]:
        """(step, number), from the first step of the training; reading them waits for the device."""
        numbers = [(step, float(value)) for step, value in self._values]
        # Numbers from here on: reading them again does not wait for the device.
        self._values = list(numbers)
        return numbers

    def is_due(self) -> bool:
        """Return whether this step has an entry."""
        return self.trainer.step % self.every_n_steps == 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": [[step, value] for step, value in self.values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = [(step, value) for step, value in state["values"]]


class GradientNormMonitor(_Recording):
    """Record the norm of all gradients, averaged over ranks, before clipping.

    Cost: reads the gradients once per entry, without waiting for the device.

    Args:
        every_n_steps: Steps between entries.

    Attributes:
        values: (step, norm); NaN if no parameter had a gradient.

    Raises:
        ConfigError: `every_n_steps` is not a whole number of at least 1.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps)

    def on_before_optimizer_step(self, batch: int, logs: Logs | None = None) -> None:
        if self.is_due():
            norm = gradient_norm(self.model)
            self._values.append((self.trainer.step, math.nan if norm is None else norm))


class ThroughputMonitor(_Recording):
    """Record the training throughput of all ranks in samples per second, by this rank's clock.

    Validation and the time between epochs do not count.

    Args:
        every_n_steps: Steps between entries.

    Attributes:
        values: (step, samples per second since the previous entry).

    Raises:
        ConfigError: `every_n_steps` is not a whole number of at least 1.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__(every_n_steps)
        self.on_train_begin()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._since = 0.0
        self._steps = 0

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        # A fit that resumes within an epoch does not begin with batch 0.
        if batch == 0 or not self._since:
            self._since = time.perf_counter()
            self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps += 1
        if self.is_due():
            now = time.perf_counter()
            samples = self._steps * self.params["samples_per_step"]
            self._values.append((self.trainer.step, samples / (now - self._since)))
            self._since = now
            self._steps = 0


class SlowRankMonitor(Callback):
    """Warn after an epoch which rank is slow, and whether it waits for data or computes longer.

    If no rank is slow and all spend more than half of a step communicating, it warns of that. It does not repeat the
    previous epoch's warning.

    Args:
        threshold: How many times longer than the others' average a rank's step must take to be slow.

    Attributes:
        slow: (epoch, from 0; rank, or None if all communicate; "data", "compute" or "communication"), for each epoch
            with a finding; the same on every rank.

    Raises:
        ConfigError: The threshold is not above 1.
    """

    _saved = ("slow",)

    def __init__(self, threshold: float = 1.25) -> None:
        require_float("SlowRankMonitor", "threshold", threshold)
        require(threshold > 1, f"SlowRankMonitor.threshold must be above 1, got {threshold!r}.")
        self.threshold = threshold
        self.slow: list[tuple[int, int | None, str]] = []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compare the step times of all ranks, which the fit has measured."""
        ranks = self.trainer.step_seconds
        if len(ranks) < 2:
            return
        rank, why = slow_rank(ranks, self.threshold)
        if not why:
            return
        is_new = (epoch - 1, rank, why) not in self.slow[-1:]
        self.slow.append((epoch, rank, why))
        if is_new:
            warn_together(f"epoch {epoch + 1}: {_describe(ranks, rank, why)}")


def slow_rank(ranks: Sequence[dict[str, float]], threshold: float) -> tuple[int | None, str]:
    """Return (slow rank, "data" or "compute"), (None, "communication") or (None, "")."""
    own = [_own(parts) for parts in ranks]
    slowest = max(range(len(ranks)), key=own.__getitem__)
    if own[slowest] > threshold * _others_mean(own, slowest):
        data = [parts["data"] for parts in ranks]
        compute = [_compute(parts) for parts in ranks]
        extra_data = data[slowest] - _others_mean(data, slowest)
        extra_compute = compute[slowest] - _others_mean(compute, slowest)
        cause = "data" if extra_data >= extra_compute else "compute"
        return slowest, cause
    if all(parts["communication"] > _own(parts) for parts in ranks):
        return None, "communication"
    return None, ""


def _describe(ranks: Sequence[dict[str, float]], rank: int | None, why: str) -> str:
    if rank is None:
        share = min(parts["communication"] / (parts["communication"] + _own(parts)) for parts in ranks)
        return (
            f"no rank is slow; all spend at least {100 * share:.0f} % of a step communicating. Larger batches, "
            "accumulation_steps or DDPConfig(compression=) reduce it."
        )
    own = [1000 * _own(parts) for parts in ranks]
    if why == "data":
        cause = f"waits for data for {1000 * ranks[rank]['data']:.1f} ms"
    else:
        cause = f"computes for {1000 * _compute(ranks[rank]):.1f} ms"
    return (
        f"rank {rank} is slow: its step takes {own[rank]:.1f} ms, the others' {_others_mean(own, rank):.1f} ms, and "
        f"they wait for it. It {cause}."
    )


def _compute(parts: dict[str, float]) -> float:
    return sum(parts[name] for name in _COMPUTE)


def _own(parts: dict[str, float]) -> float:
    return parts["data"] + _compute(parts)  # without communication


def _others_mean(values: Sequence[float], rank: int) -> float:
    return (sum(values) - values[rank]) / (len(values) - 1)
