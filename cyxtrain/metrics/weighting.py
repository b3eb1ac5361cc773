"""The loss of a part of a batch as a sum of terms over a weight, so that N ranks equal one.

Mean losses divide by the number of samples, PyTorch's weighted means by the weights of the classes that they saw. A
rank knows its own sum and weight; the step needs the weight of all ranks.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cyxtrain.config.settings import is_number
from cyxtrain.data.batches.structure import as_tensor
from cyxtrain.errors import ConfigError, brief

NO_LOSS = (
    "there is no loss: pass a loss_fn to the trainer, or let the model return a scalar or (sum, weight), an output "
    "with such a 'loss', or a dictionary of losses."
)


class Weighting(enum.Enum):
    """The divisor of the sum of a batch's terms."""

    # the number of samples, which every rank knows
    SAMPLES = "mean over samples"
    # what the loss itself counts, such as class weights: ranks add it up, in the message with the gradients if they can
    WEIGHTS = "weighted mean"
    # nothing: the loss is a sum
    NOTHING = "sum"


@dataclass
class BatchLoss:
    """The loss of this rank's part of a batch."""

    value: Tensor  # what the loss function returned, 0-dim; with a graph while training
    sum_factor: Tensor | float  # `value` times this is the sum of the terms
    weight: Tensor | float  # what that sum is divided by; a tensor if it depends on the data
    # other losses of the same samples by name: the terms of `value`, and numbers that are only reported
    parts: Mapping[str, BatchLoss] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        """The mean over this rank's part; NaN if its weight is 0."""
        if isinstance(self.weight, Tensor) and not self.weight.is_cpu:  # without waiting for it
            return (self.value * self.sum_factor / self.weight).masked_fill(self.weight == 0, math.nan)
        if not self.weight:
            return self.value * math.nan
        return self.value * self.sum_factor / self.weight

    @property
    def mean_or_zero(self) -> Tensor:
        """The mean over this rank's part; 0 if its weight is 0."""
        if isinstance(self.weight, Tensor):
            return self.value * self.sum_factor / torch.where(self.weight == 0, 1, self.weight)
        if self.sum_factor == self.weight:
            return self.value
        return self.value * self.sum_factor / (self.weight or 1)


def cleared(total: Tensor, weight: Any) -> Tensor:
    """Return a sum to train on, 0 if its weight is 0.

    If it is 0 / 0, the 0 does not depend on parameters: no factor would clear the gradients. The host does not wait for
    an accelerator: there `on_nonfinite` finds such gradients.
    """
    if isinstance(weight, Tensor) and not weight.is_cpu:
        return total.masked_fill(weight == 0, 0.0)
    if not total.requires_grad or weight:
        return total
    if bool(total.isfinite()):
        return total * 0.0
    return torch.zeros_like(total, requires_grad=True)


def weighting_of(value: Any) -> Weighting:
    """Return how a loss that a function or a model returned is weighted."""
    if not isinstance(value, tuple):
        return Weighting.SAMPLES
    weight = math.nan
    if not isinstance(value[1], str):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # None, or several numbers
            weight = float(value[1])
    if not weight >= 0:
        raise ConfigError(
            f"the loss is (sum, weight), and its weight is {brief(value[1])}: a weight is a count, of samples or "
            "tokens, and a number of at least 0. Return the sum of the terms that count, and their number."
        )
    return Weighting.WEIGHTS


def batch_loss_of(value: Any, rows: int) -> BatchLoss:
    """Return the loss that a function or a model returned: (sum, weight), a mean over samples, or one per sample."""
    if isinstance(value, tuple):
        total, weight = value
        weight = weight.detach().reshape(()) if isinstance(weight, Tensor) else float(weight)
        return BatchLoss(cleared(as_tensor(total).reshape(()), weight), 1, weight)
    value = as_tensor(value)
    if value.dim():
        value = value.mean()
    return BatchLoss(value, rows, rows)


def weight_of_classes(function: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> Tensor:
    """Return the sum of the weights of a batch's classes, 0-dim; ignored classes have weight 0."""
    valid = target != function.ignore_index
    if function.weight is None:
        return valid.sum()
    if target.is_cpu:
        return function.weight[target[valid]].sum()
    # Indexing with a mask would wait for an accelerator.
    of_each = function.weight.take(target.masked_fill(~valid, 0))
    return of_each.masked_fill_(~valid, 0.0).sum()


def loss_in_output(output: Any) -> tuple[Any, dict[str, Any]]:
    """Return (the model's own loss, its other scalars by name); without a loss, the scalars are losses to be added."""
    scalars: dict[str, Any] = {}
    if isinstance(output, Mapping) and "loss" not in output:
        scalars = _scalars_in(output, flags=False)  # True or False is not a loss to be added
        if not scalars:
            raise ConfigError(NO_LOSS)
        return None, scalars
    if isinstance(output, Mapping):
        own = output["loss"]
        scalars = _scalars_in(output, flags=True)
    elif isinstance(output, Tensor) or type(output) is tuple:
        own = output
    else:
        own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own, scalars
    if isinstance(own, tuple) and is_scalar(own):
        return own, scalars
    raise ConfigError(NO_LOSS)


def _scalars_in(output: Mapping[Any, Any], *, flags: bool) -> dict[str, Any]:
    return {str(name): value for name, value in output.items() if name != "loss" and is_scalar(value, flags)}


def is_scalar(value: Any, flags: bool = False) -> bool:
    """Return whether a value is one number, or (sum, weight); with `flags`, also whether it is True or False."""
    if type(value) is tuple:
        return len(value) == 2 and all(map(_is_one_number, value))
    return _is_one_number(value) or (flags and _is_flag(value))


def _is_one_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype is not torch.bool and not value.is_complex()
    if isinstance(value, (np.generic, np.ndarray)):
        return value.ndim == 0 and value.dtype.kind in "iuf"
    return is_number(value)


def _is_flag(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype is torch.bool
    if isinstance(value, (np.generic, np.ndarray)):
        return value.ndim == 0 and value.dtype.kind == "b"
    return isinstance(value, bool)
