"""A run of a model over the batches of an evaluation or a prediction, and the call of a user that makes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from cyxtrain.callbacks.callback import Callbacks, Trainer, checked_callbacks
from cyxtrain.data.batches.batch import Batch, BatchShare
from cyxtrain.optim.precision import float32_products
from cyxtrain.progress.display import Display, Measured, Verbosity, make_display, numbers, pace
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.training.model.compile import marked_steps
from cyxtrain.training.model.modes import modes_kept
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.world import runtime
from cyxtrain.world.agreement import ending_group_on_error, raise_together


class BatchRun:
    """A run of a model, in evaluation mode, over a rank's share of batches, with callbacks and a display.

    If any rank's callbacks have a hook of batches, the ranks take turns and agree after each batch, by a small
    all_reduce, whether to go on: so all end together, with the first batches done.

    `kind` is "test" or "predict", as in the names of hooks; `group` and `done` are those of `BatchShare`; `is_ended`
    tells whether a rank has ended the run before the last batch.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: CheckedData,
        kind: str,
        callbacks: Callbacks,
        display: Display,
        group: int = 0,
        done: frozenset[int] = frozenset(),
        *,
        distributed: bool,
    ) -> None:
        self._model, self._rows, self._kind, self._distributed = model, rows, kind, distributed
        self._callbacks, self._display = callbacks, display
        self._agrees = distributed and _any_rank(self._callbacks.may_end(kind))[0]
        ranks = (runtime.get_rank(), runtime.get_world_size()) if distributed else (0, 1)
        self._share = BatchShare(*ranks, group or int(self._agrees), done)
        batches = rows.source.num_batches(rows.batch_size)
        self._own = 0 if batches is None else len(self._share.of(batches))
        self._done = 0
        self.is_ended = False
        self._phase = {"test": "validating", "predict": "predicting"}[kind]

    def all_batches(
        self,
        step: Callable[[Batch], object],
        should_stop: Callable[[], bool] = lambda: False,
        finish: Callable[[], object] = lambda: None,
        begin: Callable[[int, int], object] = lambda rows, number: None,
    ) -> bool:
        """Call `step` with each of this rank's batches; return whether `should_stop` ended it on this rank.

        An error on any rank is raised on all. `step` calls `end_batch`; `finish` is called after the last batch,
        `begin` before each with its rows and number.
        """
        self._display.phase(self._phase, 0, self._own)
        problem, is_stopped = None, False
        rows, modules = self._rows, (self._model, *self._rows.loss.modules)
        try:
            with memory_explained(trains=False), modes_kept(*modules):
                for module in modules:
                    module.eval()
                batches = rows.source.whole_batches(rows.batch_size, rows.placement, self._share)
                for batch in self._until_end(marked_steps(batches, rows.placement.device)):
                    begin(batch.rows, batch.number)
                    self._callbacks.on_batch_begin(self._kind, self._done)
                    step(batch)
                    is_stopped = should_stop()
                    self.is_ended = is_stopped or self._callbacks.wants_end(self._kind)
                if not self.is_ended:
                    finish()
        except Exception as error:
            problem = error
            if self._agrees:
                _any_rank(True, False)
        if self._distributed:
            raise_together(problem)
        elif problem is not None:
            raise problem
        return is_stopped

    def _until_end(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches until this rank ends the run or, if the ranks agree, any of them."""
        goes_on = True
        while goes_on and not self.is_ended:
            batch = next(batches, None)
            if batch is not None:
                yield batch
            goes_on = batch is not None
            if self._agrees:
                self.is_ended, goes_on = _any_rank(self.is_ended, goes_on)
        self._agrees = False

    def end_batch(self, batch: Batch, look: Callable[[], dict[str, Any]], measured: Measured = dict) -> None:
        """Call the hooks after a batch, with logs of `look`, and show the numbers that are `measured` so far."""
        self._callbacks.on_batch_end(self._kind, self._done, look)
        self._done += 1
        self._display.phase(self._phase, self._done, self._own, batch.rows, measured)


class Call(Display):
    """A call of `evaluate` or `predict`, shown as an epoch is: a bar, or with verbose=2 only a line at the end."""

    def __init__(
        self, name: str, trainer: Trainer, rows: CheckedData, callbacks: Any, verbose: Verbosity, *, distributed: bool
    ) -> None:
        self.trainer, self.rows, self.distributed = trainer, rows, distributed
        self._hook = "on_test" if name == "evaluate" else f"on_{name}"
        self._name, self._verbose = name, verbose
        found = checked_callbacks(callbacks)
        self.callbacks, self._has_callbacks = Callbacks(found), bool(found)
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
            if self._has_callbacks and self.distributed:
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


def _any_rank(*flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank; collective."""
    found = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX, group=runtime.cpu_group())
    return [bool(flag) for flag in found.tolist()]
