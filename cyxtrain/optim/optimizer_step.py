"""An optimizer's step, which an accelerator skips by itself if a gradient is not finite, and its closure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from cyxtrain.environment import torch_compat
from cyxtrain.optim.optimizers import parameters_of


class OptimizerStep:
    """Steps an optimizer: a fused one by the function that its `step` calls, any other by `optimizer.step()`.

    `step` checks every case each time; in the fit of a small model that takes half as long as the fused kernel.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._method: Any = type(optimizer).step
        is_pytorchs = self._method.__module__.startswith("torch.optim.")
        self._prepare = _PREPARE.get(type(optimizer)) if is_pytorchs else None

    def __call__(self) -> None:
        """Step the optimizer."""
        steps = self._fused_steps(None)
        if steps is not None:
            self._take(steps)
            return
        with self._unfused_where_needed():
            self._optimizer.step()

    def unless(self, skip: Tensor) -> Callable[[], None] | None:
        """Return a step that changes nothing if `skip` is 1 on the device, without waiting for the device.

        PyTorch's fused kernels read it as `found_inf`, which its GradScaler sets: float32, 0-dim, on their device.
        None: the host must know first, because the optimizer is not fused, has yet to create its state (which a
        skipped step would leave uninitialized), or hooks see each step.
        """
        steps = self._fused_steps(skip)
        return None if steps is None else partial(self._take, steps)

    def _fused_steps(self, skip: Tensor | None) -> list[Callable[[], None]] | None:
        """Return what steps each group; None: only `optimizer.step()` can. Nothing has changed yet."""
        if self._prepare is None or torch_compat.is_step_watched(self._optimizer, self._method):
            return None
        steps = []
        for group in self._optimizer.param_groups:
            if group["fused"] is not True or torch.is_tensor(group["lr"]):
                return None
            parameters = _trained(group)
            if any(each.grad.is_sparse for each in parameters):  # type: ignore[union-attr]
                return None
            states = [self._optimizer.state.get(each, {}) for each in parameters]
            step = self._prepare(group, parameters, states, skip)
            if step is None:
                return None
            steps.append(step)
        return steps

    def _take(self, steps: Sequence[Callable[[], None]]) -> None:
        with torch.no_grad():
            for step in steps:
                step()
        if "step" in vars(self._optimizer):  # a schedule of PyTorch's records the calls
            torch_compat.note_step(self._optimizer)

    @contextlib.contextmanager
    def _unfused_where_needed(self) -> Iterator[None]:
        """Do not fuse groups that fused SGD refuses: some parameters, such as unfrozen ones, have no momentum yet."""
        found = []
        for group in self._optimizer.param_groups if isinstance(self._optimizer, torch.optim.SGD) else ():
            if group["momentum"] and group["fused"]:
                trained = _trained(group)
                known = sum(self._optimizer.state.get(each, {}).get("momentum_buffer") is not None for each in trained)
                found += [group] if 0 < known < len(trained) else []
        for group in found:
            group["fused"] = None
        try:
            yield
        finally:
            for group in found:
                group["fused"] = True


def _adam_step(
    group: Mapping[str, Any], parameters: list[Tensor], states: list[Mapping[str, Any]], skip: Tensor | None
) -> Callable[[], None] | None:
    if not all("exp_avg" in state for state in states):
        return None
    beta1, beta2 = group["betas"]
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []), "step"]
    averages, squares, *largest, steps = ([state[name] for state in states] for name in names)
    return partial(
        adam,
        parameters,
        [parameter.grad for parameter in parameters],  # type: ignore[misc]
        averages,
        squares,
        largest[0] if largest else [],
        steps,
        fused=True,
        found_inf=skip,
        beta1=beta1,
        beta2=beta2,
        **{name: group[name] for name in _ADAM_SETTINGS},
    )


def _sgd_step(
    group: Mapping[str, Any], parameters: list[Tensor], states: list[Mapping[str, Any]], skip: Tensor | None
) -> Callable[[], None] | None:
    momenta = [state.get("momentum_buffer") for state in states] if group["momentum"] else []
    if any(momentum is None for momentum in momenta):
        return None
    gradients = [parameter.grad for parameter in parameters]
    settings = {name: group[name] for name in _SGD_SETTINGS}
    return partial(sgd, parameters, gradients, momenta, fused=True, found_inf=skip, **settings)  # type: ignore[arg-type]


_ADAM_SETTINGS = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")
_SGD_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")
_PREPARE = {torch.optim.Adam: _adam_step, torch.optim.AdamW: _adam_step, torch.optim.SGD: _sgd_step}


def _trained(group: Mapping[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


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
