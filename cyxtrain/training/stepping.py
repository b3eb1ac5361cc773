"""An optimizer's step by PyTorch's fused kernel itself, where a step is all that is asked of it.

`optimizer.step()` finds out in each step what the kernel is to be given, for every case that there is. For a small
model that takes nearly as long as the kernel. Here the lists are made and handed over; they are the ones that `step()`
hands over, so the bits are the same.
Source: `_fused_adam` in torch/optim/adam.py, `_fused_sgd` in torch/optim/sgd.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cyxtrain import torch_compat

_Prepare = Callable[[Mapping[str, Any], list[Tensor], Mapping[Tensor, Any]], Callable[[], object] | None]
"""Takes a group of parameters, the gradient of each, and the optimizer's state; returns what steps them, or None: the
optimizer has first to make what it keeps, or more is asked of it."""

_ONE = torch.ones((), device="cpu")


class Stepping:
    """Takes the steps of an optimizer.

    Args:
        optimizer: It; `fused` or not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._method: Any = type(optimizer).step
        self._prepare: _Prepare | None = None
        kinds = [{(p.device.type, p.dtype) for p in group["params"]} for group in optimizer.param_groups]
        are_alike = all(len(kind) == 1 and next(iter(kind))[0] == "cpu" for kind in kinds)
        if are_alike and self._method.__module__.startswith("torch.optim."):
            self._prepare = _PREPARED.get(type(optimizer))

    def __call__(self) -> None:
        """Takes a step; by `optimizer.step()` where anything is unusual, as in the first one."""
        steps = [] if self._prepare is None or self._is_watched() else self._prepared(self._prepare)
        if not steps:
            with _plain(_groups_that_fused_sgd_cannot_step(self._optimizer)):
                self._optimizer.step()
            return
        with torch.no_grad():
            for step in steps:
                step()
        if "step" in vars(self._optimizer):
            torch_compat.note_step(self._optimizer)

    def _prepared(self, prepare: _Prepare) -> list[Callable[[], object]]:
        """Returns what steps each group; nothing where one is not that simple. Nothing has changed yet."""
        steps = []
        for group in self._optimizer.param_groups:
            gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            is_simple = group["fused"] is True and len(gradients) == len(group["params"])
            step = prepare(group, gradients, self._optimizer.state) if is_simple else None
            if step is None:
                return []
            steps.append(step)
        return steps

    def _is_watched(self) -> bool:
        """Returns whether somebody else has to do with each step: a hook, a profiler, another method in its place."""
        return torch_compat.is_step_watched(self._optimizer, self._method)


def _groups_that_fused_sgd_cannot_step(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns groups in which some parameters have a momentum and others, such as thawed ones, have none yet.

    The kernel makes all of them, or none: it fails in words of its own. PyTorch's other ways make each.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    found = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        known = sum(optimizer.state.get(each, {}).get("momentum_buffer") is not None for each in trained)
        if group["momentum"] and group["fused"] and 0 < known < len(trained):
            found.append(group)
    return found


@contextlib.contextmanager
def _plain(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Within, these groups are not stepped by the fused kernel."""
    for group in groups:
        group["fused"] = None
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = True


def _prepare_adam(
    group: Mapping[str, Any], gradients: list[Tensor], state: Mapping[Tensor, Any]
) -> Callable[[], object] | None:
    parameters, (beta1, beta2) = group["params"], group["betas"]
    states = [state.get(parameter, {}) for parameter in parameters]
    if group["amsgrad"] or not all(states):
        return None
    steps, averages, squares = ([each[name] for each in states] for name in ("step", "exp_avg", "exp_avg_sq"))
    numbers = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    kernel = torch_compat.fused_adamw if group["decoupled_weight_decay"] else torch_compat.fused_adam
    step = partial(kernel, parameters, gradients, averages, squares, [], steps, beta1=beta1, beta2=beta2, **numbers)
    return partial(_count_and_step, steps, step)


def _count_and_step(steps: list[Tensor], step: Callable[[], object]) -> None:
    torch_compat.foreach_add(steps, _ONE, alpha=1.0)  # a number would be made a tensor for each of them
    step()


def _prepare_sgd(
    group: Mapping[str, Any], gradients: list[Tensor], state: Mapping[Tensor, Any]
) -> Callable[[], object] | None:
    parameters, buffers = group["params"], []
    if group["momentum"]:
        buffers = [state.get(parameter, {}).get("momentum_buffer") for parameter in parameters]
        if any(buffer is None for buffer in buffers):
            return None
    numbers = {name: group[name] for name in ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")}
    return partial(torch_compat.fused_sgd, parameters, gradients, buffers, is_first_step=False, **numbers)


_PREPARED: dict[type[torch.optim.Optimizer], _Prepare] = {}
"""Without the optimizers whose kernels this version of PyTorch does not have."""
if torch_compat.foreach_add and torch_compat.fused_adam and torch_compat.fused_adamw:
    _PREPARED.update({torch.optim.Adam: _prepare_adam, torch.optim.AdamW: _prepare_adam})
if torch_compat.fused_sgd:
    _PREPARED[torch.optim.SGD] = _prepare_sgd
