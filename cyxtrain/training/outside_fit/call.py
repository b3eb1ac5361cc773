"""The callbacks, the display and the settings of a call of `evaluate` or `predict`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from cyxtrain.callbacks.callback import Callbacks, Trainer, checked_callbacks
from cyxtrain.optim.precision import float32_products
from cyxtrain.progress.display import Display, Measured, Verbosity, make_display, numbers, pace
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.world import runtime
from cyxtrain.world.agreement import ending_group_on_error


class Call(Display):
    """A call of `evaluate` or `predict`, shown as an epoch is: a bar, or with verbose=2 only a line at the end."""

    def __init__(
        self, name: str, trainer: Trainer, rows: CheckedData, callbacks: Any, verbose: Verbosity, *, distributed: bool
    ) -> None:
        self.trainer, self.rows, self.distributed = trainer, rows, distributed
        self._hook = "on_test" if name == "evaluate" else f"on_{name}"
        self._name, self._verbose = name, verbose
        self.callbacks = Callbacks(checked_callbacks(callbacks))
        self._shown = make_display(bool(verbose) and (not distributed or runtime.is_master()))
        self._ranks = runtime.get_world_size() if distributed else 1
        self._batches = self._rows = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[dict[str, Any]]:
        """Set up the call; yield a dictionary for the numbers that callbacks and the display get at its end."""
        measured: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self._shown))
            stack.enter_context(float32_products(self.trainer.config.float32_precision))
            if self.distributed:
                stack.enter_context(ending_group_on_error())
            self.callbacks.set_trainer(self.trainer, self.rows.params(self._verbose))
            self.callbacks.call(f"{self._hook}_begin", {})
            began = time.perf_counter()
            yield measured
            took = pace(time.perf_counter() - began, self._batches, self._rows)
            if self._verbose == 2:
                self._shown.begin(self._name, self._batches)
            self._shown.end_epoch("  ".join(filter(None, (numbers(measured), took))))
            self.callbacks.call(f"{self._hook}_end", measured)

    @override
    def phase(self, name: str, done: int = 0, total: int = 0, rows: int = 0, measured: Measured = dict) -> None:
        rows *= self._ranks
        self._batches, self._rows = done, self._rows + rows
        if self._verbose != 2 and done:
            self._shown.step(rows, measured)
        elif self._verbose != 2:
            self._shown.begin(self._name, total or None)
