"""Keras's `fit` for any module, on as many ranks as there are.

fit -> one epoch after the other -> the steps of an epoch (`step.py`). Training and evaluation share `run_epoch`.
"""

from __future__ import annotations

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
from cyxtrain.data.batches import Batch, Placement, share_of_batches, training_batches, whole_batches
from cyxtrain.data.iterator import DistributedBatchIterator
from cyxtrain.data.sampler import DistributedSampler
from cyxtrain.data.source import ArraySource
from cyxtrain.data.split import validation_rows
from cyxtrain.errors import CheckpointError, ConfigError
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.training.agreement import agree
from cyxtrain.training.arguments import parse_fit
from cyxtrain.training.checkpoint import write_checkpoint
from cyxtrain.training.checks import check_model, check_optimizer, probe
from cyxtrain.training.display import Display, make_display, numbers
from cyxtrain.training.evaluation import Evaluation
from cyxtrain.training.header import explain
from cyxtrain.training.history import TrainingHistory
from cyxtrain.training.loss import Loss
from cyxtrain.training.optimizer_state import optimizer_state_by_name
from cyxtrain.training.optimizers import OptimizerLike, make_optimizer
from cyxtrain.training.prediction import gather_rows
from cyxtrain.training.snapshot import checkpoint_path, raise_on_all, read_on_all, restore, snapshot
from cyxtrain.training.step import EvaluationStep, PredictionStep, Step, TrainingStep
from cyxtrain.training.totals import loss_and_accuracy


@dataclasses.dataclass
class _Run:
    """One call of `fit`, after everything that could be refused has been looked at."""

    config: DistributedTrainingConfig
    data: ArraySource
    validation: ArraySource | None
    placement: Placement
    loss: Loss
    batches: DistributedBatchIterator
    display: Display
    history: TrainingHistory
    training_seconds: float = 0.0


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
        loss_fn: nn.Module | Callable[..., Any] | str | None = None,
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
        self.model = unwrap(model)
        self.loss_fn = loss_fn
        self.optimizer = make_optimizer(optimizer, self.model)
        self.ddp_config = ddp_config or DDPConfig(find_unused_parameters=True)
        self.epoch = 0
        """Epochs that the model has been trained for."""
        self._device = device
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
        run = self._prepare(data, keywords)
        modes = [(module, module.training) for module in self.model.modules()]
        ddp = DistributedDataParallel(self.model, self.ddp_config)
        began = time.perf_counter()
        try:
            run.display.header(self._header(run))
            for _ in range(run.config.epochs):
                self._fit_epoch(run, ddp, began)
        finally:
            run.display.close()
            ddp.close()
            self.optimizer.zero_grad()
            for module, mode in modes:
                module.training = mode
        return run.history

    def _fit_epoch(self, run: _Run, ddp: DistributedDataParallel, began: float) -> None:
        """Trains for one epoch, validates, records, saves."""
        self.epoch += 1
        last_epoch = self.epoch + run.config.epochs - len(run.history.epochs) - 1
        run.display.begin_epoch(self.epoch, last_epoch, run.batches.num_batches)
        loss, accuracy, seconds = self._train_epoch(run, ddp)
        validation = None
        if run.validation is not None:
            ddp.sync_buffers()
            validation = self._evaluate(run.validation, run.config.batch_size, distributed=True)
        self._record(run, loss, accuracy, validation, (seconds, time.perf_counter() - began))
        ddp.sync_buffers()
        self._save_epoch(run)

    def _train_epoch(self, run: _Run, ddp: DistributedDataParallel) -> tuple[float, float, float]:
        """Takes the steps of one epoch; returns (loss, accuracy, seconds), the first two over all ranks."""
        began = time.perf_counter()
        step = TrainingStep(ddp, run.loss, self.optimizer, run.placement.device)
        every = run.config.log_every_n_batches
        group = runtime.cpu_group()

        def after(batch: Batch) -> None:
            run.display.step(batch.joined_rows, lambda: loss_and_accuracy(step.totals.here(), run.loss.weighting))
            if every and (batch.number + 1) % every == 0:
                sums = step.totals.over_ranks(group)
                text = numbers(*loss_and_accuracy(sums, run.loss.weighting))
                run.display.line(f"batch {batch.number + 1}/{run.batches.num_batches}  {text}")

        ddp.train()
        # The first epoch is number 0 of the order of samples, whatever people call it.
        run_epoch(training_batches(run.data, run.batches, run.placement, self.epoch - 1), step, after)
        loss, accuracy = loss_and_accuracy(step.totals.over_ranks(group), run.loss.weighting)
        return loss, accuracy, time.perf_counter() - began

    def _record(
        self,
        run: _Run,
        loss: float,
        accuracy: float,
        validation: Evaluation | None,
        seconds: tuple[float, float],
    ) -> None:
        """Adds an epoch to the history. Times are rank 0's: the history is the same on every rank."""
        times = torch.tensor(seconds, dtype=torch.float64)
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

    def _save_epoch(self, run: _Run) -> None:
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
            except CheckpointError as error:
                problem = error
        raise_on_all(problem)

    def evaluate(
        self, X: Any, y: Any = None, *, batch_size: int | None = None, distributed: bool = True  # noqa: N803
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
        source, rows = self._prepare_rows(X, y, batch_size, distributed)
        return self._evaluate(source, rows, distributed=distributed)

    def _evaluate(self, source: ArraySource, batch_size: int, *, distributed: bool) -> Evaluation:
        loss = Loss(self.loss_fn)
        loss.look_at(source.targets)
        placement = self._placement(loss)
        rank, world_size = (runtime.get_rank(), runtime.get_world_size()) if distributed else (0, 1)
        if loss.function is not None and not loss.is_known:
            probe(self.model, source, placement, loss)
        batches = -(-len(source) // batch_size)
        step = EvaluationStep(self.model, loss, batches, placement.device)
        with _evaluating(self.model):
            run_epoch(whole_batches(source, batch_size, placement, rank, world_size), step)
        sums = step.totals.over_ranks(runtime.cpu_group()) if distributed else step.totals.here()
        value, accuracy = loss_and_accuracy(sums, loss.weighting)
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
        source, rows = self._prepare_rows(X, None, batch_size, distributed)
        placement = self._placement(Loss(self.loss_fn))
        rank, world_size = (runtime.get_rank(), runtime.get_world_size()) if distributed else (0, 1)
        step = PredictionStep(self.model)
        with _evaluating(self.model):
            for batch in whole_batches(source, rows, placement, rank, world_size):
                step(batch)
        spans = [
            [min(batch * rows, len(source)) for batch in share_of_batches(len(source), rows, other, world_size)]
            for other in range(world_size)
        ]
        output = gather_rows(step.outputs, step.other, spans, distributed=distributed)
        return output.numpy() if source.is_numpy else output

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

    def _prepare(self, data: tuple[Any, ...], keywords: dict[str, Any]) -> _Run:
        """Refuses, on every rank alike, what cannot work; nothing has changed when it raises."""
        run, facts, problem = None, {}, None
        try:
            run, facts = self._plan(data, keywords)
        except ConfigError as error:
            problem = error
        everyone = agree(facts, problem)
        assert run is not None
        if any(other["_nan"] for other in everyone):
            warnings.warn("X holds NaN: the loss will be NaN too. Fill or drop those rows first.", stacklevel=3)
        return run

    def _plan(self, data: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[_Run, dict[str, Any]]:
        """Returns what this rank is asked to do, and what must be the same on every rank."""
        arguments = parse_fit(data, dict(keywords))
        config = arguments.config
        check_model(self.model)
        check_optimizer(self.optimizer)
        source, validation = _split(ArraySource(arguments.inputs, arguments.targets), arguments.validation, config)
        loss = Loss(self.loss_fn)
        loss.look_at(source.targets)
        placement = self._placement(loss)
        probe(self.model, source, placement, loss)
        rank, world_size = runtime.get_rank(), runtime.get_world_size()
        sampler = DistributedSampler(
            len(source), config.shuffle, config.seed, rank=rank, world_size=world_size, pad=False
        )
        batches = DistributedBatchIterator(
            sampler, config.batch_size, effective_batch_size=config.effective_batch_size
        )
        history = TrainingHistory(effective_batch_size=batches.effective_batch_size, world_size=world_size)
        display = make_display(config.verbose and rank == 0)
        facts = {
            "config": dataclasses.asdict(config),
            **source.facts("training"),
            **({} if validation is None else validation.facts("validation")),
            "optimizer": type(self.optimizer).__name__,
            "optimizer settings": repr(optimizer_state_by_name(self.optimizer, self.model)[1]),
            "epochs trained before": self.epoch,
            "_nan": source.has_nan(rank, world_size),
        }
        return _Run(config, source, validation, placement, loss, batches, display, history), facts

    def _prepare_rows(
        self, inputs: Any, targets: Any, batch_size: int | None, distributed: bool
    ) -> tuple[ArraySource, int]:
        """Returns rows and batch size, agreed over ranks where they share the work."""
        source, facts, problem = None, {}, None
        rows = self._last_config.batch_size if batch_size is None else batch_size
        try:
            dataclasses.replace(self._last_config, batch_size=rows).validate()
            source = ArraySource(inputs, targets)
            facts = {"batch size": rows, **source.facts("the given")}
        except ConfigError as error:
            problem = error
        if distributed:
            agree(facts, problem)
        elif problem is not None:
            raise problem
        assert source is not None
        return source, rows

    def _placement(self, loss: Loss) -> Placement:
        """Puts the model on its device; returns where its batches go."""
        parameters = list(self.model.parameters())
        device = parameters[0].device if parameters else torch.device("cpu")
        if self._device != "auto":
            device = torch.device(self._device)
        elif device.type != "cuda" and dist.get_backend() == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        self.model.to(device)
        floats = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
        return Placement(device, next(floats, torch.get_default_dtype()), loss.prepare_target)

    def _header(self, run: _Run) -> list[tuple[str, str]]:
        rows = len(run.data), 0 if run.validation is None else len(run.validation)
        steps = run.batches.num_batches
        return explain(run.config, self.model, run.loss, run.placement.device, rows, steps, self.epoch + 1)

    def _snapshot(self) -> Any:
        history, config = self._last_history.to_dict(), dataclasses.asdict(self._last_config)
        return snapshot(self.model, self.optimizer, self.epoch, history, config, runtime.get_world_size())


def run_epoch(batches: Iterable[Batch], step: Step, after: Callable[[Batch], None] | None = None) -> None:
    """Takes a step with each batch, in training and in evaluation alike."""
    for batch in batches:
        step(batch)
        if after is not None:
            after(batch)


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the module inside our wrapper or PyTorch's."""
    while isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


class _evaluating:  # noqa: N801 - reads as a verb: with _evaluating(model)
    """Evaluation mode within; every module gets its own mode back."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._model = model

    def __enter__(self) -> None:
        self._model.eval()

    def __exit__(self, *_: object) -> None:
        for module, mode in self._modes:
            module.training = mode


def _split(
    source: ArraySource, validation: tuple[Any, Any] | None, config: DistributedTrainingConfig
) -> tuple[ArraySource, ArraySource | None]:
    """Returns (training, validation): the last rows of the data where a fraction is asked for."""
    if validation is not None:
        return source, ArraySource(*validation)
    if not config.validation_split:
        return source, None
    first = validation_rows(len(source), config.validation_split)
    return source.part(0, first), source.part(first, len(source))


def _join_world() -> None:
    """Joins from the environment where nobody has: training is never silently unsynchronised."""
    if not runtime.is_initialized():
        runtime.init()
