"""Gradient clipping; all ranks have the same averages, and clip them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import torch_compat
from cyxtrain.optim.optimizers import parameters_of
from cyxtrain.parallel.exchange import multiply
from cyxtrain.parallel.finite import values_of
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients

# Changes the gradients of parameters in place. Returns the norms before, if it computes them, by optimizer name ("" for
# all parameters).
Clip = Callable[[Sequence[nn.Parameter]], Mapping[str, Tensor]]

_LEAST_NORM = 1e-3


def make_clip(config: DistributedTrainingConfig, optimizers: Mapping[str, torch.optim.Optimizer]) -> Clip | None:
    """Return the clipping that a config asks for, or None.

    A config may have a limit for each of several optimizers, by name: it is for the parameters of this one.
    """
    setting = next((name for name in _CLIPS if getattr(config, name) is not None), None)
    if setting is None:
        return None
    function, argument = _CLIPS[setting]
    given = getattr(config, setting)
    limits = {"": given}
    if isinstance(given, Mapping):
        limits = {name: limit for name, limit in given.items() if name in optimizers}

    def clip(parameters: Sequence[nn.Parameter]) -> dict[str, Tensor]:
        norms = {}
        for name, limit in limits.items():
            clipped = parameters_of(optimizers[name]) if name else parameters
            values = [_used_rows(each) for each in clipped if each.grad is not None]
            norm = function(values, **{argument: limit}) if values else None
            if norm is not None:
                norms[name] = norm
        return norms

    return clip


def _used_rows(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter, or its rows in a sparse gradient; changing their `.grad` changes the gradient."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter
    # Before that, an element may be in several parts, whose norm is not its own.
    parameter.grad = parameter.grad.coalesce()
    rows = nn.Parameter(parameter.detach()[parameter.grad.indices()[0]])
    rows.grad = parameter.grad.values()
    return rows


def clip_adaptive(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Limit the norm of each unit's gradient to `factor` times the norm of its weights.

    A norm of weights below 0.001 counts as 0.001. A unit feeds one output: a row of a matrix, a filter of a
    convolution, an element of a vector such as a bias. Cost: weights and gradients are read once more.
    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization (2021), section 4.1.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            limits = unit_norms(parameter.detach()).clamp_(min=_LEAST_NORM).mul_(factor)
            norms = unit_norms(parameter.grad)
            parameter.grad.mul_(torch.where(norms > limits, limits / norms, 1.0))  # exactly 1 within the limit


_CLIPS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "clip_norm": (nn.utils.clip_grad_norm_, "max_norm"),
    "clip_value": (nn.utils.clip_grad_value_, "clip_value"),
    "clip_adaptive": (clip_adaptive, "factor"),
}
"""The function that clips, and its argument for the limit, by setting."""


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply all gradients by a number, or by a 0-dim float64 tensor on their device without a wait."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_cpu:  # one call for all tensors is not faster there
            gradient.mul_(factor)
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            parameter.grad = gradient
        kinds.setdefault((gradient.dtype, gradient.device), []).append(values_of(gradient))
    for (dtype, _), gradients in kinds.items():
        if not isinstance(factor, Tensor):
            torch_compat.multiply_all(gradients, factor)
        elif dtype.itemsize > 2:
            torch_compat.multiply_all(gradients, factor.to(dtype))
        else:
            for gradient in gradients:
                multiply(gradient, factor)


def fill_gradients(parameters: Sequence[nn.Parameter], model: nn.Module) -> None:
    """Give a model's trained parameters gradients of 0 if none has any.

    No sample counts in such a step, which is still taken. A sparse gradient has no rows then, and stays None.
    """
    if any(each.grad is not None for each in parameters):
        return
    sparse = {id(each) for each in makes_sparse_gradients(model).values()}
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in sparse:
            parameter.grad = torch.zeros_like(parameter)


def gradient_norm(model: nn.Module) -> Tensor | None:
    """Return the norm of all gradients as one vector, 0-dim; None if there are none."""
    gradients = [values_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return None
    return nn.utils.get_total_norm(gradients)


def unit_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each unit, in a shape that broadcasts to the tensor's."""
    if tensor.dim() <= 1:
        return tensor.abs()
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True)
    return norms
