"""One call of `fit`, `evaluate` or `predict`, after everything that could be refused has been looked at.

A plan is made on each rank by itself, and changes nothing; then the ranks agree (`agreement.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cyxtrain import runtime
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.iterator import DistributedBatchIterator
from cyxtrain.data.moving import Placement
from cyxtrain.data.sampler import DistributedSampler
from cyxtrain.data.source import ArraySource
from cyxtrain.data.split import validation_rows
from cyxtrain.data.weights import class_weights
from cyxtrain.errors import ConfigError, warn
from cyxtrain.settings import require_integer, unknown_name
from cyxtrain.training.arguments import FitArguments
from cyxtrain.training.callbacks import Callbacks
from cyxtrain.training.calling import ModelCall
from cyxtrain.training.checks import (
    check_batch_norm,
    check_model,
    check_optimizer,
    check_precision,
    check_targets,
    probe,
)
from cyxtrain.training.compiling import check_compiler
from cyxtrain.training.display import Display, make_display
from cyxtrain.training.facts import config_facts, model_facts, optimizer_facts, value_facts
from cyxtrain.training.loss import Loss
from cyxtrain.training.metrics import Metrics
from cyxtrain.training.optimizers import can_fuse
from cyxtrain.training.precision import Precision
from cyxtrain.training.state import Position, TrainingState

LossLike = nn.Module | Callable[..., Any] | str | None


@dataclass
class Rows:
    """Rows for the model, and how they come to it.

    Attributes:
        source: The rows.
        batch_size: Rows at once, outside training.
        placement: Of batches.
        loss: For these rows.
        call: How the model is called.
        metrics: What is measured beside loss and accuracy.
    """

    source: ArraySource
    batch_size: int
    placement: Placement
    loss: Loss
    call: ModelCall
    metrics: Metrics

    def __len__(self) -> int:
        return len(self.source)


@dataclass
class Run:
    """One call of `fit`.

    `fuses`: whether the optimizer steps by the fused kernel; `initial_epoch`: epochs that count as complete, or None:
    those that the trainer has seen; `ends_on_nan`: whether a callback on any rank wants a loss that is not finite to
    end the fit in good order.
    """

    config: DistributedTrainingConfig
    data: Rows
    validation: Rows | None
    batches: DistributedBatchIterator
    display: Display
    resume: str | None
    callbacks: Callbacks
    fuses: bool
    initial_epoch: int | None = None
    ends_on_nan: bool = False
    training_seconds: float = 0.0
    training_rows: int = 0

    def params(self, last_epoch: int) -> dict[str, Any]:
        """Returns what callbacks are told.

        Args:
            last_epoch: Counted from 1.
        """
        return {
            "epochs": last_epoch,
            "steps": self.steps_per_epoch,
            "samples_per_step": self.batches.effective_batch_size,
            "warmup_steps": self.config.warmup_steps,
            "verbose": self.config.verbose,
            "validation": self.validation is not None,
            "metrics": self.measured,
            "larger_is_better": self.larger_is_better,
        }

    @property
    def measured(self) -> list[str]:
        """Names of what an epoch may have in the history."""
        names = ["loss", "accuracy", *self.data.metrics.names]
        return names + [f"val_{name}" for name in names if self.validation is not None]

    @property
    def larger_is_better(self) -> dict[str, bool]:
        """Whether a number of the history shall grow, by its name without val_; of those of which it is known."""
        return {"loss": False, "accuracy": True, **self.data.metrics.larger_is_better}

    @property
    def rows_at_once(self) -> int:
        """Rows of a micro-batch."""
        most = -(-self.batches.effective_batch_size // self.batches.sampler.world_size)
        return -(-most // self.config.accumulation_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        most = self.batches.num_batches
        return min(int(self.config.fast_dev_run) or most, self.config.steps_per_epoch or most)

    def check_steps(self) -> None:
        """Refuses longer epochs than there are rows for.

        Raises:
            ConfigError: With how many steps there are.
        """
        if (self.config.steps_per_epoch or 0) > self.batches.num_batches:
            raise ConfigError(
                f"steps_per_epoch={self.config.steps_per_epoch:,}, and X has rows for {self.batches.num_batches:,} "
                f"steps of {self.batches.effective_batch_size:,}: give fewer steps, or more epochs."
            )

    @property
    def rows_per_epoch(self) -> int:
        """Rows that an epoch trains on, over all ranks."""
        return min(len(self.data), self.steps_per_epoch * self.batches.effective_batch_size)

    @property
    def all_steps(self) -> int:
        """Steps of the whole fit."""
        return self.config.epochs * self.steps_per_epoch

    def steps_done(self, position: Position) -> int:
        """Returns how many steps of the running epoch have been taken."""
        return -(-position.samples // self.batches.effective_batch_size)  # only the last one may be smaller

    def steps_left(self, position: Position) -> int:
        """Returns how many steps there are to the end of the last epoch, or to where a callback has ended the fit."""
        if self.is_over(position):
            return 0
        epochs = position.first_epoch + self.config.epochs - position.epoch
        return epochs * self.steps_per_epoch - self.steps_done(position)

    def is_over(self, position: Position) -> bool:
        """Returns whether the last epoch is complete, or the one after which a callback has ended the fit."""
        last = position.first_epoch + self.config.epochs
        return position.epoch >= last or (position.stopped > 0 and position.samples == 0)

    def digests(self) -> dict[str, str]:
        """Returns how a checkpoint knows the data: their digests by what they are for, "" where there are none."""
        validation = "" if self.validation is None else self.validation.source.digest()
        return {"data": self.data.source.digest(), "validation": validation}

    def go_on(self, state: TrainingState) -> None:
        """Takes over what a checkpoint decides: samples per step over all ranks, and what the numbers began with."""
        effective = state.position.effective_batch_size
        sampler, batch_size = self.batches.sampler, self.batches.batch_size
        self.batches = DistributedBatchIterator(sampler, batch_size, effective_batch_size=effective)
        history = state.history
        if history.samples_per_second:
            self.training_rows = self.rows_per_epoch * len(history.epochs)
            self.training_seconds = self.training_rows / history.samples_per_second


def plan_fit(
    arguments: FitArguments,
    model: nn.Module,
    loss_fn: LossLike,
    optimizer: torch.optim.Optimizer,
    device: str | torch.device,
    metrics: Mapping[str, Any],
) -> tuple[Run, dict[str, Any]]:
    """Returns what this rank is asked to do, and what must be the same on every rank.

    Raises:
        ConfigError: What cannot work.
    """
    config = arguments.config
    check_model(model)
    check_optimizer(optimizer)
    check_precision(model, config.precision)
    rank, world_size, callbacks = runtime.get_rank(), runtime.get_world_size(), Callbacks(arguments.callbacks)
    source, validation_source = _split(arguments, loss_fn)
    data = _tried(source, config.batch_size, config, model, loss_fn, device, metrics)
    validation = None
    if validation_source is not None:
        with _validation():
            validation = _tried(validation_source, config.batch_size, config, model, loss_fn, device, metrics)
    batches = _batches(len(source), config, rank, world_size)
    facts = {
        **_facts(arguments, source, validation_source),
        **model_facts(model, data.loss),
        **optimizer_facts(optimizer, model),
        "the metrics": data.metrics.names,
        "_ends_on_nan": callbacks.end_on_nonfinite,
    }
    display = make_display(config.verbose and rank == 0)
    check_batch_norm(model, data.placement.device, wanted=config.sync_batchnorm)
    if config.compile:
        check_compiler(data.placement.device)
    fuses, resume, first = can_fuse(optimizer, config.fused_optimizer), arguments.resume, arguments.initial_epoch
    run = Run(config, data, validation, batches, display, resume, callbacks, fuses, first)
    _check_best(run)
    return run, facts


def _facts(arguments: FitArguments, source: ArraySource, validation: ArraySource | None) -> dict[str, Any]:
    """Returns what of the arguments and the data must be the same on every rank, and what in the data is not finite."""
    rank, world_size = runtime.get_rank(), runtime.get_world_size()
    return {
        **config_facts(arguments.config),
        **source.facts("training"),
        **({} if validation is None else validation.facts("validation")),
        "resume": arguments.resume,
        "initial_epoch": arguments.initial_epoch,
        "_data": source.not_finite(rank, world_size),
        "_validation": ("", 0) if validation is None else validation.not_finite(rank, world_size),
    }


def _check_best(run: Run) -> None:
    best = run.config.keep_best
    if best is None:
        return
    if best in run.measured:
        if best.removeprefix("val_") not in run.larger_is_better:
            raise ConfigError(
                f"keep_best={best!r}: nobody has said whether more of it is better. Say so, as in "
                "my_function.higher_is_better = True."
            )
        return
    if best.removeprefix("val_") in run.measured:
        raise ConfigError(f"keep_best={best!r} needs validation data: give some, or keep the best loss.")
    raise unknown_name("this fit", best, run.measured, "number in its history that is named")


def _batches(rows: int, config: DistributedTrainingConfig, rank: int, world_size: int) -> DistributedBatchIterator:
    """Returns the batches of an epoch."""
    sampler = DistributedSampler(rows, config.shuffle, config.seed, rank=rank, world_size=world_size, pad=False)
    per_rank = config.batch_size * config.accumulation_steps
    return DistributedBatchIterator(sampler, per_rank, effective_batch_size=config.effective_batch_size)


def warn_of_data(everyone: Sequence[dict[str, Any]]) -> None:
    """Says on rank 0 what in the data is not finite.

    Args:
        everyone: The facts of all ranks, by rank.
    """
    follows = {
        "_data": "Where the loss becomes NaN by it, on_nonfinite says what happens.",
        "_validation": "val_loss may become NaN by it, and then no epoch is better than another.",
    }
    for name, what in follows.items():
        found = [facts[name] for facts in everyone if facts[name][1]]
        if found and runtime.is_master():
            where, count = found[0][0], sum(rows for _, rows in found)
            more = f", the first of {count:,} such rows" if count > 1 else ""
            prefix = "validation data: " if name == "_validation" else ""
            warn(f"{prefix}{where}{more}. {what} Better fill or drop such rows first.")


def plan_rows(
    source: ArraySource,
    batch_size: int | None,
    model: nn.Module,
    loss_fn: LossLike,
    device: str | torch.device,
    config: DistributedTrainingConfig,
    metrics: Mapping[str, Any],
    *,
    predicting: bool,
) -> tuple[Rows, dict[str, Any]]:
    """Returns rows to evaluate or to predict, and what must be the same on every rank that shares them.

    What is not given is as in the latest fit, whose config it is.

    Raises:
        ConfigError: The batch size is none, the loss has no targets, or the rows do not fit the model.
    """
    batch_size = config.batch_size if batch_size is None else batch_size
    require_integer("predict" if predicting else "evaluate", "batch_size", batch_size, 1)
    rows = _tried(source, batch_size, config, model, loss_fn, device, metrics, predicting=predicting)
    return rows, {"the batch size": batch_size, **source.facts("the given"), **value_facts(model)}


def place_model(model: nn.Module, loss: Loss, device: str | torch.device) -> Placement:
    """Puts model and loss on their device; returns where their batches go, and in which types."""
    parameters = list(model.parameters())
    chosen = parameters[0].device if parameters else torch.device("cpu")
    if device != "auto":
        chosen = torch.device(device)
    elif chosen.type != "cuda" and dist.get_backend() == "nccl":
        chosen = torch.device("cuda", torch.cuda.current_device())
    model.to(chosen)
    if isinstance(loss.function, nn.Module):
        loss.function.to(chosen)  # it may have class weights
    floats = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
    return Placement(chosen, next(floats, torch.get_default_dtype()), loss.prepare_target)


def _tried(
    source: ArraySource,
    batch_size: int,
    config: DistributedTrainingConfig,
    model: nn.Module,
    loss_fn: LossLike,
    device: str | torch.device,
    metrics: Mapping[str, Any],
    *,
    predicting: bool = False,
) -> Rows:
    """Returns rows that the model and the loss have been tried on."""
    loss = Loss(loss_fn)
    if not predicting:
        check_targets(source, loss)
    inputs, targets, weights = source.rows
    loss.look_at(targets, rows_have_weights=weights is not None)
    placement = place_model(model, loss, device)
    call = ModelCall(model, Precision(config.precision, placement.device), inputs, targets, loss)
    measures = probe(model, source, placement, loss, call, predicting=predicting, metrics=metrics)
    return Rows(source, batch_size, placement, loss, call, measures)


def _split(arguments: FitArguments, loss_fn: LossLike) -> tuple[ArraySource, ArraySource | None]:
    """Returns (training, validation): the last rows of the data where a fraction is asked for."""
    ignored = getattr(Loss(loss_fn).function, "ignore_index", None)
    source = ArraySource(arguments.inputs, arguments.targets, arguments.weights)
    fraction, validation = arguments.config.validation_split, None
    if arguments.validation is not None:
        with _validation():
            validation = ArraySource(*arguments.validation)
    elif fraction:
        first = validation_rows(len(source), fraction)
        source, validation = source.part(0, first), source.part(first, len(source))
    fast = int(arguments.config.fast_dev_run)
    if fast and validation is not None:
        validation = validation.part(0, min(len(validation), fast * arguments.config.batch_size))
    if arguments.class_weights is not None:  # they weigh training alone, as Keras's
        source = source.weighted(class_weights(source.targets, arguments.class_weights, ignored))
    return source, validation


@contextlib.contextmanager
def _validation() -> Iterator[None]:
    """Says of an error within that it is about the validation data."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"validation data: {error}") from error
