"""Ends a fit that does not get better."""

from __future__ import annotations

import math
from typing import Any

import torch

from cyxtrain.callbacks.callback import Logs
from cyxtrain.callbacks.monitored_value import Monitoring, require_count, require_float
from cyxtrain.checkpoint.format.names import load_plain_state, plain_state
from cyxtrain.config.settings import require_boolean
from cyxtrain.world import runtime


class EarlyStopping(Monitoring):
    """Ends the fit when a number has not become better for some epochs; Keras's arguments.

    All ranks see the same numbers, so all come to the same verdict. Its state is in the checkpoint: a run that is
    resumed ends where the uninterrupted one does, with the same weights.

    Args:
        monitor: "loss", "accuracy", a metric of the trainer's; "val_loss" and so on, that of the validation.
        min_delta: By how much it must become better to count.
        patience: Epochs without that, after which the fit ends.
        verbose: 1: rank 0 says when it ends, and which weights come back.
        mode: "min", "max", or "auto": what the metric says.
        baseline: What it must be better than, beside its best so far, to begin counting anew.
        restore_best_weights: At the end the model gets back the weights of the best epoch, buffers too. Cost: a copy
            of the model, here and in each checkpoint.
        start_from_epoch: Epochs, from 0, that are not looked at.

    Raises:
        ConfigError: An argument cannot be.
    """

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
        require_count(owner, patience=patience, start_from_epoch=start_from_epoch)
        require_boolean(owner, "restore_best_weights", restore_best_weights)
        require_float(owner, "baseline", 0 if baseline is None else baseline)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = self.belongs_on_all_ranks = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.stopped_epoch = 0
        self.best = self.worst
        self.best_epoch = 0
        self.best_weights: dict[str, Any] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins anew."""
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compares the epoch with the best one.

        Raises:
            ConfigError: There is no such number in this fit.
        """
        value = self.value_in(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        improved = self.is_better(value, self.best)
        if improved or (self.restore_best_weights and self.best_weights is None):  # a first NaN is better than nothing
            self._remember(epoch)
        self.best = value if improved else self.best
        counts = improved and (self.baseline is None or self.is_better(value, self.baseline))
        self.wait = 0 if counts else self.wait + 1
        if not improved and self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Gives the model the best weights, where they are wanted. A fit that is interrupted keeps its own."""
        speaks = bool(self.verbose) and runtime.is_master()
        if self.stopped_epoch and speaks:
            best = f"best in {self.best_epoch + 1}" if math.isfinite(self.best) else "never a number"
            print(f"epoch {self.stopped_epoch + 1}: early stopping, {self.monitor} was {best}")
        if self.best_weights is not None:
            if speaks:
                print(f"the model has the weights of epoch {self.best_epoch + 1}")
            load_plain_state(self.trainer.trained, self.best_weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has seen."""
        return {
            "wait": self.wait,
            "stopped_epoch": self.stopped_epoch,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_weights": self.best_weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what it had seen."""
        self.wait, self.stopped_epoch = state["wait"], state["stopped_epoch"]
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self.best_weights = state["best_weights"] if self.restore_best_weights else None

    def _remember(self, epoch: int) -> None:
        self.best_epoch = epoch
        if self.restore_best_weights:
            weights = plain_state(self.trainer.trained)  # with those of a loss that learns
            self.best_weights = {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in weights.items()
            }
