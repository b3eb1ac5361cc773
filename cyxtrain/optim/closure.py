"""The closure of optimizers that evaluate the loss several times per step, such as LBFGS and SAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment import torch_compat
from cyxtrain.optim.optimizers import parameters_of


class Closure:
    """Evaluates loss and gradients, averaged over ranks, when an optimizer calls it: equally often on every rank.

    `evaluate` sets the gradients, and returns the loss. `loss` is that of an evaluation before the step, which is not
    repeated if parameters and gradients are still those.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor], loss: Tensor) -> None:
        self._optimizer, self._evaluate, self._loss = optimizer, evaluate, loss
        self._known = self._versions()

    def __call__(self) -> Tensor:
        """Return the loss."""
        if self._versions() == self._known:
            return self._loss
        with torch.enable_grad():
            self._loss = self._evaluate()
        self._known = self._versions()
        return self._loss

    def _versions(self) -> list[Any]:
        parameters = parameters_of(self._optimizer)
        gradients = [each.grad for each in parameters if each.grad is not None]
        return [*map(id, gradients), *torch_compat.versions_of(parameters), *torch_compat.versions_of(gradients)]
