"""An optimizer's step, which an accelerator skips by itself if a gradient is not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment import torch_compat


class OptimizerStep:
    """Calls `optimizer.step()`, fused or not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._method: Any = type(optimizer).step
        self._is_pytorchs = self._method.__module__.startswith("torch.optim.")

    def __call__(self) -> None:
        """Step the optimizer."""
        with _unfused(self._groups_with_some_momenta()):
            self._optimizer.step()

    def unless(self, skip: Tensor) -> Callable[[], None] | None:
        """Return a step that changes nothing if `skip` is 1 on the device, without waiting for the device.

        PyTorch's fused kernels read `found_inf`, as its GradScaler sets it.

        Args:
            skip: Float32, 0-dim, on the device of the parameters.

        Returns:
            None if the host must know first: the optimizer is not fused, has yet to create its state (which a skipped
            step would leave uninitialized), or hooks see each step.
        """
        if not self._is_pytorchs or torch_compat.is_step_watched(self._optimizer, self._method):
            return None
        for group in self._optimizer.param_groups:
            if group.get("fused") is not True or torch.is_tensor(group["lr"]):
                return None
            states = [self._optimizer.state.get(each, {}) for each in _trained(group)]
            if group.get("momentum") != 0 and any(not each or None in each.values() for each in states):
                return None
        return partial(self._step_with, skip)

    def _step_with(self, found_inf: Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.found_inf = found_inf
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf

    def _groups_with_some_momenta(self) -> list[dict[str, Any]]:
        """Return the groups that fused SGD refuses: some parameters, such as unfrozen ones, have no momentum yet."""
        found = []
        for group in self._optimizer.param_groups if isinstance(self._optimizer, torch.optim.SGD) else ():
            if group["momentum"] and group["fused"]:
                trained = _trained(group)
                known = sum(self._optimizer.state.get(each, {}).get("momentum_buffer") is not None for each in trained)
                found += [group] if 0 < known < len(trained) else []
        return found


def _trained(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


@contextlib.contextmanager
def _unfused(groups: list[dict[str, Any]]) -> Iterator[None]:
    for group in groups:
        group["fused"] = None
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = True
