"""A bar of one's own."""

from __future__ import annotations

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.progress.display import Display, make_display, numbers
from cyxtrain.world import runtime


class ProgressBar(Callback):
    """Shows how far an epoch is, on rank 0, in place of the one that `verbose=True` shows; plain lines elsewhere.

    `fit` shows one by itself. This one is for `verbose=False`, where the header shall not be shown; its place among the
    callbacks says what it is shown after.
    """

    def __init__(self) -> None:
        self._display = Display()
        self._shown: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Finds out what there is to show it on."""
        self._display = make_display(runtime.is_master() and not self.params["verbose"])

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begins a bar."""
        self._display.begin_epoch(epoch + 1, self.params["epochs"], self.params["steps"])
        self._shown = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Moves it; numbers are asked for only when it is drawn."""
        if self._shown != self.trainer.epoch:  # a fit that goes on in the middle of an epoch
            self.on_epoch_begin(self.trainer.epoch)
        self._display.step(self.params["samples_per_step"], lambda: dict(logs or {}))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Shows the epoch's numbers instead."""
        self._display.end_epoch(numbers(logs or {}))

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._display.close()
