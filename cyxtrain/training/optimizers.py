"""Optimizers as users give them: built, by a factory, or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from cyxtrain.errors import ConfigError
from cyxtrain.settings import unknown_name

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | str

_BY_NAME: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


def make_optimizer(optimizer: OptimizerLike, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer of the model's parameters.

    Args:
        optimizer: One that is built, a function of the parameters such as `torch.optim.Adam`, or a name
            ("adam", "adamw", "sgd", "rmsprop", "adagrad") with Keras's learning rates.
        model: The model, not wrapped.

    Raises:
        ConfigError: An unknown name, or something else.
    """
    if next(model.parameters(), None) is None:
        raise ConfigError("the model has no parameters: there is nothing to train.")
    if isinstance(optimizer, str):
        if optimizer.lower() not in _BY_NAME:
            raise unknown_name("cyxtrain", optimizer, list(_BY_NAME), "optimizer")
        return _BY_NAME[optimizer.lower()](model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, nn.Module):
        raise ConfigError(
            f"optimizer must be a torch.optim optimizer, got the module {type(optimizer).__name__}: the order is "
            "DistributedTrainer(model, loss_fn, optimizer)."
        )
    made: Any = optimizer(model.parameters()) if callable(optimizer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim optimizer, a function that makes one of the parameters, or a name, "
            f"got {optimizer!r}."
        )
    return made
