"""The training state: what changes while a model is trained, and what a checkpoint therefore holds."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn

from cyxtrain.callbacks.callback import Callbacks, checked_callbacks
from cyxtrain.checkpoint.checkpoint_file import CheckpointState
from cyxtrain.checkpoint.format.encoding import encode_tree
from cyxtrain.checkpoint.format.names import plain_parameters, plain_state
from cyxtrain.checkpoint.format.optimizer_state import (
    load_optimizer_state_by_name,
    optimizer_state_by_name,
    rebuild_groups,
)
from cyxtrain.checkpoint.transport import read_file_on_all
from cyxtrain.checkpoint.validation import is_position, restoring_from
from cyxtrain.checkpoint.weights import fitting_state, load_model_state
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import check_attribute
from cyxtrain.environment import process_env
from cyxtrain.errors import CheckpointError, ConfigError, brief, warn
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.named_metrics import metrics_by_name
from cyxtrain.optim.learning_rates import LearningRates, scaling_of, set_rates
from cyxtrain.optim.optimizers import ONLY, described_name
from cyxtrain.optim.precision import LossScale, make_loss_scale
from cyxtrain.optim.schedule_classes import given_schedule
from cyxtrain.optim.schedules import check_scheduler_state, load_scheduler_state, scheduler_state
from cyxtrain.progress.history import TrainingHistory
from cyxtrain.training.trained import check_extra_state, extra_state, load_extra_state, trained_with
from cyxtrain.world.world import World


class _Fields:
    """Fields, which other modules set by `set` alone."""

    def set(self, **values: Any) -> None:
        """Set fields by name."""
        assert values.keys() <= vars(self).keys()
        vars(self).update(values)


@dataclass
class Position(_Fields):
    """Training progress: the same on every rank, and enough to determine the next step."""

    epoch: int = 0
    """Completed epochs."""
    samples: int = 0
    """Samples of the current epoch that all ranks together have trained on."""
    step: int = 0
    """Optimizer steps over all epochs, skipped ones included."""
    first_epoch: int = 0
    """Completed epochs when the latest call of `fit` began."""
    fits: int = 0
    """Calls of `fit` that have begun."""
    effective_batch_size: int = 0
    """Samples per step over all ranks, in the latest call of `fit`."""
    skipped: int = 0
    """Number of latest steps in a row that were skipped because a loss or a gradient was not finite."""
    epoch_steps: int = 0
    """Steps of the current epoch, skipped ones included."""
    passes: int = 0
    """Completed passes over data that give batches one after the other."""
    batches: int = 0
    """Batches read in the current pass: by all ranks together, or by each if each has its own."""
    order: int = 0
    """Identifies the order of the current epoch if a user's sampler makes it; 1 if each rank has its own batches."""
    first_step: int = 0
    """Optimizer steps when the latest call of `fit` began."""
    stopped: int = 0
    """1 if a callback, or the end of the data, ended the latest call of `fit`: it is complete, not interrupted."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> Position:
        """Return the position stored in a checkpoint; raise CheckpointError if it is not one."""
        names = {field.name for field in dataclasses.fields(cls)}
        # Checkpoints of earlier versions have no first_step.
        if set(values) | {"first_step"} != names or not is_position(values):
            raise CheckpointError(
                f"Cannot load {source}: its position {brief(values)} is invalid, or from another version."
            )
        return cls(**values)

    def keep(self) -> Callable[[], None]:
        """Return what restores the present position."""
        return partial(self.set, **vars(self))

    def have_read(self, read: tuple[int, int, int]) -> None:
        """Note what has been read of the data: passes, batches and order."""
        self.passes, self.batches, self.order = read


@dataclass
class TrainingState(_Fields):
    """What changes while a model is trained. Other modules assign its fields and its position's by `set` alone.

    Attributes:
        model: Not wrapped.
        trainer: Number of the trainer in its program, from 1.
        rates: The learning rates by the name of their `optimizer`. The optimizers have the parameters of the model, and
            of its loss.
        run: Identifies this run: "id"; "started" (seconds since 1970, and after all runs in its folder); the "launched"
            command and the "trainer" in it; digests of the "program", of the "data" and of the "validation" data, or
            ""; "origin": the first run of this training. The same on every rank.
        claim: Tells other processes that this run writes to its folder; closed after each fit.
        ranks: Per-rank state in the middle of an epoch; empty unless gathered for a checkpoint.
        compression: Error feedback of gradient compression, of all ranks; empty unless gathered for a checkpoint.
        stop_training: Whether a callback on this rank asks to end the fit.
        kept: States of callbacks from a checkpoint, by name, until a callback takes them over.
        arithmetic: Numerics of the latest call of `fit`, for comparison on resume.
        runs: Ids of the runs that this training has been.
        data: Returns the state of the data of the latest call of `fit`, such as a sampler's own.
        stop_reason: Why a callback has ended the latest fit; "": none has.
        before_end: What the end of the last epoch changes, as it was before, for a longer fit to continue from; or
            empty.
        columns: Names of the columns that the model was trained with, of each table by its name, such as "X".
    """

    model: nn.Module
    trainer: int
    rates: dict[str, LearningRates]
    loss_scale: LossScale | None = None
    position: Position = field(default_factory=Position)
    history: TrainingHistory = field(default_factory=TrainingHistory)
    config: DistributedTrainingConfig = field(default_factory=DistributedTrainingConfig)
    run: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    compression: dict[str, Any] = field(default_factory=dict)
    callbacks: Callbacks = field(default_factory=Callbacks)
    stop_training: bool = False
    kept: dict[str, Any] = field(default_factory=dict)
    arithmetic: dict[str, Any] = field(default_factory=dict)
    complete_fits: int = 0
    runs: set[object] = field(default_factory=set)
    step_seconds: list[dict[str, float]] = field(default_factory=list)
    device_usage: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], dict[str, Any]] = dict
    loss: Loss | None = None
    stop_reason: str = ""
    before_end: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Sequence[str]] = field(default_factory=dict)
    claim: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; none in a notebook's worker that only evaluates."""
        return {name: rates.optimizer for name, rates in self.rates.items() if rates is not None}

    @property
    def parts_of_fits(self) -> dict[str, Any]:
        """What only fits need, by its name in messages: the optimizers and their rates."""
        optimizers = {f"the {described_name(name)}": each for name, each in self.optimizers.items()}
        return optimizers | {described_name(name, "rates"): each for name, each in self.rates.items()}

    @property
    def trained(self) -> nn.Module:
        """The model, and a loss that has its own parameters or buffers."""
        return trained_with(self.model, self.loss)

    def next_fit(self, initial_epoch: int | None = None) -> tuple[int, int]:
        """Return (number, epochs before it) of the next call of `fit`, which continues a stopped one."""
        number = self.complete_fits + 1
        if initial_epoch is not None:
            return number, initial_epoch
        first_epoch = self.position.epoch
        if self.position.fits == number:  # it was interrupted
            first_epoch = self.position.first_epoch
        return number, first_epoch

    def begin_fit(
        self,
        world: World,
        config: DistributedTrainingConfig,
        run: Mapping[str, Any],
        effective_batch_size: int,
        lengths: Sequence[tuple[int, int | None, int | None]],
        initial_epoch: int | None,
    ) -> None:
        """Begin a fit at the current position. All ranks call it.

        `run` are its facts, except those that name it; `lengths`, for each optimizer, the steps of the warm-up, of the
        fit and of its schedule (`LearningRates.begin`).
        """
        position = self.position
        if initial_epoch is not None:
            position.epoch = initial_epoch
        # The rest of an epoch that an earlier fit did not complete is not trained.
        position.samples = position.epoch_steps = position.batches = position.order = 0
        position.first_epoch = position.epoch
        position.fits = self.complete_fits + 1
        position.first_step = position.step
        # Each pass has a different order, like the epochs of arrays.
        position.passes = position.epoch
        position.skipped = position.stopped = 0
        position.effective_batch_size = effective_batch_size
        self.history = TrainingHistory(effective_batch_size=effective_batch_size, world_size=world.size)
        self.config = config
        self.kept = {}
        self.stop_reason = ""
        self.before_end = {}
        self._clear_rank_states()
        self.loss_scale = make_loss_scale(config)
        for rates, steps in zip(self.rates.values(), lengths, strict=True):
            rates.interval = config.scheduler_interval or "step"
            rates.begin(scaling_of(config, effective_batch_size), *steps)
        self._begin_run(world, run)

    def continue_fit(
        self,
        world: World,
        state: CheckpointState,
        source: str,
        config: DistributedTrainingConfig,
        run: Mapping[str, Any],
        *,
        is_new_run: bool,
    ) -> None:
        """Continue the fit that wrote a checkpoint. All ranks call it; raises CheckpointError as `load`.

        `is_new_run`: later checkpoints of that fit do not belong to this run.
        """
        self.loss_scale = make_loss_scale(config)
        self.load(state, source)
        self.load_trained(state)
        self.history.world_size = world.size
        self.config = config
        for rates in self.rates.values():
            rates.interval = config.scheduler_interval or "step"
        if is_new_run:
            self._begin_run(world, run)
        # A named checkpoint may be of a later call of fit than this process has made.
        self.complete_fits = max(0, self.position.fits - 1)

    def take_step(self, rows: int, read: tuple[int, int, int]) -> None:
        """Count a step of so many samples over all ranks; `read`: as for `Position.have_read`."""
        position = self.position
        position.step += 1
        position.samples += rows
        position.epoch_steps += 1
        position.have_read(read)
        # They were gathered for a checkpoint before this step.
        self._clear_rank_states()

    def end_epoch(self, read: tuple[int, int, int]) -> None:
        """Count a completed epoch; `read`: as for `Position.have_read`, up to the end of the epoch."""
        self.position.epoch += 1
        self.position.have_read(read)
        self.position.samples = self.position.epoch_steps = 0
        for rates in self.rates.values():
            rates.end_epoch()
        self._clear_rank_states()

    def keep_before_end(self, world: World) -> None:
        """Keep what the end of the running epoch changes; the model and the optimizer's state stay the same."""
        self.before_end = {}
        try:
            found = self.to_checkpoint(world)
        except CheckpointError:
            # No checkpoint of this optimizer can be written.
            return
        del found.others["compression"]
        names = ("optimizer_groups", "others", "ranks", "position", "history")
        # A copy: the end of the epoch changes these values.
        self.before_end = copy.deepcopy({name: getattr(found, name) for name in names})

    def _begin_run(self, world: World, run: Mapping[str, Any]) -> None:
        """Begin a new run, to which no earlier checkpoint belongs."""
        # All ranks take rank 0's: its clock and its random name.
        proposal = f"{secrets.token_hex(8)} {max(time.time(), run['started'])}"
        name, started = world.gather(proposal)[0].split()
        launched, _ = process_env.launched_run()
        self.runs.add(name)
        # Checkpoints of earlier versions have no origin.
        origin = self.run.get("origin", self.run.get("id", name))
        own = {"id": name, "started": float(started), "launched": launched, "trainer": self.trainer, "origin": origin}
        self.run = {**run, **own}

    def _clear_rank_states(self) -> None:
        self.ranks = []
        self.compression = {}

    def to_checkpoint(self, world: World) -> CheckpointState:
        """Return what a checkpoint of these ranks holds; its tensors are the live ones, not copies."""
        trained = self.trained
        found = {name: optimizer_state_by_name(each, trained) for name, each in self.optimizers.items()}
        by_optimizer: dict[str, dict[str, Any]] = {}
        optimizer: dict[str, dict[str, Any]] = {}
        optimizer_groups: list[dict[str, Any]] = []
        for name, (values, groups) in found.items():
            by_optimizer[name] = self._schedule_to_checkpoint(name) | {"groups": len(groups)}
            optimizer |= values
            optimizer_groups += groups
        # The state of an only optimizer stays where it always was, so that other versions can read it.
        only = by_optimizer.pop(ONLY, {})
        several = {"optimizers": by_optimizer} if by_optimizer else {}
        return CheckpointState(
            model=plain_state(self.model),
            optimizer=optimizer,
            optimizer_groups=optimizer_groups,
            others={
                "scheduler": only.get("scheduler", {}),
                "rates": only.get("rates", {}),
                **several,
                "loss_scale": {} if self.loss_scale is None else self.loss_scale.state_dict(),
                "trained": [name for name, each in plain_parameters(trained) if each.requires_grad],
                "callbacks": {**self.kept, **self.callbacks.state_dict()},
                **{name: getattr(self, name) for name in ("compression", "stop_reason", "before_end", "columns")},
                "data": self._state_of_data(),
                **extra_state(trained),
            },
            ranks=self.ranks,
            position=dataclasses.asdict(self.position),
            history=self.history.to_dict(),
            config=dataclasses.asdict(self.config),
            run=self.run,
            arithmetic=self.arithmetic,
            metadata=self.metadata,
            # Loaded from a checkpoint of other ranks, and nothing trained since.
            world_size=len(self.ranks) or world.size,
        )

    def _schedule_to_checkpoint(self, name: str) -> dict[str, Any]:
        rates = self.rates[name]
        return {"scheduler": scheduler_state(rates.scheduler), "rates": rates.state_dict()}

    def _state_of_data(self) -> dict[str, Any]:
        """Return the state of the data; warn and return {} if no checkpoint can hold it."""
        found = self.data()
        try:
            encode_tree(found, "the sampler's state_dict", {})
        except CheckpointError as error:
            warn(f"{error} The checkpoint does not have it: a fit that resumes may see other samples.")
            return {}
        return found

    def load(self, state: CheckpointState, source: str) -> None:
        """Load a checkpoint named `source`, except its config; callbacks take their states from `kept`.

        Raises:
            CheckpointError: It belongs to another model, optimizer or scheduler; nothing has changed.
        """
        if not state.optimizer_groups:
            raise CheckpointError(
                f"Cannot load {source}: it was saved without the optimizer. Load its weights with "
                "cyxtrain.load_weights(model, path)."
            )
        with restoring_from(source):
            position = Position.from_json(state.position, source)
            history = TrainingHistory.from_dict(state.history)
            fitting_state(self.model, state.model, source)
            check_extra_state(self.trained, state.others, source)
            unknown = set(state.others.get("trained", ())) - {name for name, _ in plain_parameters(self.trained)}
            if unknown:
                raise CheckpointError(
                    f"Cannot load {source}: it trains {brief(sorted(unknown))}, which this model does not have."
                )
            # All are checked before any is replaced.
            schedulers = {}
            for name, saved in self._saved_optimizers(state, source).items():
                schedulers[name] = self.rates[name].as_saved(saved.rates)
                check_scheduler_state(schedulers[name], saved.scheduler, source)
            for name, scheduler in schedulers.items():
                self.rates[name].scheduler = scheduler
            self.load_values(state, source)
            self.position = position
            self.history = history
            self.run = dict(state.run)
            self.runs.add(self.run.get("id"))
            self.ranks = state.ranks
            self.compression = state.others.get("compression", {})
            # What the program has set takes precedence; `load_file` replaces it.
            self.metadata = {**state.metadata, **self.metadata}
            self.arithmetic = state.arithmetic
            self.kept = state.others.get("callbacks", {})
            self.stop_reason = state.others.get("stop_reason", "")
            self.before_end = state.others.get("before_end", {})
            # Checkpoints of earlier versions have none: then no table is refused.
            self.columns = state.others.get("columns", {})

    def load_file(self, world: World, path: str | os.PathLike[str]) -> CheckpointState:
        """Load and return a checkpoint, with its metadata. All ranks call it; rank 0 reads. Raises as `load`."""
        state, _ = read_file_on_all(world, path)
        self.load(state, f"checkpoint {path}")
        self.metadata |= state.metadata
        self.complete_fits = self.position.fits
        return state

    def load_values(self, state: CheckpointState, source: str) -> None:
        """Load model, optimizer, scheduler and loss scale from a checkpoint; raise CheckpointError as `load`."""
        trained = self.trained
        saved = self._saved_optimizers(state, source)
        # The optimizers first: each loads all or nothing, and the model's state has been checked.
        for own, rates in self.rates.items():
            added = rebuild_groups(rates.optimizer, trained, saved[own].groups, rates.built_groups)
            for name, parameter in plain_parameters(trained):
                # A callback that adds a group unfreezes its parameters.
                if name in added and name in state.others.get("trained", ()):
                    parameter.requires_grad_(True)
            load_optimizer_state_by_name(rates.optimizer, trained, saved[own].state, saved[own].groups)
        load_model_state(self.model, state.model, source)
        load_extra_state(trained, state.others, source)
        for own, rates in self.rates.items():
            load_scheduler_state(rates.scheduler, saved[own].scheduler)
            if saved[own].rates:
                rates.load_state_dict(saved[own].rates, source)
            rates.follow_groups()
        if self.loss_scale is not None and state.others.get("loss_scale"):
            self.loss_scale.load_state_dict(state.others["loss_scale"], source)

    def _saved_optimizers(self, state: CheckpointState, source: str) -> dict[str, _SavedOptimizer]:
        """Return what a checkpoint has of each optimizer; raise CheckpointError if their names differ."""
        others = state.others
        groups = state.optimizer_groups
        only = {"scheduler": others.get("scheduler", {}), "rates": others.get("rates", {}), "groups": len(groups)}
        # As `to_checkpoint` writes the state of an only optimizer.
        found = others.get("optimizers") or {ONLY: only}
        if found.keys() != self.rates.keys():
            raise CheckpointError(
                f"Cannot load {source}: it has the optimizers {', '.join(found)}, and this trainer "
                f"{', '.join(self.rates)}. Build the trainer as it was."
            )
        saved = {}
        left = iter(groups)
        for name, each in found.items():
            own = [*itertools.islice(left, each["groups"])]
            others_have = _names_in(groups) - _names_in(own)
            values = {named: value for named, value in state.optimizer.items() if named not in others_have}
            saved[name] = _SavedOptimizer(values, own, each["scheduler"], each["rates"])
        return saved

    def load_trained(self, state: CheckpointState) -> None:
        """Freeze and unfreeze parameters as in a checkpoint; older checkpoints do not record it."""
        if "trained" not in state.others:
            return
        trained = set(state.others["trained"])
        for name, parameter in plain_parameters(self.trained):
            if parameter.requires_grad != (name in trained):
                parameter.requires_grad_(name in trained)


def _names_in(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    return {*itertools.chain.from_iterable(group["params"] for group in groups)}


class _SavedOptimizer(NamedTuple):
    """A checkpoint's part of an optimizer: state by parameter name, groups, schedule and rates."""

    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any]
    rates: dict[str, Any]


def output_names(loss_fn: Any) -> list[str]:
    """Return the names of the outputs that have a loss each, if a loss is a dictionary of losses."""
    return [*map(str, loss_fn)] if isinstance(loss_fn, Mapping) else []


class _ByName(dict[str, torch.optim.Optimizer]):
    def __call__(self) -> NoReturn:
        raise TypeError("optimizers is a dictionary: take one by name, or call optimize(loss, name) in a train_step.")


class TrainerView:
    """What a trainer shows of its training."""

    _state: TrainingState

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __setattr__(self, name: str, value: Any) -> None:
            """Check what replaces an argument of the trainer; refuse what nothing would use."""
            # __init__ sets _given_steps last: what comes later is the user's.
            if "_given_steps" in self.__dict__ and not name.startswith("_"):
                value = self._checked_attribute(name, value)
            object.__setattr__(self, name, value)
            if name in ("loss_fn", "loss_weights", "metrics") and "_state" in self.__dict__:
                self._state.set(loss=Loss(self._loss))
                self._batch_plan = None

        def _checked_attribute(self, name: str, value: Any) -> Any:
            own = getattr(type(self), name, None)
            if name == "model" or (isinstance(own, property) and own.fset is None):
                raise ConfigError(
                    f"trainer.{name} cannot be replaced: make a new DistributedTrainer(model, loss_fn, optimizer). "
                    "Settings go to fit."
                )
            if type(self).__module__.startswith("cyxtrain.") and not self._own_steps:
                check_attribute(name, [*dir(self)])
            if name == "callbacks":
                return checked_callbacks(value)
            if name == "metrics":
                return metrics_by_name(value, output_names(self.loss_fn))
            return value

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; an only one is called "optimizer"."""
        return _ByName(self._state.optimizers)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only optimizer.

        Raises:
            ConfigError: There are several: see `optimizers`.
        """
        return self._only_rates().optimizer

    def _only_rates(self) -> LearningRates:
        rates = self._state.rates
        if len(rates) > 1:
            raise ConfigError(
                f"the trainer has the optimizers {', '.join(rates)}: take one, as in trainer.optimizers"
                f"[{next(iter(rates))!r}]."
            )
        return next(iter(rates.values()))

    @property
    def scheduler(self) -> Any:
        """The learning-rate schedule, or None; a function of `(optimizer, total_steps)` makes it in `fit`."""
        return given_schedule(self._only_rates().scheduler)

    @property
    def schedulers(self) -> dict[str, Any]:
        """The learning-rate schedule of each optimizer by its name; as `scheduler`."""
        return {name: given_schedule(rates.scheduler) for name, rates in self._state.rates.items()}

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        """Set the learning `rates`, one per group.

        What a callback sets between two epochs is set on all ranks.
        """
        set_rates(self._state.rates.values(), rates)

    @property
    def step_seconds(self) -> list[dict[str, float]]:
        """Seconds per step of the latest epoch: "data", "forward", "backward", "communication", "optimizer".

        Per-rank averages; every rank has all of them. On a GPU, the time until work was launched, not completed; for
        communication over NCCL, how long the GPU waited.
        """
        return self._state.step_seconds

    @property
    def device_usage(self) -> dict[str, float]:
        """GPU usage of this rank in the latest epoch: "peak_memory" (bytes), "flops_per_second" and "mfu".

        The model's FLOPs are counted in the first micro-batch, forward and backward; "mfu" is their fraction of the
        GPU's peak by its datasheet, if that is known. Empty on CPUs, except with `profile=True`.
        """
        return self._state.device_usage

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON values by name that checkpoints keep for you; `load_checkpoint` restores them."""
        return self._state.metadata

    @property
    def history(self) -> TrainingHistory:
        """The metrics of the latest fit, even of one that was stopped."""
        return self._state.history

    @property
    def stop_training(self) -> bool:
        """Whether a callback on this rank asks to end the fit; set it to True to ask."""
        return self._state.stop_training

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        self._state.set(stop_training=bool(value))
