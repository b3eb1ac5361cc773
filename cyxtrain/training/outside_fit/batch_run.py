"""A run of a model over the batches of an evaluation or a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.data.batches.batch import Batch, BatchShare
from cyxtrain.progress.display import Display, Measured
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.training.model.compile import marked_steps
from cyxtrain.training.model.modes import modes_kept
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.world import runtime
from cyxtrain.world.agreement import raise_together


class BatchRun:
    """A run of a model, in evaluation mode, over a rank's share of batches, with callbacks and a display.

    If any rank's callbacks have a hook of batches, the ranks take turns and agree after each batch, by a small
    all_reduce, whether to go on: so all end together, with the first batches done.

    Args:
        model: Not wrapped.
        rows: All of them.
        kind: "test" or "predict", as in the names of hooks.
        callbacks, display: They see each batch.
        distributed: Whether the ranks share the work.
        group, done: As in `BatchShare`.

    Attributes:
        is_ended: Whether a rank has ended the run before the last batch.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: CheckedData,
        kind: str,
        callbacks: Callbacks | None,
        display: Display | None,
        group: int = 0,
        done: frozenset[int] = frozenset(),
        *,
        distributed: bool,
    ) -> None:
        self._model, self._rows, self._kind, self._distributed = model, rows, kind, distributed
        self._callbacks, self._display = callbacks or Callbacks(), display or Display()
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


def _any_rank(*flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank; collective."""
    found = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX, group=runtime.cpu_group())
    return [bool(flag) for flag in found.tolist()]
