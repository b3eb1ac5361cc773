"""What a call of `fit` does, after all checks.

Each rank makes a plan, which changes nothing; then the ranks agree.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import nearest
from cyxtrain.data.batches.batch import Share
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.feed import Feed, Place
from cyxtrain.data.sources.source import Source
from cyxtrain.environment import accelerator, process_env
from cyxtrain.errors import ConfigError, warn
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.learning_rates import LearningRates
from cyxtrain.optim.optimizers import can_fuse
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.progress.display import Display, make_display
from cyxtrain.training.inputs.arguments import FitArguments
from cyxtrain.training.inputs.checked_data import CheckedData, TrainerArguments, check_data
from cyxtrain.training.inputs.checks import check_trained
from cyxtrain.training.inputs.facts import model_facts, optimizer_facts
from cyxtrain.training.inputs.training_data import Sources, naming_validation
from cyxtrain.training.model.compile import compiles_by_layer
from cyxtrain.training.model.own_steps import accumulation_excludes
from cyxtrain.training.model.placement import (
    check_batch_norm,
    check_devices,
    device_facts,
    explain_device,
)
from cyxtrain.training.state import Position
from cyxtrain.training.trained import trained_with
from cyxtrain.world import runtime


@dataclass(frozen=True)
class FitPlan:
    """One call of `fit` that passed all checks.

    Attributes:
        fused_optimizers: Names of the optimizers that use PyTorch's fused kernels.
        compiles_layers: Whether layers are compiled one by one, and not the model as a whole.
        initial_epoch: Epochs that count as completed; None: those of the trainer.
        ends_on_nan: Whether a callback on any rank ends the fit if a number is not finite.
        defers_verdicts: Whether all ranks compute on accelerators, and the host need not wait for a step.
        attempt: How often a launcher has restarted the ranks, at most.
        devices: Those in use and those visible, in words.
    """

    config: DistributedTrainingConfig
    data: CheckedData
    validation: CheckedData | None
    feed: Feed
    display: Display
    resume: str | None
    callbacks: Callbacks
    fused_optimizers: tuple[str, ...]
    compiles_layers: bool
    initial_epoch: int | None = None
    ends_on_nan: bool = False
    defers_verdicts: bool = False
    attempt: int = 0
    devices: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Type in which matrices are multiplied."""
        return self.data.call.precision.dtype or self.data.placement.dtype

    def merged_with(self, facts_by_rank: Sequence[dict[str, Any]]) -> FitPlan:
        """Return the plan with the facts of all ranks; refuse ranks that share a GPU over NCCL. All ranks call it."""
        check_devices(facts_by_rank, self.data.placement.device)
        return replace(
            self,
            ends_on_nan=any(facts["_ends_on_nan"] for facts in facts_by_rank),
            defers_verdicts=all(facts["_is_on_accelerator"] for facts in facts_by_rank),
            attempt=max(facts["_attempt"] for facts in facts_by_rank),
            devices=explain_device(self.data.placement.device, facts_by_rank),
        )

    def params(self, last_epoch: int) -> dict[str, Any]:
        """Return what callbacks are given with `set_params`; `last_epoch` counts from 1."""
        return {
            "epochs": last_epoch,
            "steps": self.steps_per_epoch,
            "samples_per_step": self.feed.effective_batch_size,
            "warmup_steps": self.warmup_steps,
            "verbose": self.config.verbose,
            "validation": self.validation is not None,
            "metrics": self.measured,
            "larger_is_better": self.larger_is_better,
        }

    @property
    def measured(self) -> list[str]:
        """Names of what an epoch may have in the history."""
        validated = [] if self.validation is None else self.validation.measured
        return self.data.measured + [f"val_{name}" for name in validated]

    @property
    def larger_is_better(self) -> dict[str, bool]:
        """Which numbers of the history are better if larger, by name without val_; unknown ones are left out."""
        losses = dict.fromkeys(["loss", *self.data.loss.weightings], False)
        return {**losses, "accuracy": True, **self.data.metrics.larger_is_better}

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch, at most; None: unknown until its batches end."""
        return steps_per_epoch(self.config, self.feed)

    @property
    def all_steps(self) -> int | None:
        """Steps of the whole fit; None: unknown."""
        return None if self.steps_per_epoch is None else self.config.epochs * self.steps_per_epoch

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up; raises ConfigError for a fraction of a fit of unknown length."""
        asked = self.config.warmup_steps
        if asked and asked < 1 and self.all_steps is None:
            raise ConfigError(
                f"warmup_steps={asked} is a fraction of the fit, and the number of batches is unknown: "
                "set steps_per_epoch, or give a number of steps."
            )
        return round(asked * (self.all_steps or 0)) if asked < 1 else int(asked)

    def scheduled(self, rates: LearningRates) -> int | None:
        """Return how often the fit, from its beginning, steps a schedule; None: unknown."""
        return self.schedule_steps(self.warmup_steps if rates.warms_up_first else 0)

    def schedule_steps(self, warmup_steps: int, position: Position | None = None) -> int | None:
        """Return how often the fit steps its schedule; None: unknown.

        Args:
            warmup_steps: Of the warm-up that are still to be taken; the schedule waits for it.
            position: Of the fit; None: it begins.
        """
        epochs, done, steps = self.config.epochs, 0, self.steps_per_epoch
        if position is not None:
            epochs, done = position.first_epoch + epochs - position.epoch, position.epoch_steps
        if self.config.scheduler_interval == "epoch":
            late = 0 if steps is None else max(0, warmup_steps - (steps - done))
            return max(0, epochs - -(-late // (steps or 1)))
        return None if steps is None else max(0, epochs * steps - done - warmup_steps)

    def shares(self, position: Position) -> Generator[Share]:
        """Yield this rank's shares of the rest of the epoch."""
        yield from self.feed.shares(place_of(position), self.data.placement, requested_steps(self.config))

    def is_over(self, position: Position) -> bool:
        """Return whether the last epoch is complete, or the one after which a callback ends the fit."""
        last = position.first_epoch + self.config.epochs
        return position.epoch >= last or (position.stopped > 0 and position.samples == 0)

    def digests(self) -> dict[str, str]:
        """Return the digests by which a checkpoint recognizes the data; "" for data that are not given."""
        validation = "" if self.validation is None else self.validation.source.digest()
        return {"data": self.data.source.digest(), "validation": validation}


def requested_steps(config: DistributedTrainingConfig) -> int | None:
    """Return the limit of steps of an epoch that the config sets."""
    return min(filter(None, (int(config.fast_dev_run), config.steps_per_epoch)), default=None)


def steps_per_epoch(config: DistributedTrainingConfig, feed: Feed) -> int | None:
    """Return how many optimizer steps an epoch has, at most; None: unknown until its batches end."""
    if config.steps_per_epoch is not None:
        return requested_steps(config)  # the data are gone through again when they are over
    limits = (requested_steps(config), feed.steps_per_epoch)
    return min((limit for limit in limits if limit is not None), default=None)


def place_of(position: Position) -> Place:
    """Return where in the data training is."""
    read = (position.passes, position.batches, position.order)
    return Place(position.epoch, position.epoch_steps, position.samples, *read)


def plan_fit(
    arguments: FitArguments, trainer: TrainerArguments, opened: Sources, epoch: int
) -> tuple[FitPlan, dict[str, Any]]:
    """Return this rank's plan, and what must be the same on every rank; `epoch`: where it is likely to begin."""
    config, model, optimizers = arguments.config, trainer.model, trainer.optimizers
    trained = trained_with(model, Loss(trainer.loss_fn))
    check_trained(trained, optimizers, config)
    rank, world_size, callbacks = runtime.get_rank(), runtime.get_world_size(), Callbacks(arguments.callbacks)
    source, validation_source = opened
    feed = source.feed(config, rank, world_size)
    data = check_data(source, config.batch_size, config, trainer, trains_on=_first_rows(source, feed, epoch))
    if data.call.alone and feed.micro_batches > 1:
        raise ConfigError(accumulation_excludes(data.call.alone))
    validation = None
    if validation_source is not None:
        with naming_validation("validation"):
            size = validation_source.batch_size or config.validation_batch_size or config.batch_size
            validation = check_data(validation_source, size, config, trainer)
    facts = {
        **_facts(arguments, source, validation_source, trained, data.placement.device),
        **model_facts(trained, data.loss),
        **optimizer_facts(optimizers, trained),
        "the metrics": data.metrics.names,
        "the callbacks that every rank must have": callbacks.on_all_ranks,
        "_ends_on_nan": callbacks.end_on_nonfinite,
        "_attempt": process_env.launched_run()[1],
    }
    display = make_display(config.verbose and rank == 0)
    check_batch_norm(model, data.placement.device, wanted=config.sync_batchnorm)
    sparse = makes_sparse_gradients(model)
    fused = tuple(name for name, each in optimizers.items() if can_fuse(each, config.fused_optimizer, sparse))
    ways = (fused, compiles_by_layer(model, config.compile, data.placement.device, world_size))
    plan = FitPlan(config, data, validation, feed, display, arguments.resume, callbacks, *ways, arguments.initial_epoch)
    _check_best(plan)
    return plan, facts


def _is_on_accelerator(trained: nn.Module) -> bool:
    """Return whether all parameters are on one accelerator of the kind that "auto" takes."""
    devices, kind = {parameter.device for parameter in trained.parameters()}, accelerator.visible()
    return kind is not None and len(devices) == 1 and next(iter(devices)).type == kind.type


def _first_rows(source: Source, feed: Feed, epoch: int) -> Rows:
    """Return rank 0's first micro-batch of an epoch; this rank's, if each has its own rows."""
    first = feed.first_rows(epoch)
    return source.first(feed.rows_at_once) if first is None else first


def _facts(
    arguments: FitArguments, source: Source, validation: Source | None, trained: nn.Module, device: torch.device
) -> dict[str, Any]:
    """Return what must be the same on every rank, and what in the data is not finite."""
    rank, world_size = runtime.get_rank(), runtime.get_world_size()
    return {
        **device_facts(device),
        **source.facts("training"),
        **({} if validation is None else validation.facts("validation")),
        "resume": arguments.resume,
        "initial_epoch": arguments.initial_epoch,
        "_data": source.not_finite(rank, world_size),
        "_validation": ("", 0) if validation is None else validation.not_finite(rank, world_size),
        "_is_on_accelerator": _is_on_accelerator(trained),
    }


def _check_best(plan: FitPlan) -> None:
    best = plan.config.keep_best
    if best is None:
        return
    if best in plan.measured:
        if best.removeprefix("val_") not in plan.larger_is_better:
            raise ConfigError(
                f"keep_best={best!r}: it is unknown whether larger is better. Set it, as in "
                "my_function.higher_is_better = True."
            )
        return
    if best.removeprefix("val_") in plan.measured:
        raise ConfigError(f"keep_best={best!r} needs validation data: give some, or keep the best loss.")
    meant = nearest(best, plan.measured, "metric")
    raise ConfigError(f"keep_best={best!r}: no such metric in this run. {meant}")


def warn_of_data(facts_by_rank: Sequence[dict[str, Any]]) -> None:
    """Warn on rank 0 of data that are not finite, and of a loss that is weighted wrongly."""
    follows = {
        "_data": "on_nonfinite decides what happens if that makes the loss NaN.",
        "_validation": "val_loss may become NaN, and then no epoch is the best one.",
    }
    warnings = [facts["_loss"] for facts in facts_by_rank if facts["_loss"]]
    if warnings and runtime.is_master():
        warn(warnings[0])
    for name, what in follows.items():
        found = [facts[name] for facts in facts_by_rank if facts[name][1]]
        if found and runtime.is_master():
            where, count = found[0][0], sum(rows for _, rows in found)
            more = f", the first of {count:,} such rows" if count > 1 else ""
            prefix = "validation data: " if name == "_validation" else ""
            warn(f"{prefix}{where}{more}. {what} Fill or drop such rows first.")
