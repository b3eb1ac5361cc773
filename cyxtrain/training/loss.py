"""How the loss of a batch is put together from the ranks' parts, so that N ranks equal one.

Every loss is a sum of terms over a weight: mean losses divide by the number of samples, PyTorch's weighted means
by the weights of the classes they saw. A rank knows its own sum and weight; the step needs the weight of all.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cyxtrain.data.batches import Batch
from cyxtrain.data.tree import Tree
from cyxtrain.errors import ConfigError
from cyxtrain.settings import unknown_name

LOSSES: dict[str, Callable[..., nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "nll": nn.NLLLoss,
    "bce": nn.BCELoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "mae": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
    "kl_div": nn.KLDivLoss,
}
_BY_FUNCTION: dict[Any, Callable[[], nn.Module]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
}
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
_BINARY_LOSSES = (nn.BCELoss, nn.BCEWithLogitsLoss)
_ELEMENTWISE_LOSSES = (*_BINARY_LOSSES, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)


class Weighting(enum.Enum):
    """What the sum of a batch's terms is divided by."""

    SAMPLES = "mean over samples"
    """The number of samples: known to every rank without asking."""
    TERMS = "weighted mean"
    """What the loss itself counts, such as class weights: one number is summed over ranks before backward."""
    NOTHING = "sum"
    """Nothing: the loss is a sum."""


@dataclass
class BatchLoss:
    """The loss of this rank's part of a batch.

    Attributes:
        value: What the loss function gave, 0-dim; with a graph while training.
        terms: `value` times this is the sum of the terms.
        weight: What belongs below that sum; a tensor where it came out of the data.
    """

    value: Tensor
    terms: float
    weight: Tensor | float


class Loss:
    """A loss function as the trainer uses it.

    Args:
        loss_fn: A module of `torch.nn`, one of its functions, a name, a callable of (output, target) that returns
            the mean over samples or (sum, weight), or None: the model returns its loss.

    Raises:
        ConfigError: An unknown name, or nothing that can be called.
    """

    def __init__(self, loss_fn: nn.Module | Callable[..., Any] | str | None) -> None:
        self.function = _resolve(loss_fn)
        self.weighting = Weighting.SAMPLES
        self._reduction = getattr(self.function, "reduction", None) if self.is_known else None
        self._summing: nn.Module | None = None
        self._of_each: nn.Module | Callable[..., Any] | None = None
        self.ignored: int | None = None
        """The class number that does not count, where the data have it."""
        if self._reduction == "sum":
            self.weighting = Weighting.NOTHING

    @property
    def is_known(self) -> bool:
        """Whether it is one of torch.nn, whose arithmetic we know."""
        return isinstance(self.function, nn.modules.loss._Loss) and type(self.function).__module__.startswith("torch.")

    @property
    def is_binary(self) -> bool:
        """Whether targets are 0 or 1, one per output."""
        return isinstance(self.function, _BINARY_LOSSES)

    @property
    def threshold(self) -> float:
        """Output above which a binary model says 1."""
        return 0.0 if isinstance(self.function, nn.BCEWithLogitsLoss) else 0.5

    @property
    def is_elementwise(self) -> bool:
        """Whether output and target must have one shape."""
        return isinstance(self.function, _ELEMENTWISE_LOSSES)

    @property
    def is_assumed_mean(self) -> bool:
        """Whether it is the user's own, or the model's, and taken for a mean over samples."""
        return not self.is_known and self.weighting is Weighting.SAMPLES

    def prepare_target(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns targets of the type that the loss wants: class numbers, else the model's floats."""
        if target.dtype is torch.int64 and isinstance(self.function, _CLASS_LOSSES):
            return target
        if target.is_floating_point():
            return target.to(dtype)
        if target.is_complex():
            return target
        wants_floats = self.is_known and not isinstance(self.function, _CLASS_LOSSES)
        return target.to(dtype if wants_floats else torch.int64)

    def look_at(self, targets: Tree | None, *, are_all: bool = True, rows_have_weights: bool = False) -> None:
        """Finds out what this data is weighted by. Every rank has data of the same kind, so all come to the same.

        Args:
            targets: Of all rows, or of some.
            are_all: Whether there are no others, which may hold a class number that does not count.
            rows_have_weights: Whether each row counts as much as its own weight says.

        Raises:
            ConfigError: They have, and there is no loss of each.
        """
        function = self.function
        if rows_have_weights:
            self._weigh_rows()
        if (
            not isinstance(targets, Tensor)
            or not self.is_known
            or not isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss))
        ):
            return
        if targets.is_floating_point() or targets.is_complex():
            return  # probabilities: every row counts
        may_ignore = not are_all or bool(targets.eq(function.ignore_index).any())
        self.ignored = function.ignore_index if may_ignore else None
        if self._reduction == "mean" and (function.weight is not None or self.ignored is not None):
            self.weighting = Weighting.TERMS
            # Its own mean over a part with no valid target is 0 / 0: the sum is taken instead, the weight beside it.
            self._summing = copy.copy(function)
            self._summing.reduction = "sum"

    def _weigh_rows(self) -> None:
        if self.function is None:
            raise ConfigError(
                "sample_weight and class_weight weigh the loss of each row, and this model computes its own: give the "
                "weights to the model, as part of X."
            )
        own: Any = copy.copy(self.function)
        if self.is_known:
            own.reduction = "none"
        self._of_each = own

    def look_at_result(self, result: Any, rows: int) -> None:
        """Finds out whether a function of the user's returns (sum, weight).

        Args:
            result: What it has returned.
            rows: For how many rows.

        Raises:
            ConfigError: It returns neither a tensor nor such a pair; or rows have weights, and it returns no loss of
                each.
        """
        if self._of_each is not None and not self.is_known:
            of_each = isinstance(result, Tensor) and result.dim() > 0 and result.shape[0] == rows
            if not of_each:
                found = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
                raise ConfigError(
                    "sample_weight and class_weight weigh the loss of each row: loss_fn must return one per row, "
                    f"shape ({rows},) for {rows} rows, not their mean; it returned {found}."
                )
        pair = isinstance(result, tuple) and len(result) == 2
        total = result[0] if pair else result
        if not isinstance(total, Tensor) or (pair and total.numel() != 1):
            raise ConfigError(
                "loss_fn must return a tensor, the mean over samples, or (sum, weight) with one number each; it "
                f"returned {result if pair else type(result).__name__}."
            )
        if not self.is_known and pair:
            self.weighting = Weighting.TERMS

    def check_shapes(self, output: Any, target: Tree | None) -> None:
        """Refuses shapes that PyTorch would stretch into a table of every row against every other.

        Raises:
            ConfigError: With both shapes.
        """
        if self.function is None or not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return
        if output.shape == target.shape:
            return
        if output.numel() == target.numel() == 1:
            return  # one row, whatever its shape
        longer, shorter = (output, target) if output.dim() > target.dim() else (target, output)
        hazard = longer.dim() == shorter.dim() + 1 and longer.shape[-1] == 1 and longer.shape[:-1] == shorter.shape
        if not self.is_elementwise and (self.is_known or not hazard):
            return
        shapes = [f"({', '.join(['n', *map(str, tensor.shape[1:])])})" for tensor in (output, target)]
        raise ConfigError(
            f"the model's output has shape {shapes[0]} and y has {shapes[1]}: "
            + (
                "the loss would compare every row with every other. Reshape y (y.reshape(-1, 1)), or let the model "
                "return one number per row (squeeze(-1))."
                if hazard
                else "this loss needs one shape. Change the model's last layer, or y."
            )
        )

    def __call__(self, output: Any, batch: Batch) -> BatchLoss:
        """Returns the loss of a batch."""
        target, rows = batch.targets, batch.rows
        if self.function is None:
            return BatchLoss(_models_own(output), rows, rows)
        if batch.weights is not None:
            return self._weighted(output, target, batch.weights)
        if self._summing is not None and self.weighting is Weighting.TERMS:
            assert isinstance(target, Tensor)
            return BatchLoss(self._summing(output, target), 1, self._weight_of(target))
        result = self.function(output, target)
        if isinstance(result, tuple):
            total, weight = result
            return BatchLoss(total.reshape(()), 1, weight.detach() if isinstance(weight, Tensor) else weight)
        if self.weighting is Weighting.NOTHING:
            return BatchLoss(result, 1, rows)
        return BatchLoss(result.mean() if result.dim() else result, rows, rows)

    def without_own(self, output: Any) -> Any:
        """Returns what a model gives for each row: of one that computes its own loss, everything but that."""
        if self.function is None and isinstance(output, Mapping):
            return {name: part for name, part in output.items() if name != "loss"}
        return output

    def _weighted(self, output: Any, target: Any, weights: Tensor) -> BatchLoss:
        """Returns the loss of rows that count as much as each one's weight says; the divisor is as without weights."""
        assert self._of_each is not None
        rows = len(weights)
        each = self._of_each(output, target).reshape(rows, -1)
        adds = self._reduction in ("sum", "batchmean") or self.weighting is Weighting.TERMS
        total = ((each.sum(1) if adds else each.mean(1)) * weights).sum()
        return BatchLoss(total, 1, self._weight_of(target) if self.weighting is Weighting.TERMS else rows)

    def _weight_of(self, target: Tensor) -> Tensor:
        function = self.function
        assert isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss))
        valid = target != function.ignore_index
        if function.weight is None:
            return valid.sum()
        return function.weight[target[valid]].sum()


def _resolve(loss_fn: Any) -> Any:
    if isinstance(loss_fn, str):
        if loss_fn not in LOSSES:
            raise unknown_name("cyxtrain", loss_fn, list(LOSSES), "loss")
        return LOSSES[loss_fn]()
    if isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is the class {loss_fn.__name__}; give an instance: {loss_fn.__name__}().")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn must be callable, a name or None, got {loss_fn!r}.")
    if isinstance(loss_fn, nn.Module) or loss_fn is None:
        return loss_fn
    return _BY_FUNCTION[loss_fn]() if loss_fn in _BY_FUNCTION else loss_fn


def _models_own(output: Any) -> Tensor:
    """Returns the loss that a model has computed itself."""
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif not isinstance(output, Tensor):
        output = getattr(output, "loss", None)
    if isinstance(output, Tensor) and output.numel() == 1:
        return output.reshape(())
    raise ConfigError(
        "there is no loss: give the trainer a loss_fn, or let the model return a scalar, or an output with 'loss'."
    )
