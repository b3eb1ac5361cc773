"""A progress bar as a callback."""

from __future__ import annotations

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.progress.display import Display, around_validation, make_display, numbers


class ProgressBar(Callback):
    """Show a progress bar on rank 0, or plain lines without a terminal.

    `fit` shows one by itself. Use this callback with `verbose=False`, to have a bar without the header, or to choose
    its place among the callbacks.
    """

    def __init__(self) -> None:
        self._display = Display()
        self._shown: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._display = make_display(self.trainer.is_master() and not self.params["verbose"])

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._display.begin_epoch(epoch + 1, self.params["epochs"], self.params["steps"])
        self._shown = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Advance the bar; metrics are computed only when it is drawn."""
        if self._shown != self.trainer.epoch:  # a fit that resumes in the middle of an epoch
            self.on_epoch_begin(self.trainer.epoch)
        self._display.step(self.params["samples_per_step"], lambda: dict(logs or {}))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = logs or {}
        trained = {name: value for name, value in logs.items() if not name.startswith("val_")}
        validated = {name: value for name, value in logs.items() if name.startswith("val_")}
        self._display.end_epoch(around_validation(numbers(trained), validated, self.params["sets"]))

    def close(self) -> None:
        self._display.close()
