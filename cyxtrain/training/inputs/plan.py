"""The plan of a call of `fit`: each rank checks its input and makes its own; then the ranks agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cyxtrain.callbacks import CSVLogger, ModelCheckpoint, TensorBoard, Tracker
from cyxtrain.callbacks.callback import Callback, Callbacks
from cyxtrain.callbacks.step_trial import StepTrial
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import nearest, require
from cyxtrain.data.batches.batch import Share
from cyxtrain.data.feed import Feed, Place
from cyxtrain.data.sources.source import Source
from cyxtrain.environment import accelerator, process_env
from cyxtrain.errors import ConfigError, shortened, warn_together
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.optimizers import can_fuse, needs_closure
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.progress.display import Display, make_display
from cyxtrain.training.inputs.arguments import FitArguments, parse_fit
from cyxtrain.training.inputs.checked_data import CheckedData, TrainerArguments, check_data
from cyxtrain.training.inputs.checks import check_trained
from cyxtrain.training.inputs.facts import model_facts, optimizer_facts
from cyxtrain.training.inputs.fit_length import FitLength, all_steps, requested_steps, steps_per_epoch
from cyxtrain.training.inputs.slice_orders import check_slice_orders
from cyxtrain.training.inputs.training_data import Sources, by_name, naming_validation, open_fit, size_of_validation
from cyxtrain.training.inputs.virtual_ranks import check_data_and_step, check_ranks
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
from cyxtrain.workers.machine import ranks_by_cores
from cyxtrain.world import runtime
from cyxtrain.world.consensus import arithmetic_of_rank
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World


@dataclass(frozen=True)
class FitPlan:
    """One call of `fit` whose input passed the checks of this rank.

    `start_or_resume` still checks the schedules, batch norm, and the checkpoint to continue from; `CheckpointManager`
    checks the folder.

    Attributes:
        world: The ranks that train.
        validation: Sets of samples to validate with, by name; "" for a set without a name.
        compiles_layers: Whether layers are compiled one by one, and not the model as a whole.
        initial_epoch: Epochs that count as completed; None: the trainer's.
        ends_on_nan: Whether a callback on any rank ends the fit if a number is not finite.
        defers_verdicts: Whether all ranks compute on accelerators, and the host need not wait for a step.
        attempt: How often a launcher has restarted the ranks; the largest number on any rank.
        may_log: Whether this rank may log numbers of the user's own: the dry run did, or a callback may.
    """

    world: World
    config: DistributedTrainingConfig
    data: CheckedData
    validation: Mapping[str, CheckedData]
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
    may_log: bool = False

    @property
    def slices(self) -> Slices:
        """The slices of each step, of which this rank has some."""
        return Slices.of(self.world, self.config.virtual_ranks)

    @property
    def own_generators(self) -> int:
        """The number that seeds what is drawn outside of slices: a rank's own, or with virtual ranks that of none."""
        return self.slices.count if self.slices.is_virtual else self.world.rank

    @property
    def dtype(self) -> torch.dtype:
        """Type in which matrices are multiplied."""
        return self.data.call.precision.dtype or self.data.placement.dtype

    def merged_with(self, facts_by_rank: Sequence[dict[str, Any]]) -> FitPlan:
        """Return the plan with the facts of all ranks; refuse ranks that do not suit each other."""
        check_devices(self.world, facts_by_rank, self.data.placement.device)
        if self.slices.is_virtual:
            check_ranks(self.slices.count, [facts["_arithmetic"] for facts in facts_by_rank])
        for number, rows in enumerate((self.data, *self.validation.values())):
            rows.loss.join_names([facts["_shown"][number] for facts in facts_by_rank])
        self.data.loss.weight_per_row = max(facts["_weight_per_row"] for facts in facts_by_rank)
        return replace(
            self,
            ends_on_nan=any(facts["_ends_on_nan"] for facts in facts_by_rank),
            # All ranks must read the verdict of a step at the same time.
            defers_verdicts=all(facts["_is_on_accelerator"] for facts in facts_by_rank),
            attempt=max(facts["_attempt"] for facts in facts_by_rank),
            devices=explain_device(self.world, self.data.placement.device, facts_by_rank),
        )

    def params(self, last_epoch: int) -> dict[str, Any]:
        """Return what callbacks are given with `set_params`; `last_epoch` counts from 1."""
        return {
            "epochs": last_epoch,
            "steps": self.length.steps_per_epoch,
            "samples_per_step": self.feed.effective_batch_size,
            "warmup_steps": self.length.warmup_steps,
            "verbose": self.config.verbose,
            "validation": bool(self.validation),
            "sets": [*self.validation],
            "metrics": self.measured,
            "larger_is_better": self.larger_is_better,
            "may_log": self.may_log,
        }

    @property
    def measured(self) -> list[str]:
        """Names of an epoch's numbers in the history; the first set also has them without its name."""
        names = self.data.measured
        first = next(iter(self.validation.values()), None)
        if first is not None:
            names += [f"val_{name}" for name in first.measured]
        for own, data in self.validation.items():
            if own:
                names += [f"val_{own}_{name}" for name in data.measured]
        return names

    @property
    def larger_is_better(self) -> dict[str, bool]:
        """Which numbers of the history are better if larger, by name without val_; unknown ones are left out."""
        losses = dict.fromkeys(["loss", *self.data.loss.weightings], False)
        metrics = next(iter(self.validation.values()), self.data).metrics
        found = {**losses, "accuracy": True, **metrics.larger_is_better}
        by_set = {f"{own}_{name}": better for own in self.validation for name, better in found.items()}
        return {**by_set, **found}

    @property
    def length(self) -> FitLength:
        """The steps and epochs of the fit; a checkpoint that it continues changes them."""
        return FitLength(self.config, steps_per_epoch(self.config, self.feed), bool(self.validation))

    def shares(self, position: Position) -> Generator[Share]:
        """Return this rank's shares of the rest of the epoch."""
        end = self.length.end_of_epoch(position, requested_steps(self.config))
        return self.feed.shares(place_of(position), self.data.placement, end)

    def digests(self) -> dict[str, str]:
        """Return the digests by which a checkpoint recognizes the data; "" for data that are not given."""
        digests = [name + each.source.digest() for name, each in self.validation.items()]
        return {"data": self.data.source.digest(), "validation": " ".join(digests)}


def place_of(position: Position) -> Place:
    """Return where in the data training is."""
    epoch = (position.epoch, position.epoch_steps, position.samples)
    return Place(*epoch, position.passes, position.batches, position.order)


def plan_fit(
    arguments: FitArguments, trainer: TrainerArguments, opened: Sources, epoch: int
) -> tuple[FitPlan, dict[str, Any]]:
    """Return this rank's plan, and its facts; `epoch`: where the fit is likely to begin."""
    world = trainer.world
    model = trainer.model
    config = arguments.config
    trained = trained_with(model, Loss(trainer.loss_fn))
    check_trained(trained, trainer.optimizers, config)
    callbacks = Callbacks(_callbacks_of(arguments.callbacks))
    source, validation_sources = opened
    feed = source.feed(config, world)
    data = _check_training_set(source, feed, config, trainer, epoch)
    device = data.placement.device
    validation = {name: _check_validation_set(name, each, config, trainer) for name, each in validation_sources.items()}
    _check_closures(trainer.optimizers, data)
    display = make_display(config.verbose and world.is_first)
    check_batch_norm(model, device, wanted=config.sync_batchnorm)
    sparse = makes_sparse_gradients(model)
    fused = tuple(name for name, each in trainer.optimizers.items() if can_fuse(each, config.fused_optimizer, sparse))
    by_layer = compiles_by_layer(model, config.compile, device, config.virtual_ranks or world.size)
    plan = FitPlan(world, config, data, validation, feed, display, arguments.resume, callbacks, fused, by_layer)
    may_log = callbacks.may_log or trainer.logged.has_any
    plan = replace(plan, initial_epoch=arguments.initial_epoch, may_log=may_log)
    _check_keep_best(plan)
    _check_validation(plan)
    return plan, _facts(plan, trainer, opened, trained)


def _callbacks_of(callbacks: Sequence[Callback]) -> Sequence[Callback]:
    """Leave out callbacks that only write if `cyxtrain replay` or `doctor` runs the program: earlier files stay."""
    trial = process_env.trial()
    if process_env.replay() is None and trial is None:
        return callbacks
    kept = [each for each in callbacks if not isinstance(each, (CSVLogger, ModelCheckpoint, TensorBoard, Tracker))]
    if trial is not None:
        kept.append(StepTrial(trial.file))
    return kept


def _facts(plan: FitPlan, trainer: TrainerArguments, opened: Sources, trained: nn.Module) -> dict[str, Any]:
    """Return what must be the same on every rank; entries with an underscore are only exchanged."""
    data = plan.data
    return {
        **device_facts(data.placement.device),
        "_arithmetic": arithmetic_of_rank(data.placement.device) if plan.slices.is_virtual else {},
        **_facts_of_sources(opened, plan.world),
        "the effective batch size": plan.feed.effective_batch_size,
        "resume": plan.resume,
        "initial_epoch": plan.initial_epoch,
        "_is_on_accelerator": _is_on_accelerator(trained),
        **model_facts(trained, data.loss),
        **optimizer_facts(trainer.optimizers, trained),
        "the metrics": [*trainer.metrics],
        "the callbacks that every rank must have": plan.callbacks.on_all_ranks,
        "_ends_on_nan": plan.callbacks.end_on_nonfinite,
        "_problem_of_loss": data.tried.warning,
        "_weight_per_row": data.loss.weight_per_row,
        "_shown": [rows.loss.shown for rows in (data, *plan.validation.values())],
        "_attempt": process_env.launched_run()[1],
    }


def _facts_of_sources(opened: Sources, world: World) -> dict[str, Any]:
    """Return the facts of each source that ranks compare, and where this rank's part is not finite."""
    facts: dict[str, Any] = {}
    not_finite: dict[str, Any] = {}
    for name, source in by_name(opened).items():
        facts |= source.facts(name)
        found = source.not_finite(world.rank, world.size)
        if found[1]:
            not_finite[name] = found
    return facts | {"_not_finite": not_finite}


def _check_closures(optimizers: Mapping[str, torch.optim.Optimizer], data: CheckedData) -> None:
    """Refuse one of several optimizers that evaluates the loss itself, unless a step calls each."""
    if len(optimizers) == 1 or data.call.optimizes:
        return
    for name, optimizer in optimizers.items():
        if needs_closure(optimizer):
            raise ConfigError(
                f"the optimizer {name!r} evaluates the loss several times per step, by its own parameters alone, and "
                "there are others: give a train_step that calls self.optimize for each, or one optimizer."
            )


def _check_training_set(
    source: Source, feed: Feed, config: DistributedTrainingConfig, trainer: TrainerArguments, epoch: int
) -> CheckedData:
    """Return the training data after a dry run on its first micro-batch."""
    first = feed.first_rows(epoch)  # rank 0's; None: each rank has its own
    if first is None:
        first = source.first(feed.rows_at_once)
    data = check_data(source, config.batch_size, config, trainer, trains_on=first)
    check_data_and_step(config, data, feed)
    if (config.virtual_ranks or 1) > 1:
        check_slice_orders(config, data, trainer, first, epoch)
    if data.call.needs_all_rows and feed.micro_batches > 1:
        raise ConfigError(accumulation_excludes(data.call.needs_all_rows))
    return data


def _check_validation_set(
    name: str, source: Source, config: DistributedTrainingConfig, trainer: TrainerArguments
) -> CheckedData:
    with naming_validation(f"validation {name}".rstrip()):
        size = size_of_validation(source, config)
        return replace(check_data(source, size, config, trainer), name=name)


def _is_on_accelerator(trained: nn.Module) -> bool:
    """Return whether all parameters are on one accelerator of the kind that "auto" takes."""
    kind = accelerator.visible()
    devices = {parameter.device for parameter in trained.parameters()}
    return kind is not None and len(devices) == 1 and next(iter(devices)).type == kind.type


def _check_keep_best(plan: FitPlan) -> None:
    """Refuse a number to keep the best checkpoint by that the fit does not measure, or cannot rank."""
    best = plan.config.keep_best
    if best is None:
        return
    without_val = best.removeprefix("val_")
    if best in plan.measured:
        require(
            without_val in plan.larger_is_better,
            f"keep_best={best!r}: it is unknown whether larger is better. For a function in metrics, set "
            "my_function.higher_is_better = True; for a number of a step, record it by trainer.log(name, value, "
            "larger_is_better=True) under another name.",
        )
    elif not plan.may_log:
        if without_val in plan.measured:
            raise ConfigError(f"keep_best={best!r} needs validation data: give some, or keep the best loss.")
        meant = nearest(best, plan.measured, "metric")
        raise ConfigError(f"keep_best={best!r}: no such metric in this run. {meant}")


def _check_validation(plan: FitPlan) -> None:
    """Refuse validations for which data, a length or distinct names are missing."""
    config = plan.config
    if config.log_every_n_batches:
        warn_together("log_every_n_batches is deprecated: use log_every_n_steps, which counts steps over all epochs.")
    if config.validates_within_epochs and not plan.validation:
        name = "validate_every_n_minutes"
        if isinstance(config.validation_freq, float):
            name = "validation_freq"
        elif config.validate_every_n_steps:
            name = "validate_every_n_steps"
        raise ConfigError(
            f"{name}={getattr(config, name)} needs validation data: pass validation_data, or set validation_split."
        )
    if isinstance(config.validation_freq, float) and plan.length.steps_per_epoch is None:
        raise ConfigError(
            f"validation_freq={config.validation_freq} is a fraction of an epoch, and the number of batches is "
            "unknown: set steps_per_epoch, or use validate_every_n_steps."
        )
    for name, count in Counter(plan.measured).items():
        if count > 1:
            raise ConfigError(
                f"validation_data: two numbers would be named {name!r}. Give the sets, or what a step returns, other "
                "names."
            )


def warn_of_data(facts_by_rank: Sequence[dict[str, Any]]) -> None:
    """Warn of data that are not finite, and of a loss that is weighted wrongly."""
    warnings = [facts["_problem_of_loss"] for facts in facts_by_rank if facts["_problem_of_loss"]]
    if warnings:
        warn_together(warnings[0])
    parts: dict[str, list[tuple[str, int, list[str]]]] = {}
    for facts in facts_by_rank:
        for name, part in facts["_not_finite"].items():
            parts.setdefault(name, []).append(part)
    for name, found in parts.items():
        _warn_of_not_finite(name, found)


def _warn_of_not_finite(name: str, parts: Sequence[tuple[str, int, list[str]]]) -> None:
    """Warn of NaN and infinities in a source; `parts`: what `not_finite` returned on each rank."""
    where, _, _ = parts[0]
    count = sum(rows for _, rows, _ in parts)
    columns = dict.fromkeys(column for _, _, named in parts for column in named)
    consequence = "on_nonfinite decides what happens if that makes the loss NaN."
    if name != "training":
        where = f"{name.replace('validation', 'validation data')}: {where}"
        consequence = "val_loss may become NaN, and then no epoch is the best one."
    if count > 1:
        where += f", the first of {count:,} such samples"
    if columns:
        where += f" (column {shortened(columns)})"
    warn_together(f"{where}. {consequence} Fill or drop such samples first.")


def count_steps(*data: Any, **keywords: Any) -> tuple[int, int]:
    """Return (steps of an epoch, of the whole fit) that `fit` takes with the same arguments, at most.

    They are optimizer steps, as a schedule needs them: the same on every rank, and fewer with more ranks. All ranks
    call it; like `fit`, it joins the world. Cost: data that give batches one after the other are opened.

    Args:
        *data: As `DistributedTrainer.fit`: X and y, or an iterable of batches; perhaps a `DistributedTrainingConfig`.
        **keywords: As `DistributedTrainer.fit`.

    Raises:
        ConfigError: As `fit`; or the number of batches is unknown.
    """
    world = runtime.join_for_all()
    world.check_same_call("count_steps")
    config = parse_fit(*data, **keywords).config
    if data and isinstance(data[0], Iterator):  # opening it would take batches that fit should have
        steps = requested_steps(config)
    else:
        arguments, opened = open_fit(world, lambda: parse_fit(*data, **keywords), None, 0)
        config = arguments.config
        steps = steps_per_epoch(config, opened[0].feed(config, _world_of_fit(world, config)))
    total = all_steps(config, steps)
    if total is None:
        raise ConfigError("the number of batches is unknown: set steps_per_epoch, or max_steps.")
    if steps is None:
        steps = total
    return steps, total


def _world_of_fit(world: World, config: DistributedTrainingConfig) -> World:
    """Return this process's world, or one as large as the notebook's workers make."""
    asked = config.num_processes
    if asked is None or world.size > 1 or process_env.is_launched():
        return world
    if asked != "auto":
        return replace(world.alone(), size=int(asked))
    if accelerator.visible() is not None:
        raise ConfigError('num_processes="auto" depends on where the model is: give count_steps a number of processes.')
    return replace(world.alone(), size=ranks_by_cores(process_env.to_pass_on()))
