"""An optimizer's step by PyTorch's fused kernel itself, where a step is all that is asked of it.

`optimizer.step()` finds out in each step what the kernel is to be given, for every case that there is. For a small
model that takes nearly as long as the kernel. Here the lists are made and handed over; they are the ones that `step()`
hands over, so the bits are the same.
Source: `_fused_adam` in torch/optim/adam.py, `_fused_sgd` in torch/optim/sgd.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment import torch_compat

_Prepare = Callable[
    [Mapping[str, Any], list[Tensor], list[Tensor], Mapping[Tensor, Any], Tensor | None], Callable[[], object] | None
]
"""Takes a group's options, parameters of one kind, the gradient of each, the optimizer's state, and a tensor that is 1
where the device skips the step, or None; returns what steps them, or None: the optimizer has first to make what it
keeps, or more is asked of it."""

_ONE = torch.ones((), device="cpu")


class FusedStep:
    """Takes the steps of an optimizer.

    Args:
        optimizer: It; `fused` or not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._method: Any = type(optimizer).step
        self._prepare: _Prepare | None = None
        kinds = [{(p.device, p.dtype) for p in group["params"]} for group in optimizer.param_groups]
        self._is_on_cpu = any(device.type == "cpu" for kind in kinds for device, _ in kind)
        is_fit = not self._is_on_cpu or all(len(kind) == 1 for kind in kinds)
        if is_fit and self._method.__module__.startswith("torch.optim."):
            self._prepare = _PREPARED.get(type(optimizer))

    def __call__(self) -> None:
        """Takes a step; by `optimizer.step()` where anything is unusual, as in the first one."""
        steps = [] if self._prepare is None or self._is_watched() else self._prepared(self._prepare)
        if not steps:
            with _plain(_groups_that_fused_sgd_cannot_step(self._optimizer)):
                self._optimizer.step()
            return
        self._take(steps)

    def unless(self, skip: Tensor) -> Callable[[], None] | None:
        """Return what takes a step on the device, unless `skip` is 1 there: the host need not know it.

        A skipped step changes nothing: neither parameters, nor what the optimizer keeps. None: this step is one for
        `optimizer.step()`, as the first one is, or hooks have to see it.

        Args:
            skip: Float32, 0-dim, on the device of the parameters.
        """
        if self._prepare is None or self._is_on_cpu or self._is_watched(by_profiler=False):
            return None
        steps = self._prepared(self._prepare, skip)
        return partial(self._take, steps) if steps else None

    def _take(self, steps: Sequence[Callable[[], object]]) -> None:
        with torch.no_grad():
            for step in steps:
                step()
        if "step" in vars(self._optimizer):
            torch_compat.note_step(self._optimizer)

    def _prepared(self, prepare: _Prepare, skip: Tensor | None = None) -> list[Callable[[], object]]:
        """Returns what steps each group; nothing where one is not that simple. Nothing has changed yet."""
        steps = []
        for group in self._optimizer.param_groups:
            gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            is_simple = len(gradients) == len(group["params"]) if self._is_on_cpu else not torch.is_tensor(group["lr"])
            if group["fused"] is not True or not is_simple:
                return []
            kinds = [(group["params"], gradients)] if self._is_on_cpu else _kinds(group["params"])
            for parameters, own in kinds:
                step = prepare(group, parameters, own, self._optimizer.state, skip)
                if step is None:
                    return []
                steps.append(step)
        return steps

    def _is_watched(self, *, by_profiler: bool = True) -> bool:
        """Returns whether somebody else has to do with each step: a hook, a profiler, another method in its place."""
        return torch_compat.is_step_watched(self._optimizer, self._method, by_profiler=by_profiler)


def _kinds(parameters: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return (parameters, gradients) of each device and type: a kernel steps those of one; without a gradient, none."""
    found: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own, gradients = found.setdefault((parameter.device, parameter.dtype), ([], []))
            own.append(parameter)
            gradients.append(parameter.grad)
    return list(found.values())


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
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Mapping[Tensor, Any],
    skip: Tensor | None,
) -> Callable[[], object] | None:
    beta1, beta2 = group["betas"]
    states = [state.get(parameter, {}) for parameter in parameters]
    if group["amsgrad"] or not all(states):
        return None
    steps, averages, squares = ([each[name] for each in states] for name in ("step", "exp_avg", "exp_avg_sq"))
    numbers = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    kernel = torch_compat.fused_adamw if group["decoupled_weight_decay"] else torch_compat.fused_adam
    if skip is not None:
        numbers["found_inf"] = skip
    step = partial(kernel, parameters, gradients, averages, squares, [], steps, beta1=beta1, beta2=beta2, **numbers)
    return partial(_count_and_step, steps, step, skip)


def _count_and_step(steps: list[Tensor], step: Callable[[], object], skip: Tensor | None) -> None:
    if steps[0].is_cpu:
        torch_compat.foreach_add(steps, _ONE, alpha=1.0)  # a number would be made a tensor for each of them
    else:
        torch_compat.foreach_add(steps, 1)
    step()
    if skip is not None:
        torch_compat.foreach_sub(steps, [skip] * len(steps))


def _prepare_sgd(
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Mapping[Tensor, Any],
    skip: Tensor | None,
) -> Callable[[], object] | None:
    buffers = []
    if group["momentum"]:
        buffers = [state.get(parameter, {}).get("momentum_buffer") for parameter in parameters]
        if any(buffer is None for buffer in buffers):
            return None
    numbers = {name: group[name] for name in ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")}
    if skip is not None:
        numbers["found_inf"] = skip
    return partial(torch_compat.fused_sgd, parameters, gradients, buffers, is_first_step=False, **numbers)


_PREPARED: dict[type[torch.optim.Optimizer], _Prepare] = {}
"""Without the optimizers whose kernels this version of PyTorch does not have."""
if torch_compat.foreach_add and torch_compat.foreach_sub and torch_compat.fused_adam and torch_compat.fused_adamw:
    _PREPARED.update({torch.optim.Adam: _prepare_adam, torch.optim.AdamW: _prepare_adam})
if torch_compat.fused_sgd:
    _PREPARED[torch.optim.SGD] = _prepare_sgd
