"""Save the model under names of your own."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

from cyxtrain.callbacks.callback import Logs
from cyxtrain.callbacks.monitored_value import Monitoring, require_float
from cyxtrain.checkpoint.format.optimizer_state import optimizer_state_by_name
from cyxtrain.checkpoint.weights import save_weights
from cyxtrain.config.settings import require, require_boolean, require_integer
from cyxtrain.environment.regular_files import local_path
from cyxtrain.environment.standard_streams import show
from cyxtrain.errors import ConfigError


class ModelCheckpoint(Monitoring):
    """Save the model after epochs or steps, on rank 0; Keras's arguments. Pass it on all ranks.

    Prefer `checkpoint_every_n_epochs` and similar settings: they save in the background, and `resume="auto"` finds
    their checkpoints. Use this callback for file names and times of your own. Load the files with `load_checkpoint`,
    or `load_weights` for weights.

    Args:
        filepath: File name; "{epoch}" (from 1), "{step}" (of the training), "{batch}" and names of metrics in it are
            replaced, as in "model-{epoch:02d}-{val_loss:.3f}.ckpt"; a metric that is not known yet is "nan".
        monitor: The metric that decides which epoch, or validation, is the best.
        verbose: 1: rank 0 prints what it saves.
        save_best_only: Save only epochs that improve on all previous ones; or validations, also within an epoch, as
            `keep_best` does.
        save_weights_only: Save only the weights, as safetensors; with `save_best_only`, the weights that were
            validated.
        mode: "min", "max", or "auto": as the metric declares.
        save_freq: "epoch", or a number of steps.
        initial_value_threshold: With `save_best_only`, the value that the first saved epoch must improve on.

    Raises:
        ConfigError: An argument is invalid.
    """

    runs_last = True

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        owner = "ModelCheckpoint"
        local_path(f"{owner}.filepath", filepath)
        require_boolean(owner, "save_best_only", save_best_only)
        require_boolean(owner, "save_weights_only", save_weights_only)
        if save_freq != "epoch":
            require_integer(owner, "save_freq", save_freq, 1)
            require(not save_best_only, f"{owner}.save_best_only needs save_freq='epoch'.")
        if initial_value_threshold is not None:
            require_float(owner, "initial_value_threshold", initial_value_threshold)
        self.filepath = os.fspath(filepath)
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self._folder = ""
        self.belongs_on_all_ranks = not save_weights_only
        self.save_freq = save_freq
        self.initial_value_threshold = initial_value_threshold
        self.best: float | None = initial_value_threshold

    def set_params(self, params: dict[str, Any]) -> None:
        """Check that the metric is measured, if it is used."""
        if self.save_best_only:
            super().set_params(params)
        else:
            self.params = params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Refuse an optimizer that no checkpoint can hold."""
        for optimizer in self.trainer.optimizers.values():
            if not self.save_weights_only:
                optimizer_state_by_name(optimizer, self.trainer.trained)
        # Relative paths are of the fit's beginning: the program may change its working directory.
        self._folder = os.getcwd()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save after an epoch."""
        if self.save_freq == "epoch":
            self._compare(epoch, logs)

    def on_validation_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save after a validation within an epoch."""
        # After the validation at its end, `on_epoch_end` saves: other callbacks must see the epoch first.
        if self.save_best_only and self._is_of_validations and epoch == self.trainer.epoch:
            self._compare(epoch, logs)

    def _compare(self, epoch: int, logs: Logs | None) -> None:
        if self.save_best_only:
            value = self.value_in(logs)
            best = self.worst if self.best is None else self.best
            if value is None or not self.is_better(value, best):
                return
            self.best = value
        unknown = dict.fromkeys(self.params["metrics"], math.nan)
        self._save(epoch, {**unknown, **(logs or {})})

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save after steps."""
        if self.save_freq != "epoch" and self.trainer.step % int(self.save_freq) == 0:
            self._save(self.trainer.epoch, {"batch": batch + 1})

    def _save(self, epoch: int, known: Mapping[str, float]) -> None:
        name = self._file_name({"epoch": epoch + 1, "step": self.trainer.step, **known})
        path = os.path.join(self._folder, local_path("ModelCheckpoint.filepath", name))
        if not self.save_weights_only:
            self.trainer.save_checkpoint(path)
        elif self.trainer.is_master():
            weights = self._measured_weights() if self.save_best_only else contextlib.nullcontext()
            with weights:
                save_weights(self.model, path)
        if self.verbose and self.trainer.is_master():
            show(f"saved {name}")

    def _file_name(self, known: Mapping[str, float]) -> str:
        try:
            return self.filepath.format(**known)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"ModelCheckpoint.filepath={self.filepath!r} has unknown names ({error!r}); available: "
                f"{', '.join(known)}."
            ) from error
