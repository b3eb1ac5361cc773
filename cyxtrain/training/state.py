"""What changes while a model is trained, and what a checkpoint therefore holds."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.checkpoint.checkpoint_file import CheckpointState
from cyxtrain.checkpoint.format.encoding import encode_tree
from cyxtrain.checkpoint.format.names import plain_parameters, plain_state
from cyxtrain.checkpoint.format.optimizer_state import (
    drop_groups,
    load_optimizer_state_by_name,
    optimizer_state_by_name,
    rebuild_groups,
)
from cyxtrain.checkpoint.transport import read_file_on_all
from cyxtrain.checkpoint.validation import is_position, taking_over
from cyxtrain.checkpoint.weights import fitting_state, load_model_state
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import process_env
from cyxtrain.errors import CheckpointError, brief, warn
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.learning_rates import LearningRates, scaling_of
from cyxtrain.optim.precision import LossScale, make_loss_scale
from cyxtrain.optim.schedules import check_scheduler_state, load_scheduler_state, scheduler_state
from cyxtrain.progress.history import TrainingHistory
from cyxtrain.training.trained import check_state_besides, load_state_besides, state_besides, trained_with
from cyxtrain.world import runtime


@dataclass
class Position:
    """Where training is: the same on every rank, and all that decides what comes next."""

    epoch: int = 0
    """Epochs that are complete."""
    samples: int = 0
    """Samples of the running epoch's order that all ranks together have been trained on."""
    step: int = 0
    """Optimizer steps, over all epochs; those that were not taken count too."""
    first_epoch: int = 0
    """Epochs that were complete when the latest call of `fit` began."""
    fits: int = 0
    """Calls of `fit` that have begun."""
    effective_batch_size: int = 0
    """Samples per step over all ranks, in the latest call of `fit`."""
    skipped: int = 0
    """Latest steps in a row that were not taken, because a loss or a gradient was not finite."""
    epoch_steps: int = 0
    """Steps of the running epoch, those that were not taken too."""
    passes: int = 0
    """Times that data which give batches one after the other have been gone through."""
    batches: int = 0
    """Batches that they have given in the running pass: to all ranks together, or to each where each has its own."""
    order: int = 0
    """A number that no other order of the running epoch has, where a sampler of the user's makes it; 1 where each rank
    gives its own batches; else 0."""
    stopped: int = 0
    """1 where a callback, or the end of its data, has ended the latest call of `fit`: it is complete."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> Position:
        """Returns the position in a checkpoint.

        Raises:
            CheckpointError: It is none.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names or not is_position(values):
            raise CheckpointError(
                f"Cannot load {source}: its position is {brief(values)}, which is none, or that of another version."
            )
        return cls(**values)


@dataclass
class TrainingState:
    """What changes while a model is trained.

    Attributes:
        model: Not wrapped.
        optimizer: Of its parameters, and of those of its loss.
        trainer: Number of the trainer in its program, from 1.
        rates: Of the optimizer.
        loss_scale: Of the latest call of `fit`, or None.
        position: Where training is.
        history: Of the latest call of `fit`, so far.
        config: Of the latest call of `fit`.
        run: Which run this is: "id"; "started", in seconds since 1970; the "launched" command, and the "trainer" in it;
            and digests of the "data", and of those for "validation", or "". The same on every rank.
        ranks: What belongs to each rank in the middle of an epoch; empty between two, and where nobody asked them.
        compression: What gradient compression keeps from step to step, of all ranks; empty where nobody asked them.
        callbacks: Of the latest call of `fit`.
        stop_training: Whether a callback on this rank wants the fit to end.
        kept: States of callbacks that a checkpoint held, by name, as long as no callback has taken them over.
        arithmetic: In use in the latest call of `fit`.
        complete_fits: Calls of `fit` in this program that are complete.
        runs: Ids of the runs that this training has been.
        step_seconds: Of each part of a step, in the latest epoch, by rank.
        device_usage: What the latest epoch used of this rank's device, as `usage_of` gives it.
        metadata: What its user keeps in checkpoints.
        data: Returns the state of the data of the latest call of `fit`, such as a sampler's own.
        loss: Of the trainer; None: it has nothing to learn.
        built_groups: How many groups the optimizer had when the latest fit began: callbacks may add others.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    trainer: int
    rates: LearningRates
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
    built_groups: int = 0

    def __post_init__(self) -> None:
        self.built_groups = self.built_groups or len(self.optimizer.param_groups)

    @property
    def trained(self) -> nn.Module:
        """The model, and what is trained with it."""
        return trained_with(self.model, self.loss)

    def next_fit(self, initial_epoch: int | None = None) -> tuple[int, int]:
        """Returns (number, epochs before it) of the call of `fit` that comes next, or that goes on: one that stopped.

        Args:
            initial_epoch: Epochs before it, where the program says so.
        """
        number, position = self.complete_fits + 1, self.position
        if initial_epoch is not None:
            return number, initial_epoch
        return number, position.first_epoch if position.fits == number else position.epoch

    def begin_fit(
        self,
        config: DistributedTrainingConfig,
        data: Mapping[str, str],
        effective_batch_size: int,
        lengths: tuple[int, int | None, int | None],
        initial_epoch: int | None,
    ) -> None:
        """Begins a fit where training is. All ranks call it.

        Args:
            config: Of the fit.
            data: Digests of its data, as in `run`.
            effective_batch_size: Samples per step over all ranks.
            lengths: Steps of the warm-up, steps of the fit and of its schedule, as `LearningRates.begin` takes them.
            initial_epoch: Epochs that count as complete, or None: those that there were.
        """
        position = self.position
        self.built_groups = len(self.optimizer.param_groups)
        if initial_epoch is not None:
            position.epoch = initial_epoch
        # What was left of an epoch that an earlier fit did not end is not this fit's.
        position.samples = position.epoch_steps = position.batches = position.order = 0
        position.first_epoch, position.fits = position.epoch, self.complete_fits + 1
        position.passes = position.epoch  # as the epochs of arrays, each is another one
        position.skipped = position.stopped = 0
        effective = position.effective_batch_size = effective_batch_size
        self.history = TrainingHistory(effective_batch_size=effective, world_size=runtime.get_world_size())
        self.config, self.kept = config, {}
        self.forget_ranks()
        self.loss_scale = make_loss_scale(config)
        self.rates.interval = config.scheduler_interval or "step"
        self.rates.begin(scaling_of(config, effective), *lengths)
        self._begin_run(data)

    def resume_from(
        self,
        state: CheckpointState,
        source: str,
        config: DistributedTrainingConfig,
        data: Mapping[str, str],
        *,
        is_new_run: bool,
    ) -> None:
        """Goes on with the fit that made a checkpoint. All ranks call it.

        Args:
            state: The checkpoint.
            source: What it is, for messages.
            config: Of the fit.
            data: As `begin_fit`.
            is_new_run: Whether later checkpoints of that fit are no part of what comes now.

        Raises:
            CheckpointError: As `load`.
        """
        self.loss_scale = make_loss_scale(config)
        self.load(state, source)
        self.load_trained(state)
        self.history.world_size = runtime.get_world_size()
        self.config = config
        self.rates.interval = config.scheduler_interval or "step"
        if is_new_run:
            self._begin_run(data)

    def _begin_run(self, data: Mapping[str, str]) -> None:
        """Makes this a run of its own, which no earlier checkpoint belongs to."""
        own = f"{secrets.token_hex(8)} {time.time()}"
        name, started = runtime.gather_texts(own)[0].split()
        launched, _ = process_env.launched_run()
        self.runs.add(name)
        self.run = {"id": name, "started": float(started), "launched": launched, "trainer": self.trainer, **data}

    def forget_ranks(self) -> None:
        """Training has gone on since the ranks were asked what belongs to each."""
        self.ranks, self.compression = [], {}

    def to_checkpoint(self) -> CheckpointState:
        """Returns what a checkpoint holds; its tensors are the live ones, not copies."""
        trained = self.trained
        state, groups = optimizer_state_by_name(self.optimizer, trained)
        return CheckpointState(
            model=plain_state(self.model),
            optimizer=state,
            optimizer_groups=groups,
            others={
                "scheduler": scheduler_state(self.rates.scheduler),
                "rates": self.rates.state_dict(),
                "loss_scale": {} if self.loss_scale is None else self.loss_scale.state_dict(),
                "compression": self.compression,
                "trained": [name for name, each in plain_parameters(trained) if each.requires_grad],
                "callbacks": {**self.kept, **self.callbacks.state_dict()},
                "data": self._state_of_data(),
                **state_besides(trained),
            },
            ranks=self.ranks,
            position=dataclasses.asdict(self.position),
            history=self.history.to_dict(),
            config=dataclasses.asdict(self.config),
            run=self.run,
            arithmetic=self.arithmetic,
            metadata=self.metadata,
            world_size=runtime.get_world_size(),
        )

    def _state_of_data(self) -> dict[str, Any]:
        """Return the state of the data; what no checkpoint can hold is left out, with a warning."""
        found = self.data()
        try:
            encode_tree(found, "the sampler's state_dict", {})
        except CheckpointError as error:
            warn(f"{error} The checkpoint is without it: a fit that resumes may get other rows.")
            return {}
        return found

    def load(self, state: CheckpointState, source: str) -> None:
        """Takes over what a checkpoint holds, but for the config and the callbacks.

        Args:
            state: The checkpoint.
            source: What it is, for messages, such as "checkpoint run/epoch-0003.ckpt".

        Raises:
            CheckpointError: It belongs to another model, optimizer or scheduler; nothing has changed.
        """
        if not state.optimizer_groups:
            raise CheckpointError(
                f"Cannot load {source}: it was saved without the optimizer. cyxtrain.load_weights(model, path) takes "
                "its weights."
            )
        with taking_over(source):
            position = Position.from_json(state.position, source)
            history = TrainingHistory.from_dict(state.history)
            fitting_state(self.model, state.model, source)
            check_state_besides(self.trained, state.others, source)
            unknown = set(state.others.get("trained", ())) - {name for name, _ in plain_parameters(self.trained)}
            if unknown:
                raise CheckpointError(f"Cannot load {source}: it trains {brief(sorted(unknown))}, which is not there.")
            scheduler = self.rates.as_saved(state.others.get("rates", {}))
            check_scheduler_state(scheduler, state.others.get("scheduler", {}), source)
            self.rates.scheduler = scheduler
            self.load_values(state, source)
            self.position, self.history, self.run, self.ranks = position, history, dict(state.run), state.ranks
            self.compression = state.others.get("compression", {})
            self.runs.add(self.run.get("id"))
            self.metadata = {**state.metadata, **self.metadata}
            self.arithmetic, self.kept = state.arithmetic, state.others.get("callbacks", {})

    def load_file(self, path: str | os.PathLike[str]) -> None:
        """Goes back to a checkpoint's file, and takes over its metadata. All ranks call it; rank 0 reads.

        Raises:
            CheckpointError: There is none, it is damaged, or as `load`.
        """
        state, _ = read_file_on_all(path)
        self.load(state, f"checkpoint {path}")
        self.metadata |= state.metadata
        self.complete_fits = self.position.fits

    def load_values(self, state: CheckpointState, source: str) -> None:
        """Gives model, optimizer and scheduler what a checkpoint has of theirs.

        Raises:
            CheckpointError: As `load`.
        """
        # First, because it takes all or nothing, and the model has been seen to fit.
        trained = self.trained
        added = rebuild_groups(self.optimizer, trained, state.optimizer_groups, self.built_groups)
        for name, parameter in plain_parameters(trained):
            if name in added and name in state.others.get("trained", ()):
                parameter.requires_grad_(True)
        load_optimizer_state_by_name(self.optimizer, trained, state.optimizer, state.optimizer_groups)
        load_model_state(self.model, state.model, source)
        load_state_besides(trained, state.others, source)
        load_scheduler_state(self.rates.scheduler, state.others.get("scheduler", {}))
        if state.others.get("rates"):
            self.rates.load_state_dict(state.others["rates"], source)
        self.rates.follow_groups()
        if self.loss_scale is not None and state.others.get("loss_scale"):
            self.loss_scale.load_state_dict(state.others["loss_scale"], source)

    def load_trained(self, state: CheckpointState) -> None:
        """Freezes and unfreezes parameters as the fit of a checkpoint had them; of older ones that is not known."""
        if "trained" not in state.others:
            return
        trained = set(state.others["trained"])
        for name, parameter in plain_parameters(self.trained):
            if parameter.requires_grad != (name in trained):
                parameter.requires_grad_(name in trained)

    def forget_added_groups(self) -> None:
        """Takes groups that callbacks added off the optimizer: it is what it was when the fit began."""
        drop_groups(self.optimizer, self.built_groups)
