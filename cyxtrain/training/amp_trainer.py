"""Mixed precision in a custom training loop: a call for each micro-batch."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from cyxtrain.checkpoint.checkpoint_file import write_checkpoint
from cyxtrain.config import AMPConfig, DistributedTrainingConfig, create_default_amp_config
from cyxtrain.config.settings import is_number, names_checked, require, require_integer
from cyxtrain.data.batches.batch import Batch, StreamShare, StreamStep
from cyxtrain.data.batches.collate import as_batch, check_parts
from cyxtrain.data.batches.prefetch import DeviceCopier, Placement
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.errors import warn_together
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.named_metrics import NamedMetrics
from cyxtrain.metrics.num_items import rule_named
from cyxtrain.optim.learning_rates import LearningRates
from cyxtrain.optim.optimizers import ONLY, OptimizerLike, make_optimizer, place_state
from cyxtrain.optim.precision import LossScale, Precision
from cyxtrain.parallel import DistributedDataParallel, unwrap
from cyxtrain.training.inputs.checked_data import LossLike, ModelSetup, place_model
from cyxtrain.training.inputs.checks import check_trained
from cyxtrain.training.inputs.dry_run import DryRun
from cyxtrain.training.inputs.facts import model_facts, optimizer_facts
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step.nonfinite import Verdict
from cyxtrain.training.step.session import Session
from cyxtrain.training.step.training_step import Result, TrainingStep
from cyxtrain.training.trained import trained_with
from cyxtrain.world import runtime
from cyxtrain.world.agreement import agree_on, ending_group_on_error
from cyxtrain.world.world import World

_PRECISION: Final = "fp16"
_LEARNING_RATE = 1e-3


@names_checked
class DistributedAMPTrainer:
    """Trains in 16 bits with a scaled loss, a micro-batch per call, on every rank of the world.

    Gradients are weighted by samples, as in `fit`: N ranks with batches of b samples, which may differ in length, train
    as one rank does with all samples. Every rank makes the trainer, and calls `training_step` equally often.

    Args:
        model: Any `nn.Module`; a wrapped one is unwrapped. Parameters and buffers become rank 0's.
        config: How the loss is scaled; None: `create_default_amp_config()`.
        rank: None, or this process's rank: an error if it differs from the rank in the world that it has joined.
        world_size: None, or the number of ranks, checked likewise.
        accumulation_steps: Calls of `training_step` for one step of the optimizer.
        learning_rate: Learning rate of AdamW, used if no optimizer is given.
        optimizer: From torch.optim, a factory or a name; None: AdamW.
        loss_fn: As `DistributedTrainer`; None: the model is called with the batch and returns its loss, or an output
            with "loss".

    Attributes:
        model: The unwrapped model.
        config: How the loss is scaled.
        optimizer: The optimizer. Step your own scheduler after `training_step`.
        scaler: The loss scale; `scaler.get_scale()` as in PyTorch.
        accumulation_steps: As given.

    Raises:
        ConfigError: An argument is wrong, or ranks pass different ones; raised on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: AMPConfig | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        accumulation_steps: int = 1,
        learning_rate: float = _LEARNING_RATE,
        optimizer: OptimizerLike | None = None,
        loss_fn: LossLike = None,
    ) -> None:
        world = runtime.join_for_all()
        self.accumulation_steps = accumulation_steps

        def check() -> tuple[None, dict[str, Any]]:
            _check_world(world, rank, world_size)
            require_integer("DistributedAMPTrainer", "accumulation_steps", accumulation_steps, 1)
            self.config = create_default_amp_config() if config is None else config
            require(isinstance(self.config, AMPConfig), f"config must be a cyxtrain.AMPConfig(...), got {config!r}.")
            self.config.validate()
            require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}.")
            self._wrappers, self.model = unwrap(model)
            self._loss = Loss(loss_fn)
            self.scaler = LossScale(self.config)
            return None, self._make_optimizer(_optimizer(optimizer, learning_rate))

        agree_on(world, check)
        self._placement = place_model(world, self.model, self._loss, "auto")
        place_state(self.optimizer)
        rates = {ONLY: LearningRates(self.optimizer, None)}
        self._state = TrainingState(self.model, 0, rates, self.scaler, loss=self._loss)
        self._ddp = DistributedDataParallel(self._state.trained, find_unused_parameters=True)
        self._step: TrainingStep | None = None
        self._share = _CurrentStep(0, 1, self._placement)
        # Another trainer's fit may run between two calls: its gradients are not averaged here.
        self._between_calls = contextlib.ExitStack()
        self._between_calls.enter_context(self._ddp.no_sync())

    def _make_optimizer(self, optimizer: OptimizerLike) -> dict[str, Any]:
        """Make the optimizer; return facts that must be the same on every rank."""
        trained = trained_with(self.model, self._loss)
        self.optimizer = make_optimizer(optimizer, trained)
        optimizers = {ONLY: self.optimizer}
        check_trained(trained, optimizers, DistributedTrainingConfig(precision=_PRECISION))
        facts = {**model_facts(trained, self._loss), **optimizer_facts(optimizers, trained)}
        return {**facts, "accumulation_steps": self.accumulation_steps, "config": asdict(self.config)}

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._ddp.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ddp.world.size

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._ddp.world.is_first

    @property
    def step(self) -> int:
        """Steps of the optimizer so far, with those skipped because gradients overflowed."""
        return self._state.position.step

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON values by name that were loaded or saved with a checkpoint."""
        return self._state.metadata

    def training_step(self, batch: Any) -> float:
        """Compute the gradients of a micro-batch; every `accumulation_steps`-th call averages them, and steps.

        If gradients overflow 16 bits, no rank takes the step, and the loss scale falls, as with PyTorch's GradScaler.

        Args:
            batch: x, (x, y), (x, y, sample_weight) or a dictionary, of tensors or NumPy arrays, for this rank.
                It may have no samples, as in the tail of an epoch.

        Returns:
            The loss of this rank's micro-batch, as the loss function gives it, with (sum, weight) as a mean; 0 if
            nothing in it counts.

        Raises:
            ConfigError: It is not a batch, has other parts than the first one, or the model cannot take it.
            NonFiniteError: A loss is NaN or infinite, or gradients are at any scale; on every rank, with nothing
                changed.
            DistributedTrainingError: Another rank has failed, with its traceback.

        Cost: the micro-batches of a step are kept until it is complete. Since it returns a number, each call waits for
        the accelerator, which `fit(precision="fp16", accumulation_steps=...)` does not.
        """
        runtime.rejoin_after_failure()
        world = self._ddp.world
        with ending_group_on_error(world), memory_explained(world), torch.enable_grad(), self._averaging():
            rows = as_batch(batch)
            if self._step is None:
                self._step = self._open(rows)
            check_parts(rows, self._example)
            for module in (self.model, *self._loss.modules):
                if not module.training:
                    module.train()
            return self._accumulate(self._step, self._placement.place(rows))

    def _accumulate(self, step: TrainingStep, rows: Rows) -> float:
        """Accumulate a micro-batch, and step with the last one; return its loss."""
        share = self._share
        loss = 0.0
        if not share.calls:
            step.begin(share)
        share.calls += 1
        is_last = share.calls == self.accumulation_steps
        if num_rows(rows.inputs):
            share.micro_batches.append(rows)
            share.results.append(step.accumulate_micro_batch(Batch(self.step, *rows), share, is_last=is_last))
            loss = self._loss.number_of(share.results[-1].loss)
        elif is_last:
            step.join_without_rows(share)  # the other ranks wait for this rank's part of the averages
        if is_last:
            if step.finish(share, share.results) is Verdict.TAKEN:
                # Rank 0 may save them before the next step.
                self._ddp.sync_buffers()
            else:
                # All ranks have put back their buffers.
                self._ddp.buffer_rows = 0
            self._state.position.set(step=self.step + 1)
            self._discard_step()
        return loss

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Write model, optimizer, loss scale and position as one file, on rank 0; other ranks may call it.

        `load_checkpoint` reads it, of this class and of `DistributedTrainer`, and `cx.load_weights` its weights.
        Gradients of an incomplete step are not in it.

        Args:
            path: The file to write.
            include_optimizer: If False, the file is smaller, and only `cx.load_weights` reads it.
            metadata: JSON values by name to keep as well; they become part of `metadata`.

        Raises:
            CheckpointError: It could not be written; the previous file, if any, is intact.
        """
        kept = {**self.metadata, **(metadata or {})}
        if self.is_main_process:
            settings = DistributedTrainingConfig(
                accumulation_steps=self.accumulation_steps, precision=_PRECISION, amp=self.config
            )
            state = replace(self._state.to_checkpoint(self._ddp.world), config=asdict(settings), metadata=kept)
            if not include_optimizer:
                state = replace(state, optimizer={}, optimizer_groups=[])
            write_checkpoint(path, state)
        self._state.set(metadata=kept)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint. All ranks call it; rank 0 reads, the others receive.

        Args:
            path: The file to read, on rank 0; other ranks' values are ignored.

        Raises:
            CheckpointError: It does not exist, is corrupt, has no optimizer, or belongs to another model.
        """
        runtime.rejoin_after_failure()
        world = self._ddp.world
        world.check_same_call("load_checkpoint")
        self._state.load_file(world, path)
        self._discard_step()

    @contextlib.contextmanager
    def _averaging(self) -> Iterator[None]:
        """Average gradients within; between two calls they may belong to another trainer's fit.

        After an error within, the next call begins a new step.
        """
        self._between_calls.close()
        try:
            with contextlib.ExitStack() as stack:
                for wrapper in self._wrappers:
                    stack.enter_context(wrapper.suspended())
                yield
        except BaseException:
            self._discard_step()
            raise
        finally:
            self._between_calls.enter_context(self._ddp.no_sync())

    def _open(self, rows: Rows) -> TrainingStep:
        """Find out from the first batch how the model is called, and what gradients are divided by for now."""
        world = self._ddp.world
        precision = Precision(_PRECISION, self._placement.device)
        self._loss.inspect(rows.targets, are_all=False, rows_have_weights=rows.weights is not None)
        call = ModelCall(self.model, precision, rows.inputs, rows.targets, self._loss)
        # Later batches are compared by types and shapes: no sample is kept.
        self._example = rows.mapped(lambda tensor: tensor[:0])
        if num_rows(rows.inputs) and self._loss.function is None:
            metrics = NamedMetrics()
            dry_run = DryRun(world, self.model, self._loss, call, self._placement, metrics, is_of_fit=True)
            problem = dry_run.problem_of_weights(rows)
            if problem:
                warn_together(problem)
        # In 16 bits the gradients of a mean over samples have their usual size, and gradients of a sum overflow early.
        # All ranks and calls use the same number, so that gradients can be added.
        first_rows = self._agree_on_first_batch(num_rows(rows.inputs))
        self._share.global_rows = max(first_rows, 1) * self.accumulation_steps * self.world_size
        setup = ModelSetup(placement=self._placement, loss=self._loss, call=call)
        return Session(self._state, setup, self._ddp, LoggedNumbers(), is_fit=False).begin_epoch()

    def _agree_on_first_batch(self, rows: int) -> int:
        """Return how many samples rank 0 has in its first batch; count items as any rank does."""
        rule = ""
        if self._loss.items is not None and self._loss.uses_num_items:
            rule = self._loss.items.name
        facts = [each.split(" ", 1) for each in self._ddp.world.gather(f"{rows} {rule}")]
        rules = [each for _, each in facts if each]
        # A rank may have nothing to count in its first batch.
        if rules:
            self._loss.use_num_items(rule_named(rules[0], Batch(0, *self._example)))
        return int(facts[0][0])

    def _discard_step(self) -> None:
        self._share = _CurrentStep(self.step, self._share.global_rows, self._placement)
        self._ddp.discard_sync()
        self._ddp.module.zero_grad()


class _CurrentStep(StreamShare):
    """The micro-batches of one step so far, on the device, one per call that had samples, and their results."""

    def __init__(self, number: int, global_rows: int, placement: Placement) -> None:
        self.micro_batches: list[Rows] = []
        super().__init__(number, lambda: StreamStep({0: self.micro_batches}, 0), DeviceCopier(placement))
        self.global_rows = global_rows
        self.calls = 0
        self.results: list[Result] = []


def _optimizer(optimizer: OptimizerLike | None, learning_rate: float) -> OptimizerLike:
    right = is_number(learning_rate) and 0 <= learning_rate < math.inf
    require(right, f"DistributedAMPTrainer.learning_rate must be a number of at least 0, got {learning_rate!r}.")
    if optimizer is None:
        return partial(torch.optim.AdamW, lr=learning_rate)
    require(
        learning_rate == _LEARNING_RATE,
        "learning_rate is for AdamW, used if no optimizer is given: build the optimizer with it, or leave it out.",
    )
    return optimizer


def _check_world(world: World, rank: int | None, world_size: int | None) -> None:
    for name, given, own in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        require(
            given in (None, own),
            f"DistributedAMPTrainer was given {name}={given!r}, and this process has {name} {own} in the world that it "
            "has joined: a launcher or cyxtrain.init() sets it. Leave it out.",
        )
