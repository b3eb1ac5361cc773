"""An exponential moving average of the weights, which often predicts better than the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import require_count, require_float
from cyxtrain.config.settings import require, require_boolean
from cyxtrain.environment import torch_compat


class EMA(Callback):
    """Keep an exponential moving average: after each step, decay * average + (1 - decay) * parameters.

    Every rank keeps the same average; it is part of checkpoints. Buffers, such as running means, are not averaged.
    16-bit parameters are averaged in float32; the parameters of a trainable loss are averaged too. Cost: a copy of the
    parameters, read and written once per step.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging (1992).

    Args:
        decay: Between 0 and 1.
        start_step: Steps before averaging starts; until then the average equals the parameters.
        validates: Whether validation, and with it the choice of "best.ckpt", uses the average.
        overwrites_at_end: Whether the model gets the average when the fit is complete.

    Raises:
        ConfigError: An argument is invalid.
    """

    belongs_on_all_ranks = True

    def __init__(
        self, decay: float = 0.999, start_step: int = 0, validates: bool = True, overwrites_at_end: bool = True
    ) -> None:
        require_float("EMA", "decay", decay)
        require(0 < decay < 1, f"EMA.decay must be between 0 and 1, got {decay!r}.")
        require_count("EMA", start_step=start_step)
        require_boolean("EMA", "validates", validates)
        require_boolean("EMA", "overwrites_at_end", overwrites_at_end)
        self.decay = decay
        self.start_step = start_step
        self.validates = validates
        self.overwrites_at_end = overwrites_at_end
        self._average: list[Tensor] = []
        self._own: list[Tensor] | None = None

    def _parameters(self) -> list[Tensor]:
        trained = self.trainer.trained.parameters()
        return [each.data for each in trained if each.is_floating_point() or each.is_complex()]

    def _wide(self) -> list[Tensor]:
        """Return the parameters, those of 16 bits as float32: what a step adds to an average is lost in 16 bits."""
        return [each.to(torch.promote_types(each.dtype, torch.float32)) for each in self._parameters()]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start with a copy of the parameters."""
        self._average = [parameter.clone() for parameter in self._wide()]
        self._own = None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Update the average."""
        weight = 1.0 - self.decay if self.trainer.step > self.start_step else 1.0
        torch_compat.lerp_all(self._average, self._wide(), weight)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Swap the average in."""
        if self.validates:
            self._own = [parameter.clone() for parameter in self._parameters()]
            self._set(self._average)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Restore the parameters."""
        if self._own is not None:
            self._set(self._own)
            self._own = None

    def on_exception(self, exception: BaseException) -> None:
        """Restore the parameters after an error in validation."""
        self.on_test_end()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Overwrite the parameters with the average."""
        if self.overwrites_at_end:
            self._set(self._average)

    def _set(self, values: list[Tensor]) -> None:
        torch_compat.copy_all(self._parameters(), values)

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"average": list(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average."""
        for average, saved in zip(self._average, state["average"], strict=True):
            average.copy_(saved)
