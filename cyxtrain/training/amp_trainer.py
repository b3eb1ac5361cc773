"""Mixed precision in a loop of one's own: a call for each micro-batch.

    trainer = cx.DistributedAMPTrainer(model, accumulation_steps=4)
    for batch in loader:
        loss = trainer.training_step(batch)

`fit(precision="fp16", accumulation_steps=4)` does the same without the loop, and deals the data, too.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.checkpoint.checkpoint_file import write_checkpoint
from cyxtrain.config import AMPConfig, DistributedTrainingConfig, create_default_amp_config
from cyxtrain.config.settings import is_number, require, require_integer
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.collate import as_batch, check_parts
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.errors import ConfigError, NonFiniteError, on_all_ranks, shortened, warn
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.num_items import rule_named
from cyxtrain.metrics.weighting import Weighting
from cyxtrain.optim.clipping import multiply_gradients
from cyxtrain.optim.learning_rates import LearningRates
from cyxtrain.optim.optimizers import OptimizerLike, make_optimizer, place_state
from cyxtrain.optim.precision import LossScale, Precision
from cyxtrain.parallel import DistributedDataParallel, gathering_alone, unwrap
from cyxtrain.parallel.finite import all_finite, values_of
from cyxtrain.training.inputs.checks import check_model, check_optimizer, check_precision
from cyxtrain.training.inputs.facts import model_facts, optimizer_facts
from cyxtrain.training.inputs.plan import LossLike, place_model
from cyxtrain.training.inputs.weight_check import WeightCheck, warning_of
from cyxtrain.training.model.buffers import BuffersKept
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.snapshot import snapshot
from cyxtrain.training.state import TrainingState
from cyxtrain.training.trained import trained_with
from cyxtrain.world import runtime
from cyxtrain.world.agreement import agree_on, ending_group_on_error

_PRECISION = "fp16"
_LEARNING_RATE = 1e-3
"""Of the constructor: whoever gives an optimizer has not given one."""


class DistributedAMPTrainer:
    """Trains in 16 bits with a scaled loss, a micro-batch per call, on every rank of the world.

    Gradients are weighted by rows, as `fit` weights them: N ranks with batches of b rows, also of different lengths,
    train as one rank does with all of them. Every rank makes the trainer, and calls `training_step` equally often.

    Args:
        model: Any `nn.Module`; a wrapped one is unwrapped. Parameters and buffers become rank 0's.
        config: How the loss is scaled; None: `create_default_amp_config()`.
        rank: None, or this process's rank in the world that it has joined: this argument does not choose it.
        world_size: As `rank`: None, or how many ranks there are.
        accumulation_steps: Calls of `training_step` for one step of the optimizer.
        learning_rate: Of AdamW, where no optimizer is given.
        optimizer: From torch.optim, a factory or a name; None: AdamW.
        loss_fn: As `DistributedTrainer`; None: the model is called with the batch and returns its loss, or an output
            with "loss".

    Attributes:
        model: Not wrapped.
        config: How the loss is scaled.
        optimizer: Of its parameters; a scheduler of yours may step after `training_step` has.
        scaler: Of the loss; `scaler.get_scale()` as in PyTorch.
        accumulation_steps: As given.

    Raises:
        ConfigError: Something cannot work, or ranks give different things; on every rank.
    """

    _call: ModelCall | None = None

    def __init__(
        self,
        model: nn.Module,
        config: AMPConfig | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        accumulation_steps: int = 1,
        learning_rate: float = 1e-3,
        optimizer: OptimizerLike | None = None,
        loss_fn: LossLike = None,
    ) -> None:
        runtime.join_for_all()
        self.accumulation_steps = accumulation_steps

        def plan() -> tuple[None, dict[str, Any]]:
            _check_world(rank, world_size)
            require_integer("DistributedAMPTrainer", "accumulation_steps", accumulation_steps, 1)
            amp = create_default_amp_config() if config is None else config
            require(isinstance(amp, AMPConfig), f"config must be a cyxtrain.AMPConfig(...), got {config!r}.")
            amp.validate()
            require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}.")
            self._wrappers, self.model = unwrap(model)
            self.config, self._loss, self.scaler = amp, Loss(loss_fn), LossScale(amp)
            trained = trained_with(self.model, self._loss)
            self.optimizer = make_optimizer(_optimizer(optimizer, learning_rate), trained)
            _check(trained, self.optimizer)
            facts = {**model_facts(trained, self._loss), **optimizer_facts(self.optimizer, trained)}
            return None, {**facts, "accumulation_steps": accumulation_steps, "config": asdict(amp)}

        agree_on(plan)
        self._placement = place_model(self.model, self._loss, "auto")
        place_state(self.optimizer)
        rates = LearningRates(self.optimizer, None)
        self._state = TrainingState(self.model, self.optimizer, 0, rates, self.scaler, loss=self._loss)
        self._ddp = DistributedDataParallel(self._state.trained, find_unused_parameters=True)
        self._buffers = BuffersKept(self._ddp.module)
        self._parts: list[tuple[float, float]] = []
        self._at_rest = contextlib.ExitStack()
        self._at_rest.enter_context(self._ddp.no_sync())

    @property
    def rank(self) -> int:
        """This process's."""
        return runtime.get_rank()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return runtime.get_world_size()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return runtime.is_master()

    @property
    def step(self) -> int:
        """Steps of the optimizer so far; those that were not taken, because gradients overflowed, count too."""
        return self._state.position.step

    @property
    def metadata(self) -> dict[str, Any]:
        """What the checkpoint had that was loaded, or was saved with: JSON values by name."""
        return self._state.metadata

    def training_step(self, batch: Any) -> float:
        """Makes the gradients of a micro-batch; every `accumulation_steps`-th call averages them, and steps.

        Where gradients overflow 16 bits no step is taken, on any rank, and the loss scale falls, as PyTorch's
        GradScaler has it.

        Args:
            batch: x, (x, y), (x, y, sample_weight) or a dictionary, of tensors or NumPy arrays: this rank's own.
                It may have no rows, as in the tail of an epoch.

        Returns:
            The loss of this rank's micro-batch, as the loss function gives it; 0 where nothing in it counts.

        Raises:
            ConfigError: That is no batch, has other parts than the first one, or the model cannot take it.
            NonFiniteError: A loss is NaN or infinite, or gradients are whatever the scale; on every rank, with nothing
                changed.
            DistributedTrainingError: Another rank has failed, with its traceback.

        Cost: in the last call of a step, beside the gradients, a sum of one number. Since it returns a number, each
        call waits for the forward on an accelerator: `fit(precision="fp16", accumulation_steps=...)` does not.
        """
        with ending_group_on_error(), memory_explained(), torch.enable_grad(), contextlib.ExitStack() as stack:
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.suspended())
            stack.enter_context(self._at_work())
            rows = as_batch(batch)
            if self._call is None:
                self._open(rows)
            check_parts(rows, self._example)
            for module in (self.model, *self._loss.modules):
                if not module.training:
                    module.train()
            if not self._parts:
                self._buffers.keep()
                self._ddp.expect_scale(self.scaler.of_each(self.world_size))
            is_last = len(self._parts) == self.accumulation_steps - 1
            with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                batch = Batch(self.step, *self._placement.place(rows))
                loss = self._accumulate(batch, is_last=is_last) if batch.rows else self._take_part(is_last=is_last)
            if is_last:
                self._update()
            return loss

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes model, optimizer, loss scale and position as one file: rank 0 does, whether others call it or not.

        `load_checkpoint` reads it, also that of a `DistributedTrainer`, and `cx.load_weights` its weights. Gradients
        that wait for the rest of their step are not in it.

        Args:
            path: Of the file.
            include_optimizer: Without, the file is smaller, and only `cx.load_weights` reads it.
            metadata: What else to keep, JSON values by name; it is part of `metadata` from now on.

        Raises:
            CheckpointError: It could not be written; what was there before is still there.
        """
        kept = {**self.metadata, **(metadata or {})}
        if self.is_main_process:
            settings = DistributedTrainingConfig(
                accumulation_steps=self.accumulation_steps, precision=_PRECISION, amp=self.config
            )
            state = replace(self._state.to_checkpoint(), config=asdict(settings), metadata=kept)
            write_checkpoint(path, state if include_optimizer else replace(state, optimizer={}, optimizer_groups=[]))
        self._state.metadata = kept

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Goes back to a checkpoint. All ranks call it; rank 0 reads, the others receive.

        Args:
            path: Of the file, on rank 0; what other ranks give is not used.

        Raises:
            CheckpointError: There is none, it is damaged, it has no optimizer, or it belongs to another model.
        """
        runtime.roll_call("load_checkpoint")
        self._state.load_file(path)
        self._zero()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Within, gradients are averaged; not between two calls, when they may be those of another trainer's fit.

        What fails within leaves no half of a step behind: the next call begins one.
        """
        self._at_rest.close()
        try:
            yield
        except BaseException:
            self._zero()
            raise
        finally:
            self._at_rest.enter_context(self._ddp.no_sync())

    def _open(self, rows: Rows) -> None:
        """Finds out how the model is called, and what gradients are divided by until all are there."""
        precision = Precision(_PRECISION, self._placement.device)
        self._loss.look_at(rows.targets, are_all=False, rows_have_weights=rows.weights is not None)
        self._call = ModelCall(self.model, precision, rows.inputs, rows.targets, self._loss)
        self._example = rows.mapped(lambda tensor: tensor[:0])
        if num_rows(rows.inputs) and self._loss.function is None:
            self._check_weights(Batch(0, *self._placement.place(rows)))
        own = "" if self._loss.items is None or not self._loss.obeys_items else self._loss.items.name
        known = next(filter(None, runtime.gather_texts(own)), "")  # a rank may have nothing to count in its first batch
        if known:
            self._loss.obey_items(rule_named(known, Batch(0, *self._example)))
        # In 16 bits the mean over a micro-batch has the size that it has elsewhere; its sum would overflow early. One
        # number for all ranks and calls, so that gradients can be added.
        unit = torch.tensor([max(float(num_rows(rows.inputs)), 1.0)], dtype=torch.float64, device="cpu")
        dist.broadcast(unit, 0, group=runtime.cpu_group())
        self._unit = unit.item()

    def _check_weights(self, batch: Batch) -> None:
        """Finds out what the model counts, and warns if nobody knows; it leaves no trace."""
        assert self._call is not None
        check = WeightCheck(self.model, self._loss, self._call, batch)
        owners = [self.model, *self._loss.functions]
        with snapshot(owners, self._placement.device, copies=True), torch.no_grad(), gathering_alone():
            for module in (self.model, *self._loss.modules):
                module.eval()
            self._loss.warning = warning_of(check.find_items) or warning_of(check.find_weights)
        if self._loss.warning and self.is_main_process:
            warn(self._loss.warning)

    def _take_part(self, *, is_last: bool) -> float:
        """Does what the other ranks wait for, without a row."""
        self._parts.append((0.0, 0.0))
        if is_last:
            self._ddp.forward_without_batch()
            self._ddp.backward_without_batch()
        return 0.0

    def _accumulate(self, batch: Batch, *, is_last: bool) -> float:
        """Adds the gradients of a micro-batch to those that wait; returns its loss."""
        assert self._call is not None
        output = self._call(self._ddp.forward, batch)
        self._loss.check_shapes(output, batch.targets)
        loss = self._loss(output, batch)
        require(
            not (self._loss.weightings and self._loss.counts_terms),
            "DistributedAMPTrainer does not know what several losses count before a step is complete: use fit, or "
            "return one loss as (sum, weight).",
        )
        value, weight, terms = _on_host(loss.value, loss.weight, loss.terms)
        if not weight and not self._loss.is_known:  # nothing counts: the loss may be 0 / 0, and so its gradients
            self._parts.append((0.0, 0.0))
            if is_last:
                self._ddp.backward_without_batch()
            return 0.0
        self._parts.append((value, weight))
        self._ddp.watch(loss.value)
        factor = terms / (self._unit * self.accumulation_steps) * self.scaler.of_each(self.world_size)
        (loss.value * factor).backward()
        if self._loss.weighting is Weighting.NOTHING:
            return value
        return value * terms / weight if weight else 0.0

    def _update(self) -> None:
        """Unscale, finite?, and the next loss scale; step; zero."""
        finite, scale = self._ddp.is_finite(), self.scaler.value
        overflowed = not finite and self._ddp.losses_are_finite()
        can_fall = self.scaler.can_fall
        self.scaler.update(overflowed=not finite)
        if finite:
            self._weigh(scale)
            self.optimizer.step()
            self._ddp.sync_buffers()  # rank 0 may save them before the next step
        else:
            self._buffers.bring_back()
            self._ddp.buffer_rows = 0  # all ranks hold the same again
            if not (overflowed and can_fall):
                self._refuse(scale)
        self._state.position.step += 1
        self._zero()

    def _weigh(self, scale: float) -> None:
        """Makes the gradients those of the mean over what all ranks have counted; exactly as they are in even ones."""
        weight = torch.tensor([sum(weight for _, weight in self._parts)], dtype=torch.float64, device="cpu")
        dist.all_reduce(weight, group=runtime.cpu_group())
        counted = 1.0 if self._loss.weighting is Weighting.NOTHING else weight.item()
        ones = self._unit * self.accumulation_steps * self.world_size
        multiplier = scale / self.world_size  # of each rank's loss: LossScale.of_each, before the scale went on
        factor = ones / counted / multiplier if counted else 0.0
        multiply_gradients(self._ddp.module.parameters(), factor)

    def _refuse(self, scale: float) -> None:
        """Raises on every rank what no smaller scale would cure."""
        wrong = [str(value) for value, _ in self._parts if not math.isfinite(value)]
        everyone = runtime.gather_texts(wrong[0] if wrong else "")
        ranks = [rank for rank, text in enumerate(everyone) if text]
        named = self._ddp.module.named_parameters()
        spoilt = shortened(name for name, p in named if p.grad is not None and not all_finite([values_of(p.grad)]))
        words = "; ".join(f"on rank {rank}, the loss is {everyone[rank]}" for rank in ranks)
        remedy = "look for 0/0, log(0) and sqrt(0) in model and loss, and at the data"
        if not ranks:
            words = f"gradients are not finite ({spoilt}), at a loss scale of {scale:g} that falls no more"
            remedy = "give AMPConfig use_dynamic_scaling=True and a smaller initial_scale, or lower the learning rate"
        self._zero()
        error = NonFiniteError(
            f"step {self.step + 1}: {words}. The step was not taken: the model is as before. In 16 bits numbers end at "
            f"65,504: {remedy}; fit(precision='bf16') has the range of float32.",
            rank=ranks[0] if len(ranks) == 1 else None,
            during=f"step {self.step + 1}",
        )
        raise on_all_ranks(error)

    def _zero(self) -> None:
        self._parts = []
        self._ddp.forget()
        self._ddp.module.zero_grad()


def _on_host(*numbers: Tensor | float) -> list[float]:
    """Returns numbers of a device, or of the host; an accelerator is waited for once."""
    alone = [each.detach() if isinstance(each, Tensor) else each for each in numbers]
    there = {at: each for at, each in enumerate(alone) if isinstance(each, Tensor) and not each.is_cpu}
    found = torch.stack([each.double().reshape(()) for each in there.values()]).tolist() if there else []
    copied = dict(zip(there, found, strict=True))
    return [copied[at] if at in there else float(each) for at, each in enumerate(alone)]


def _optimizer(optimizer: OptimizerLike | None, learning_rate: float) -> OptimizerLike:
    right = is_number(learning_rate) and 0 <= learning_rate < math.inf
    require(right, f"DistributedAMPTrainer.learning_rate must be a number of at least 0, got {learning_rate!r}.")
    if optimizer is None:
        return partial(torch.optim.AdamW, lr=learning_rate)
    require(
        learning_rate == _LEARNING_RATE,
        "learning_rate is that of AdamW, where no optimizer is given: build the optimizer with it, or leave it out.",
    )
    return optimizer


def _check(trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    check_model(trained)
    check_optimizer(optimizer, trained)
    check_precision(trained, _PRECISION)


def _check_world(rank: int | None, world_size: int | None) -> None:
    """Refuses to be somebody else than this process is."""
    for name, given, own in (
        ("rank", rank, runtime.get_rank()),
        ("world_size", world_size, runtime.get_world_size()),
    ):
        if given is not None and given != own:
            raise ConfigError(
                f"DistributedAMPTrainer was given {name}={given!r}, and this process has {name} {own} in the world "
                "that it has joined: a launcher or cyxtrain.init() says who is who. Leave it out."
            )
