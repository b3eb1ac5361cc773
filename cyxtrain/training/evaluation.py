"""A model's loss, metrics and outputs over all samples: each counted once, in order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from cyxtrain.callbacks.callback import Callbacks, Trainer, checked_callbacks
from cyxtrain.data.batches.batch import Batch, BatchShare
from cyxtrain.data.feed import DataInterruptedError
from cyxtrain.data.sources.passes import check_ends
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import MetricSums, correct_of
from cyxtrain.metrics.whole_set import CheckedWholeSet
from cyxtrain.optim.precision import float32_products, threads_used
from cyxtrain.parallel import gathering_alone
from cyxtrain.progress.display import Display, Measured, Verbosity, make_display, numbers, pace
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.training.model.compile import marked_steps
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.snapshot import modes_kept
from cyxtrain.training.outside_fit.gathered_outputs import Outputs, check_parts, gathered_rows
from cyxtrain.training.outside_fit.saved_predictions import Predictions, ShardFolder
from cyxtrain.world.agreement import ending_group_on_error, on_first, raise_together
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

_PHASES = {"test": "validating", "predict": "predicting"}


class Evaluation:
    """Metrics over all samples: `loss, accuracy = ...`, `.loss`, `["accuracy"]`, `dict(...)`.

    It unpacks as loss, accuracy, then the other metrics. A regression has no accuracy: it unpacks as loss, then its
    metrics; without any, as loss and None.

    Args:
        metrics: By name.
    """

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    # `float | Any`: the accuracy may be None, and `loss + accuracy` needs no check in your code.
    def __iter__(self) -> Iterator[float | Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: str | int) -> float | Any:
        if isinstance(key, str):
            return self._metrics[key]
        return self._values[key]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Evaluation):
            return self._metrics == other._metrics
        if isinstance(other, (tuple, list)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def _values(self) -> list[Any]:
        if len(self._metrics) > 1:
            return [*self._metrics.values()]
        # `loss, accuracy = trainer.evaluate(...)` works for a regression, too.
        return [self.loss, None]

    def keys(self) -> list[str]:
        """Return the names of the metrics."""
        return list(self._metrics)

    def to_dict(self) -> dict[str, float]:
        """Return the metrics by name."""
        return dict(self._metrics)

    @property
    def loss(self) -> float:
        """The loss."""
        return self._metrics["loss"]

    @property
    def accuracy(self) -> float | None:
        """The share of samples with the right class; NaN if none counted, None if targets are not classes."""
        return self._metrics.get("accuracy")

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(f'{name}={value:.6g}' for name, value in self._metrics.items())})"


def evaluate(call: Call, logged: LoggedNumbers) -> Evaluation:
    """Return loss, accuracy, metrics and what is logged in a call of `DistributedTrainer.evaluate`."""
    world = call.world
    slices = Slices.of(world, call.trainer.config.virtual_ranks)
    if slices.is_virtual:
        logged.use_slices(slices)
    with call.running() as measured:
        found = evaluate_rows(world, call.trainer.model, call.rows, call.callbacks, call, logged)
        assert found is not None
        measured.update(found)
    return Evaluation(**{**measured, **logged.over_ranks(world)})


def evaluate_rows(
    world: World,
    model: nn.Module,
    rows: CheckedData,
    callbacks: Callbacks,
    display: Display,
    logged: LoggedNumbers,
    *,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Return loss, accuracy and metrics over all samples, on every rank; None: this rank stopped early.

    If a callback ends the evaluation, they cover the batches done so far. `should_stop` is called after each batch; it
    returns whether to skip the rest. If numbers are `logged` by slice, batch i belongs to slice i mod V: then sums do
    not depend on the ranks.
    """
    sums = _EvaluationSums(world, rows, logged)
    run = BatchRun(world, model, rows, "test", callbacks, display, slices=logged.slices)

    def evaluate_batch(batch: Batch) -> None:
        with torch.no_grad(), gathering_alone():
            sums.add(rows.call.without_graph(model, batch), batch)
        run.end_batch(batch, sums.totals.lazy_values, sums.totals.cheap_values)

    is_stopped = run.all_batches(evaluate_batch, should_stop, begin=sums.begin)
    measured = sums.over_ranks(is_complete=not is_stopped)
    # Only now: the collectives above need this rank, even if it stops.
    return None if is_stopped else measured


class _EvaluationSums:
    """Loss, accuracy, metrics and logged numbers of an evaluation."""

    def __init__(self, world: World, rows: CheckedData, logged: LoggedNumbers) -> None:
        self._world = world
        self._data = rows
        self._logged = logged
        self._slices = logged.slices or Slices.of(world)
        logged.reserved |= {*rows.loss.shown, *rows.metrics.names}
        self._batches = rows.source.num_batches(rows.batch_size)
        self._num_rows = self._batches or 1  # a row per batch: it does not matter which rank adds it
        if self._batches is None and self._slices.is_virtual:
            self._num_rows = self._slices.count
        self.totals = MetricSums(self._num_rows, rows.loss, rows.metrics, logged.slices)
        sets = rows.metrics.whole_sets
        self._whole_sets = [(each, Outputs(each.structure, owner=f"the metric {each.name}")) for each in sets]

    def begin(self, num_samples: int, number: int) -> None:
        """Begin a batch: numbers that are logged belong to it."""
        self._logged.begin(num_samples, number)
        self._logged.enter_slice(self._slice_of(number))

    def _slice_of(self, number: int) -> int:
        if self._data.source.is_in_slices:
            return number % self._slices.count
        return self._slices.owned.start

    def add(self, output: Any, batch: Batch) -> None:
        """Add the output for a batch."""
        loss = self._data.loss
        loss.check_shapes(output, batch.targets)
        number = self._slice_of(batch.number)
        row = batch.number
        if self._batches is None:
            # The batches of a stream, whose number is unknown, share one row of sums, or one per slice.
            row = number % self._num_rows
        batch_loss = loss(output, batch)
        output = loss.measured_part(output)
        self.totals.add(row, batch_loss, correct_of(output, batch.labels, loss))
        self.totals.metrics.add(output, batch.labels, batch.rows, number)
        self._logged.add_parts(batch_loss.parts, loss.shown)
        for metric, kept in self._whole_sets:
            kept.add(metric.kept(output, batch.labels, loss), batch)

    def over_ranks(self, *, is_complete: bool) -> dict[str, float]:
        """Return all numbers over all ranks; collective."""
        self._logged.enter_slice(None)
        self._logged.rows = 1
        measured = self.totals.over_ranks(self._world)
        for metric, kept in self._whole_sets:
            measured |= _over_whole_set(self._world, metric, kept, self._data, is_complete=is_complete)
        return measured | self._logged.over_ranks(self._world)


def _over_whole_set(
    world: World, tried: CheckedWholeSet, kept: Outputs, data: CheckedData, *, is_complete: bool
) -> dict[str, float]:
    """Return a metric over all samples, which rank 0 computes; empty if the fit stops on any rank."""
    found: dict[str, float] = {}
    kept.is_complete = is_complete
    rows = gathered_rows(world, kept, data.source, only_first=True)

    def compute() -> None:
        if rows is not None:
            found.update(tried.results(rows, data.name))

    on_first(world, compute)
    return dict(world.gather_json(found)[0])


def predict(call: Call, pad_value: float | None = None) -> Any:
    """Return a model's output for all samples, in their order, on every rank; as NumPy arrays if X is one.

    If a callback ends the prediction, these are the outputs of the batches done so far.

    Cost: the shapes of all batches, then the rows once in and once out of each rank.
    """
    rows = call.rows
    outputs = Outputs(rows.loss.without_own(rows.tried.output), rows.tried.rows_second)
    with call.running():
        run = BatchRun(call.world, call.trainer.model, rows, "predict", call.callbacks, call)
        run.all_batches(partial(_predict_batch, call, outputs, run))
    return gathered_rows(call.world, outputs, rows.source, pad_value=pad_value)


def predict_to_folder(call: Call, path: str | os.PathLike[str], pad_value: float | None) -> Predictions:
    """Write a model's output for all samples to a folder; return its reader. Raises as `ShardFolder`."""
    rows = call.rows
    model = call.trainer.model
    outputs = Outputs(rows.loss.without_own(rows.tried.output), rows.tried.rows_second)
    check_parts(outputs.structure, rows.tried.rows)
    folder = ShardFolder(call.world, path, model, rows, outputs.structure)

    def write(following: int = -1) -> None:
        """Write the shard of the latest batches, unless the following one belongs to it."""
        if not outputs.numbers:
            return
        shard = outputs.numbers[0] // folder.group
        if shard != following:
            folder.write(shard, outputs.take())

    def predict_batch(batch: Batch) -> None:
        write(batch.number // folder.group)
        _predict_batch(call, outputs, run, batch)

    with call.running():
        run = BatchRun(call.world, model, rows, "predict", call.callbacks, call, folder.group, folder.done)
        if not folder.is_complete:
            run.all_batches(predict_batch, finish=write)
    return folder.finish(pad_value, is_ended=run.is_ended)


def _predict_batch(call: Call, outputs: Outputs, run: BatchRun, batch: Batch) -> None:
    with torch.no_grad(), gathering_alone():
        given = call.rows.call.without_graph(call.trainer.model, batch, predicting=True)
    outputs.add(call.rows.loss.without_own(given), batch)
    run.end_batch(batch, lambda: {"outputs": lambda: given})


class BatchRun:
    """A run of a model, in evaluation mode, over a rank's share of batches, with callbacks and a display.

    If any rank's callbacks have a hook of batches, the ranks take turns and agree after each batch, by a small
    all_reduce, whether to continue: so all end together, with the first batches done (of each slice).

    `kind` is "test" or "predict", as in the names of hooks; `group`, `done` and `slices`: as `BatchShare`; `is_ended`
    tells whether a rank has ended the run before the last batch.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        rows: CheckedData,
        kind: str,
        callbacks: Callbacks,
        display: Display,
        group: int = 0,
        done: frozenset[int] = frozenset(),
        slices: Slices | None = None,
    ) -> None:
        self._world = world
        self._model = model
        self._rows = rows
        self._kind = kind
        self._callbacks = callbacks
        self._display = display
        (any_may_end,) = _any_rank(world, callbacks.may_end(kind))
        self._agrees = any_may_end and not world.sends_nothing
        if slices is None or not rows.source.is_shared:
            slices = Slices.of(world)
        self._share = BatchShare(slices, group or int(self._agrees or slices.is_virtual), done)
        batches = rows.source.num_batches(rows.batch_size)
        self._num_batches = 0 if batches is None else len(self._share.of(batches))
        self._ends_unknown = batches is None and rows.source.is_shared
        self._num_done = 0
        self.is_ended = False
        self._phase = _PHASES[kind]

    def all_batches(
        self,
        step: Callable[[Batch], object],
        should_stop: Callable[[], bool] | None = None,
        finish: Callable[[], object] = lambda: None,
        begin: Callable[[int, int], object] = lambda rows, number: None,
    ) -> bool:
        """Call `step` with each of this rank's batches; return whether `should_stop` ended it on this rank.

        With `should_stop`, data that end because their workers died in a stop end it too, without an error. An error on
        any rank is raised on all. `step` calls `end_batch`; `finish` is called after the last batch,
        `begin` before each with its samples and number.
        """
        self._display.phase(self._phase, 0, self._num_batches)
        problem: Exception | None = None
        is_stopped = False
        rows = self._rows
        modules = (self._model, *rows.loss.modules)
        try:
            with memory_explained(self._world, trains=False), modes_kept(*modules):
                for module in modules:
                    module.eval()
                batches = rows.source.whole_batches(rows.batch_size, rows.placement, self._share)
                for batch in self._until_end(marked_steps(batches, rows.placement.device)):
                    begin(batch.rows, batch.number)
                    self._callbacks.on_batch_begin(self._kind, self._num_done)
                    step(batch)
                    is_stopped = should_stop is not None and should_stop()
                    self.is_ended = is_stopped or self._callbacks.wants_end(self._kind)
                if not self.is_ended:
                    finish()
        except Exception as error:
            is_stopped = should_stop is not None and isinstance(error, DataInterruptedError)
            self.is_ended = True
            if not is_stopped:
                problem = error
            if self._agrees:
                # The others wait for this rank's flags: it ends the run, and does not continue.
                _any_rank(self._world, True, False)
        raise_together(self._world, problem)
        if self._ends_unknown:
            check_ends(self._world, rows.source.num_evaluated)
        return is_stopped

    def _until_end(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches until this rank ends the run or, if the ranks agree, any of them."""
        continues = True
        while continues and not self.is_ended:
            batch = next(batches, None)
            if batch is not None:
                yield batch
            continues = batch is not None
            if self._agrees:
                # Also without a batch left: other ranks may have one more.
                self.is_ended, continues = _any_rank(self._world, self.is_ended, continues)
        # From here on no rank waits for flags, not even after an error.
        self._agrees = False

    def end_batch(self, batch: Batch, look: Callable[[], dict[str, Any]], measured: Measured = dict) -> None:
        """Call the hooks after a batch, with logs of `look`, and show the numbers that are `measured` so far."""
        self._callbacks.on_batch_end(self._kind, self._num_done, look)
        self._num_done += 1
        self._display.phase(self._phase, self._num_done, self._num_batches, batch.rows, measured)


class Call(Display):
    """A call of `evaluate` or `predict`, shown like an epoch: a bar, or with verbose=2 only a line."""

    def __init__(
        self, name: str, trainer: Trainer, world: World, rows: CheckedData, callbacks: Any, verbose: Verbosity
    ) -> None:
        self.trainer = trainer
        self.world = world
        self.rows = rows
        # Keras's hooks of evaluate are on_test_begin and on_test_end.
        self._hook = "on_test" if name == "evaluate" else f"on_{name}"
        self._name = name
        self._verbose = verbose
        self.callbacks = Callbacks(checked_callbacks(callbacks))
        self._shown = make_display(bool(verbose) and world.is_first)
        self._num_batches = 0
        self._num_rows = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[dict[str, Any]]:
        """Set up the call; yield a dictionary for the numbers that callbacks and the display get at its end."""
        measured: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self._shown))
            stack.enter_context(float32_products(self.trainer.config.float32_precision))
            stack.enter_context(threads_used(self.trainer.config.threads_of_fit))
            stack.enter_context(ending_group_on_error(self.world))
            self.callbacks.set_trainer(self.trainer, self.rows.params(self._verbose))
            self.callbacks.call(f"{self._hook}_begin", {})
            began = time.perf_counter()
            yield measured
            took = pace(time.perf_counter() - began, self._num_batches, self._num_rows)
            if self._verbose == 2:
                self._shown.begin(self._name, self._num_batches)
            self._shown.end_epoch("  ".join(filter(None, (numbers(measured), took))))
            self.callbacks.call(f"{self._hook}_end", measured)

    @override
    def phase(self, name: str, done: int = 0, total: int = 0, rows: int = 0, measured: Measured = dict) -> None:
        # An estimate: as if all ranks were as far as this one.
        rows *= self.world.size
        self._num_batches = done
        self._num_rows += rows
        if self._verbose == 2:
            return
        if done:
            self._shown.step(rows, measured)
        else:
            self._shown.begin(self._name, total or None)


def _any_rank(world: World, *flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank; collective."""
    found = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    return [bool(flag) for flag in world.reduce(found, dist.ReduceOp.MAX).tolist()]
