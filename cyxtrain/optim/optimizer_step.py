"""An optimizer's step, which an accelerator can skip without the host, and an optimizer's closure."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment import torch_compat
from cyxtrain.optim.optimizers import parameters_of

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class OptimizerStep:
    """An optimizer's step: without PyTorch's wrappers if the optimizer is fused, else `optimizer.step()`.

    The wrappers call hooks and the profiler; in the fit of a small model they take half as long as the fused kernel.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._method: Any = type(optimizer).step
        is_pytorchs = type(optimizer) in _FUSED and self._method.__module__.startswith("torch.optim.")
        self._unwrapped: Any = None
        if is_pytorchs:
            self._unwrapped = inspect.unwrap(self._method)

    def __call__(self) -> None:
        """Step the optimizer."""
        step = self.unless(None)
        if step is not None:
            step()
            return
        with self._unfused_where_needed():
            self._optimizer.step()

    def unless(self, skip: Tensor | None) -> Callable[[], None] | None:
        """Return a step that changes nothing if `skip` is 1 on the device, without waiting for the device.

        PyTorch's fused kernels read it as `found_inf`, which its GradScaler sets: float32, 0-dim, on their device.
        None: the host must know first, because the optimizer is not fused, has yet to create its state (which a
        skipped step would leave uninitialized), or hooks see each step.
        """
        if self._is_fused() and all(self._has_state(group) for group in self._optimizer.param_groups):
            return partial(self._step_unwrapped, skip)
        return None

    def _is_fused(self) -> bool:
        """Return whether all groups are fused, and nothing sees each call of `optimizer.step`."""
        if self._unwrapped is None or torch_compat.is_step_watched(self._optimizer, self._method):
            return False
        groups = self._optimizer.param_groups
        return all(group["fused"] is True and not torch.is_tensor(group["lr"]) for group in groups)

    def _has_state(self, group: Mapping[str, Any]) -> bool:
        name = "exp_avg"
        if isinstance(self._optimizer, torch.optim.SGD):
            name = "momentum_buffer"
            if not group["momentum"]:
                return True
        state = self._optimizer.state
        return all(state.get(parameter, {}).get(name) is not None for parameter in _trained(group))

    def _step_unwrapped(self, skip: Tensor | None) -> None:
        optimizer: Any = self._optimizer
        assert self._unwrapped is not None
        optimizer.found_inf = skip  # the fused kernel reads it if it is set
        try:
            with torch.no_grad():
                self._unwrapped(optimizer)
        finally:
            del optimizer.found_inf
        if "step" in vars(optimizer):  # a schedule of PyTorch's records the calls
            torch_compat.note_step(optimizer)

    @contextlib.contextmanager
    def _unfused_where_needed(self) -> Iterator[None]:
        """Do not fuse groups that fused SGD refuses."""
        refused = []
        if isinstance(self._optimizer, torch.optim.SGD):
            refused = [group for group in self._optimizer.param_groups if self._lacks_some_momentum(group)]
        for group in refused:
            group["fused"] = None
        try:
            yield
        finally:
            for group in refused:
                group["fused"] = True

    def _lacks_some_momentum(self, group: Mapping[str, Any]) -> bool:
        """Return whether some parameters, such as unfrozen ones, have no momentum yet, and others have."""
        if not (group["momentum"] and group["fused"]):
            return False
        trained = _trained(group)
        state = self._optimizer.state
        count = sum(state.get(parameter, {}).get("momentum_buffer") is not None for parameter in trained)
        return 0 < count < len(trained)


def _trained(group: Mapping[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


class Closure:
    """The function that an optimizer calls for loss and gradients; equally often on every rank.

    `evaluate` sets the gradients, averaged over ranks, and returns the loss. `loss` is the result of an evaluation
    before the step, which is not repeated while parameters and gradients are unchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor], loss: Tensor) -> None:
        self._optimizer = optimizer
        self._evaluate = evaluate
        self._loss = loss
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
