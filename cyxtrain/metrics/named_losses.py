"""Losses by name, and the modules of PyTorch's loss functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cyxtrain.config.settings import unknown_name
from cyxtrain.errors import ConfigError, brief

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


def loss_function(loss_fn: Any) -> Any:
    """Return the callable that a user means: a module, a function, or None if the model returns its loss."""
    if isinstance(loss_fn, str):
        if loss_fn not in LOSSES:
            raise unknown_name("cyxtrain", loss_fn, list(LOSSES), "loss")
        return LOSSES[loss_fn]()
    kind = loss_fn if isinstance(loss_fn, type) else type(loss_fn)
    if issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(
            f"loss_fn is the optimizer {kind.__name__}: the order is DistributedTrainer(model, loss_fn, optimizer)."
        )
    if isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is the class {kind.__name__}; pass an instance: {kind.__name__}().")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn must be callable, a name or None, got {brief(loss_fn)}.")
    if isinstance(loss_fn, nn.Module) or loss_fn is None:
        return loss_fn
    if loss_fn in _BY_FUNCTION:
        return _BY_FUNCTION[loss_fn]()
    return loss_fn


def name_of_loss(loss_fn: Any) -> str:
    """Return a loss as a name."""
    if isinstance(loss_fn, Mapping):
        named = [f"{name}: {name_of_loss(each)}" for name, each in loss_fn.items() if each is not None]
        return ", ".join(named).join("{}")
    if loss_fn is None or isinstance(loss_fn, str):
        return loss_fn or "the model's own"
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))
