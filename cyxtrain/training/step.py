"""What happens with one batch.

The order of a training step: zero the gradients; forward; the weight of the joined batch; backward, which averages
gradients over ranks while it runs; finite?; step the optimizer, then its schedule; add to the sums of the epoch.

Parameters change only after every collective of the step has succeeded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from cyxtrain import runtime
from cyxtrain.data.batches import Batch
from cyxtrain.errors import ConfigError
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.training.loss import BatchLoss, Loss, Weighting
from cyxtrain.training.nonfinite import FiniteGuard
from cyxtrain.training.totals import Totals, count_correct


class Step(Protocol):
    """Deals with a batch, and keeps what it gives."""

    def __call__(self, batch: Batch) -> None:
        """Deals with one batch."""


class TrainingStep:
    """One update of the parameters per batch.

    Args:
        ddp: The model.
        loss: Of a batch.
        optimizer: Of the model's parameters.
        scheduler: Of its learning rate, or None.
        guard: Lets a step pass, or not.
        device: Where the model computes.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        guard: FiniteGuard,
        device: torch.device,
    ) -> None:
        self._ddp = ddp
        self._loss = loss
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._guard = guard
        self._parameters = list(ddp.parameters())
        self.totals = Totals(1, device)

    def __call__(self, batch: Batch) -> None:
        """Zero, forward, backward, finite?, step, and the learning rate of the next one."""
        self._zero()
        self._guard.before_step()
        output, loss = self._forward(batch)
        self._backward(loss, self._joined_weight(loss, batch))
        value = None if loss is None else loss.value
        if not self._guard.lets_pass(batch, value, lambda: self._run_alone(batch)):
            return
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        if loss is not None:
            self.totals.add(0, loss, *count_correct(output, batch.targets, self._loss))

    def _zero(self) -> None:
        for parameter in self._parameters:  # also those that the optimizer does not have: they would add up for ever
            parameter.grad = None

    def _run_alone(self, batch: Batch) -> Tensor | None:
        """Makes this rank's own gradients of a batch; returns its loss."""
        self._zero()
        if batch.rows == 0:
            return None
        _, loss = self._forward(batch)
        assert loss is not None
        loss.value.backward()
        return loss.value.detach()

    def _forward(self, batch: Batch) -> tuple[Any, BatchLoss | None]:
        if batch.rows == 0:
            self._ddp.forward_without_batch()
            return None, None
        output = call_model(self._ddp, batch, self._loss)
        return output, self._loss(output, batch.targets, batch.rows)

    def _joined_weight(self, loss: BatchLoss | None, batch: Batch) -> float:
        """Returns what the sum of all ranks' terms is divided by."""
        if self._loss.weighting is Weighting.SAMPLES:
            return batch.joined_rows
        if self._loss.weighting is Weighting.NOTHING:
            return 1
        weight = (
            torch.as_tensor(0.0 if loss is None else loss.weight, dtype=torch.float64, device="cpu")
            .detach()
            .cpu()
            .reshape(1)
        )
        weight = weight.clone()
        dist.all_reduce(weight, group=runtime.cpu_group())
        return weight.item()

    def _backward(self, loss: BatchLoss | None, joined_weight: float) -> None:
        if loss is None:
            self._ddp.backward_without_batch()
            return
        # Gradients are averaged over ranks: N times each rank's share of the joined mean. Exactly 1 in even batches.
        # A batch in which nothing counts has no gradient.
        share = loss.terms * dist.get_world_size() / joined_weight if joined_weight else 0.0
        value = loss.value if share == 1 else loss.value * share
        self._ddp.watch(value)
        value.backward()


class EvaluationStep:
    """Sums of each batch, without gradients.

    Args:
        model: In evaluation mode.
        loss: Of a batch.
        batches: How many there are over all ranks.
        device: Where the model computes.
    """

    def __init__(self, model: nn.Module, loss: Loss, batches: int, device: torch.device) -> None:
        self._model = model
        self._loss = loss
        self.totals = Totals(batches, device)

    def __call__(self, batch: Batch) -> None:
        """Forward."""
        with torch.no_grad():
            output = call_model(self._model, batch, self._loss)
            self._loss.check_shapes(output, batch.targets)
            loss = self._loss(output, batch.targets, batch.rows)
            self.totals.add(batch.number, loss, *count_correct(output, batch.targets, self._loss))


class PredictionStep:
    """Collects the outputs of batches, without gradients.

    Args:
        model: In evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.outputs: list[Tensor] = []

    def __call__(self, batch: Batch) -> None:
        """Forward.

        Raises:
            ConfigError: The model does not return one tensor with a row per row, of one kind.
        """
        with torch.no_grad():
            output = self._model(batch.inputs)
        if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != batch.rows:
            found = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise ConfigError(
                f"predict needs a model that returns one tensor with a row per row of X; for {batch.rows} rows it "
                f"returned {found}."
            )
        first = self.outputs[0] if self.outputs else output
        if (output.shape[1:], output.dtype) != (first.shape[1:], first.dtype):
            raise ConfigError(
                f"predict needs rows of one kind; the model returned {first.dtype} {list(first.shape)}, then "
                f"{output.dtype} {list(output.shape)}."
            )
        self.outputs.append(output.cpu())


def call_model(model: nn.Module, batch: Batch, loss: Loss) -> Any:
    """Returns the model's output; a model that computes its own loss is given the targets too."""
    if loss.function is None and batch.targets is not None:
        return model(batch.inputs, batch.targets)
    return model(batch.inputs)


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Every module gets its own mode back, training or evaluation, whatever happens within."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
