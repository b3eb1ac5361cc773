"""Stop a fit that does not improve."""

from __future__ import annotations

import math
from typing import Any

import torch

from cyxtrain.callbacks.callback import Logs
from cyxtrain.callbacks.monitored_value import Monitoring, require_float
from cyxtrain.checkpoint.format.names import plain_state
from cyxtrain.checkpoint.weights import load_model_state
from cyxtrain.config.settings import require_boolean, require_integer
from cyxtrain.environment.standard_streams import show
from cyxtrain.errors import counted


class EarlyStopping(Monitoring):
    """Stop the fit when a metric has not improved for some epochs or validations; Keras's arguments.

    All ranks see the same values and decide the same. Its state is in the checkpoint: a resumed run stops where the
    uninterrupted one does, with the same weights.

    Args:
        monitor: "loss", "accuracy" or another metric; validation metrics, such as "val_loss" and "val_accuracy", are
            compared after each validation, also within an epoch.
        min_delta: The smallest change that counts as an improvement.
        patience: Epochs, or validations, without an improvement before the fit stops.
        verbose: 1: rank 0 prints when it stops and which weights it restores.
        mode: "min", "max", or "auto": as the metric declares.
        baseline: A value that the metric must also improve on to reset the patience.
        restore_best_weights: Restore the weights and buffers of the best one at the end. Cost: a copy of the model,
            in memory and in each checkpoint.
        start_from_epoch: Ignore epochs before this one, from 0.

    Raises:
        ConfigError: An argument is invalid.
    """

    _saved = ("wait", "stopped_epoch", "best", "best_epoch", "best_weights")

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        owner = "EarlyStopping"
        require_integer(owner, "patience", patience, 0)
        require_integer(owner, "start_from_epoch", start_from_epoch, 0)
        require_boolean(owner, "restore_best_weights", restore_best_weights)
        if baseline is not None:
            require_float(owner, "baseline", baseline)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.belongs_on_all_ranks = restore_best_weights
        self.runs_last = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self.on_train_begin()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.wait = 0
        self.stopped_epoch = 0
        self.best = self.worst
        self.best_epoch = 0
        self.best_weights: dict[str, Any] | None = None
        self.stop_reason = ""

    def _compare(self, epoch: int, logs: Logs | None) -> None:
        value = self.value_in(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        has_improved = self.is_better(value, self.best)
        keeps_first = self.restore_best_weights and self.best_weights is None  # even if the first value is NaN
        if has_improved or keeps_first:
            self.best_epoch = epoch
            self._copy_weights()
        if has_improved:
            self.best = value
        if has_improved and (self.baseline is None or self.is_better(value, self.baseline)):
            self.wait = 0
        else:
            self.wait += 1
        if not has_improved and self._is_out_of_patience(epoch):
            self._stop(epoch)

    def _copy_weights(self) -> None:
        if not self.restore_best_weights:
            return
        weights = {}
        with self._measured_weights():
            for name, value in plain_state(self.trainer.trained).items():  # also the weights of a trainable loss
                weights[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        self.best_weights = weights

    def _is_out_of_patience(self, epoch: int) -> bool:
        is_first = epoch == 0
        if self._is_of_validations and len(self.trainer.history.validations) > 1:
            is_first = False
        # As in Keras, the first value never stops a fit: it has no earlier one to improve on.
        return self.wait >= self.patience and not is_first

    def _stop(self, epoch: int) -> None:
        rounds = "validation" if self._is_of_validations else "epoch"
        best = f"best {self.best:.4g} at {self._best_place}" if math.isfinite(self.best) else "never finite"
        self.stopped_epoch = epoch
        self.stop_reason = f"{self.monitor} has not improved for {counted(self.wait, rounds)}; {best}"
        self.trainer.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the best weights, if requested; an interrupted fit keeps its own."""
        prints = bool(self.verbose) and self.trainer.is_master()
        if prints and (self.stopped_epoch or self.stop_reason):
            best = f"best at {self._best_place}" if math.isfinite(self.best) else "never finite"
            show(f"epoch {self.stopped_epoch + 1}: early stopping, {self.monitor} was {best}")
        if self.best_weights is not None:
            if prints:
                show(f"restored the weights of {self._best_place}")
            load_model_state(self.trainer.trained, self.best_weights, f"the best weights of {self.monitor}")

    @property
    def _best_place(self) -> str:
        """The epoch, or the step of a validation within epochs, with the best value."""
        if self._is_of_validations:
            validations = self.trainer.history.validations
            validates_within_epochs = len({row["epoch"] for row in validations}) < len(validations)
            steps = [row["step"] for row in validations if row.get(self.monitor) == self.best]
            if validates_within_epochs and steps:
                return f"step {steps[0]:,}"
        return f"epoch {self.best_epoch + 1}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; without the weights if they are not requested."""
        super().load_state_dict(state)
        if not self.restore_best_weights:
            self.best_weights = None
