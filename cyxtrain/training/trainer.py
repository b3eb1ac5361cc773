"""Keras's `fit` for any module, on as many ranks as there are.

fit -> one epoch after the other -> the steps of an epoch (`step.py`). Training and evaluation share `run_epoch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain import runtime
from cyxtrain.config import DDPConfig, DistributedTrainingConfig
from cyxtrain.data.batches import Batch, share_of_batches, training_batches, whole_batches
from cyxtrain.data.source import ArraySource
from cyxtrain.errors import ConfigError
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.training.agreement import agree_on, raise_together
from cyxtrain.training.arguments import parse_fit
from cyxtrain.training.display import numbers
from cyxtrain.training.evaluation import Evaluation
from cyxtrain.training.facts import value_facts
from cyxtrain.training.header import explain
from cyxtrain.training.history import TrainingHistory
from cyxtrain.training.loss import Loss
from cyxtrain.training.optimizers import OptimizerLike, make_optimizer
from cyxtrain.training.plan import LossLike, Rows, Run, checked_device, plan_fit, plan_rows
from cyxtrain.training.prediction import gather_rows
from cyxtrain.training.saving.checkpoint import write_checkpoint
from cyxtrain.training.saving.snapshot import checkpoint_path, read_on_all, restore, snapshot
from cyxtrain.training.step import EvaluationStep, PredictionStep, Step, TrainingStep, modes_kept
from cyxtrain.training.totals import loss_and_accuracy


class DistributedTrainer:
    """Trains, evaluates and predicts on every rank of the world; alone, that is a world of one.

    It may be made before `cyxtrain.init()`; `fit` and its like join the world by themselves.

    Args:
        model: Any `nn.Module`; a wrapped one is unwrapped.
        loss_fn: A module of torch.nn, a callable of (output, target), a name, or None: the model returns its loss.
        optimizer: From torch.optim, a factory, or a name.
        metrics: Reserved; accuracy comes by itself where targets are classes.
        scheduler: Reserved.
        callbacks: Reserved.
        ddp_config: How gradients travel; None: the defaults, with unused parameters allowed.
        device: "auto": where the model is on CUDA; else the rank's GPU under NCCL; else the CPU.

    Raises:
        ConfigError: A loss, an optimizer or a device that cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossLike = None,
        optimizer: OptimizerLike = "adam",
        *,
        metrics: Sequence[Any] | None = None,
        scheduler: Any = None,
        callbacks: Sequence[Any] = (),
        ddp_config: DDPConfig | None = None,
        device: str | torch.device = "auto",
    ) -> None:
        for name, value in (("metrics", metrics), ("scheduler", scheduler), ("callbacks", callbacks)):
            if value:
                raise ConfigError(f"this version has no {name} yet: leave {name} out.")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        self._wrappers, self.model = unwrap(model)
        self.loss_fn = loss_fn
        self.optimizer = make_optimizer(optimizer, self.model)
        self.ddp_config = ddp_config or DDPConfig(find_unused_parameters=True)
        self.epoch = 0
        """Epochs that the model has been trained for."""
        self._device = checked_device(device)
        self._last_history = TrainingHistory()
        self._last_config = DistributedTrainingConfig()
        Loss(loss_fn)  # refuses what is no loss, here and now

    def fit(self, *data: Any, **keywords: Any) -> TrainingHistory:
        """Trains: `fit(X, y, config)`, `fit(X, y, X_val, y_val, config)`, with Keras's keywords over the config.

        Every rank gives the same whole data, and sees its part. Fitting again goes on: the epochs count on.

        Args:
            *data: NumPy arrays or tensors with a row per sample; then a `DistributedTrainingConfig`, or none.
            **keywords: Fields of `DistributedTrainingConfig`, and `validation_data=(X_val, y_val)`.

        Returns:
            The numbers of each epoch, the same on every rank.

        Raises:
            ConfigError: The input is wrong, on any rank; nothing has started.
            PeerLostError, CollectiveMismatchError, CollectiveTimeoutError: Another rank is gone, or does
                something else.
            CheckpointError: A checkpoint could not be written.
        """
        _join_world()
        run, everyone = agree_on(lambda: self._plan(data, keywords))
        if any(other["_nan"] for other in everyone):
            warnings.warn("X or y holds NaN: the loss will be NaN too. Fill or drop those rows first.", stacklevel=2)
        ddp = DistributedDataParallel(self.model, self.ddp_config)
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(modes_kept(self.model))
            stack.enter_context(torch.enable_grad())
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.suspended())
            try:
                run.display.header(self._header(run))
                for _ in range(run.config.epochs):
                    self._fit_epoch(run, ddp, began)
            finally:
                run.display.close()
                ddp.close()
                self.model.zero_grad()
        return run.history

    def _fit_epoch(self, run: Run, ddp: DistributedDataParallel, began: float) -> None:
        """Trains for one epoch, validates, records, saves."""
        last_epoch = self.epoch + run.config.epochs - len(run.history.epochs)
        run.display.begin_epoch(self.epoch + 1, last_epoch, run.batches.num_batches)
        loss, accuracy, seconds = self._train_epoch(run, ddp)
        self.epoch += 1
        ddp.sync_buffers()
        validation = None if run.validation is None else self._evaluate(run.validation, distributed=True)
        self._record(run, loss, accuracy, validation, (seconds, time.perf_counter() - began))
        self._save_epoch(run)

    def _train_epoch(self, run: Run, ddp: DistributedDataParallel) -> tuple[float, float, float]:
        """Takes the steps of one epoch; returns (loss, accuracy, seconds), the first two over all ranks."""
        began = time.perf_counter()
        loss, placement = run.data.loss, run.data.placement
        step = TrainingStep(ddp, loss, self.optimizer, placement.device)
        every = run.config.log_every_n_batches
        group = runtime.cpu_group()

        def after(batch: Batch) -> None:
            run.display.step(batch.joined_rows, lambda: loss_and_accuracy(step.totals.here(), loss.weighting))
            if every and (batch.number + 1) % every == 0:
                text = numbers(*loss_and_accuracy(step.totals.over_ranks(group), loss.weighting))
                run.display.line(f"batch {batch.number + 1}/{run.batches.num_batches}  {text}")

        ddp.train()
        # Epochs count from 1 for people; the order of samples is that of number 0 first.
        try:
            run_epoch(training_batches(run.data.source, run.batches, placement, self.epoch), step, after)
        except BaseException as error:
            runtime.tell(error)  # in the middle of a step the others would wait for this rank
            raise
        sums = step.totals.over_ranks(group)
        return *loss_and_accuracy(sums, loss.weighting), time.perf_counter() - began

    def _record(
        self,
        run: Run,
        loss: float,
        accuracy: float,
        validation: Evaluation | None,
        seconds: tuple[float, float],
    ) -> None:
        """Adds an epoch to the history. Times are rank 0's: the history is the same on every rank."""
        times = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        dist.broadcast(times, 0, group=runtime.cpu_group())
        epoch_seconds, total_seconds = times.tolist()
        history = run.history
        history.epochs.append(self.epoch)
        history.train_losses.append(loss)
        text = numbers(loss, accuracy)
        if not np.isnan(accuracy):
            history.train_accuracies.append(accuracy)
        if validation is not None:
            history.val_losses.append(validation.loss)
            if not np.isnan(validation.accuracy):
                history.val_accuracies.append(validation.accuracy)
            text += f"  {numbers(validation.loss, validation.accuracy, 'val_')}"
        run.training_seconds += epoch_seconds
        history.total_time_seconds = total_seconds
        history.samples_per_second = len(run.data) * len(history.epochs) / run.training_seconds
        run.display.end_epoch(f"{text}  {len(run.data) / epoch_seconds:,.0f} samples/s")

    def _save_epoch(self, run: Run) -> None:
        """Writes a checkpoint where the config asks for one; what goes wrong is raised on every rank."""
        self._last_history, self._last_config = run.history, run.config
        every = run.config.checkpoint_every_n_epochs
        if not every or self.epoch % every:
            return
        own = None if run.config.save_on_master_only else runtime.get_rank()
        problem = None
        if own is not None or runtime.is_master():
            try:
                write_checkpoint(checkpoint_path(run.config.checkpoint_dir, self.epoch, own), self._snapshot())
            except Exception as error:
                problem = error
        raise_together(problem)

    def evaluate(
        self,
        X: Any,  # noqa: N803
        y: Any = None,
        *,
        batch_size: int | None = None,
        distributed: bool = True,
    ) -> Evaluation:
        """Returns loss and accuracy over all rows, each counted once; the same on every rank and any number of ranks.

        Args:
            X: Rows, shape (n, ...).
            y: Targets, shape (n, ...).
            batch_size: Rows at once; None: as in the last fit.
            distributed: Share the work with the other ranks, which must call it too. False: this rank alone.

        Raises:
            ConfigError: The input is wrong.
        """
        _join_world()
        return self._evaluate(self._rows(X, y, batch_size, distributed=distributed), distributed=distributed)

    def _evaluate(self, rows: Rows, *, distributed: bool) -> Evaluation:
        step = EvaluationStep(self.model, rows.loss, -(-len(rows) // rows.batch_size), rows.placement.device)
        self._run_whole_batches(rows, step, distributed=distributed)
        sums = step.totals.over_ranks(runtime.cpu_group()) if distributed else step.totals.here()
        value, accuracy = loss_and_accuracy(sums, rows.loss.weighting)
        return Evaluation(loss=value, accuracy=accuracy)

    def predict(self, X: Any, *, batch_size: int | None = None, distributed: bool = True) -> Any:  # noqa: N803
        """Returns the model's output for all rows, in their order, on every rank.

        Args:
            X: Rows, shape (n, ...).
            batch_size: Rows at once; None: as in the last fit.
            distributed: Share the work with the other ranks, which must call it too. False: this rank alone.

        Returns:
            Shape (n, ...), a NumPy array where X is one, else a tensor on the CPU.

        Raises:
            ConfigError: The input is wrong, or the model does not return one tensor with a row per row.
        """
        _join_world()
        rows = self._rows(X, None, batch_size, distributed=distributed, predicting=True)
        step = PredictionStep(self.model)
        self._run_whole_batches(rows, step, distributed=distributed)
        output = self._gathered(rows, step) if distributed else torch.cat(step.outputs)
        if not rows.source.is_numpy:
            return output
        return (output.float() if output.dtype is torch.bfloat16 else output).numpy()  # NumPy has no bfloat16

    def _gathered(self, rows: Rows, step: PredictionStep) -> Tensor:
        """Returns the outputs of all ranks, in the order of the rows."""
        world_size = runtime.get_world_size()
        shares = [share_of_batches(len(rows), rows.batch_size, rank, world_size) for rank in range(world_size)]
        return gather_rows(
            step.outputs, [[min(batch * rows.batch_size, len(rows)) for batch in share] for share in shares]
        )

    def _rows(
        self, inputs: Any, targets: Any, batch_size: int | None, *, distributed: bool, predicting: bool = False
    ) -> Rows:
        """Returns rows for the model, agreed over ranks where they share the work."""

        def plan() -> tuple[Rows, dict[str, Any]]:
            source = ArraySource(inputs, targets)
            at_once = self._last_config.batch_size if batch_size is None else batch_size
            return plan_rows(source, at_once, self.model, self.loss_fn, self._device, predicting=predicting)

        return agree_on(plan)[0] if distributed else plan()[0]

    def _run_whole_batches(self, rows: Rows, step: Step, *, distributed: bool) -> None:
        """Takes a step with each of this rank's batches, in evaluation mode; a rank that fails tells the others."""
        rank, world_size = (runtime.get_rank(), runtime.get_world_size()) if distributed else (0, 1)
        problem = None
        try:
            with modes_kept(self.model):
                self.model.eval()
                run_epoch(whole_batches(rows.source, rows.batch_size, rows.placement, rank, world_size), step)
        except Exception as error:
            problem = error
        if distributed:
            raise_together(problem)
        elif problem is not None:
            raise problem

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes model, optimizer, epoch and history as one file. Rank 0 writes; the others return at once.

        Raises:
            CheckpointError: It could not be written; what was there before is still there.
        """
        _join_world()
        if runtime.is_master():
            write_checkpoint(path, self._snapshot())

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Goes back to a checkpoint. All ranks call it; rank 0 reads, the others receive.

        Raises:
            CheckpointError: There is none, it is damaged, or it belongs to another model or optimizer.
        """
        _join_world()
        state = read_on_all(path)
        self.epoch = restore(self.model, self.optimizer, state, f"checkpoint {path}")
        self._last_history = TrainingHistory.from_dict(state.history)

    def is_master(self) -> bool:
        """Returns whether this is rank 0; also before the world is joined, alone."""
        _join_world()
        return runtime.is_master()

    def get_rank(self) -> int:
        """Returns this rank."""
        _join_world()
        return runtime.get_rank()

    def get_world_size(self) -> int:
        """Returns how many ranks there are."""
        _join_world()
        return runtime.get_world_size()

    def _plan(self, data: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
        """Returns what this rank is asked to do, and what must be the same on every rank."""
        arguments = parse_fit(data, dict(keywords))
        run, facts = plan_fit(arguments, self.model, self.loss_fn, self.optimizer, self._device)
        own = {f"ddp_config.{name}": value for name, value in dataclasses.asdict(self.ddp_config).items()}
        if not self.ddp_config.broadcast_parameters:
            own |= value_facts(self.model)
        return run, {**facts, **own, "the number of epochs trained before": self.epoch}

    def _header(self, run: Run) -> list[tuple[str, str]]:
        rows = len(run.data), 0 if run.validation is None else len(run.validation)
        steps, device = run.batches.num_batches, run.data.placement.device
        return explain(run.config, self.model, run.data.loss, device, rows, steps, self.epoch + 1)

    def _snapshot(self) -> Any:
        history, config = self._last_history.to_dict(), dataclasses.asdict(self._last_config)
        return snapshot(self.model, self.optimizer, self.epoch, history, config, runtime.get_world_size())


def run_epoch(batches: Iterable[Batch], step: Step, after: Callable[[Batch], None] | None = None) -> None:
    """Takes a step with each batch, in training and in evaluation alike."""
    for batch in batches:
        step(batch)
        if after is not None:
            after(batch)


def unwrap(model: nn.Module) -> tuple[list[DistributedDataParallel], nn.Module]:
    """Returns (wrappers of ours, the module inside them or PyTorch's)."""
    wrappers = []
    while isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        if isinstance(model, DistributedDataParallel):
            wrappers.append(model)
        model = model.module
    return wrappers, model


def _join_world() -> None:
    """Joins from the environment where nobody has: training is never silently unsynchronised."""
    if not runtime.is_initialized():
        runtime.init()
