"""Gradients that are made smaller where they are too large: all ranks hold the same averages, and come to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.parallel.finite import values_of

Clip = Callable[[Sequence[nn.Parameter]], object]
"""Changes the gradients of parameters in place."""

_LEAST_NORM = 1e-3


def make_clip(config: DistributedTrainingConfig) -> Clip | None:
    """Returns what a config asks for; None: nothing."""
    if config.clip_norm is not None:
        return _on_values(partial(nn.utils.clip_grad_norm_, max_norm=config.clip_norm))
    if config.clip_value is not None:
        return _on_values(partial(nn.utils.clip_grad_value_, clip_value=config.clip_value))
    if config.clip_adaptive is not None:
        return _on_values(partial(clip_adaptive, factor=config.clip_adaptive))
    return None


def _on_values(clip: Clip) -> Clip:
    """Return what clips sparse gradients too: by their values, which stand for the rows that a batch has used."""

    def clip_values(parameters: Sequence[nn.Parameter]) -> None:
        clip([_used_rows(p) if p.grad is not None and p.grad.is_sparse else p for p in parameters])

    return clip_values


def _used_rows(parameter: nn.Parameter) -> nn.Parameter:
    """Return the rows of a parameter for which its sparse gradient holds values; changing their `.grad` changes it."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.coalesce()
    rows = nn.Parameter(parameter.detach()[parameter.grad.indices()[0]])
    rows.grad = parameter.grad.values()
    return rows


def clip_adaptive(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Limits the norm of each unit's gradient to `factor` times that of its weights, at least 0.001.

    A unit is what feeds one output: a row of a matrix, a filter of a convolution; of a vector, such as a bias, each
    element.
    Cost: weights and gradients are read once more.
    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization (2021), section 4.1.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        limit = unit_norms(parameter.detach()).clamp(min=_LEAST_NORM) * factor
        norms = unit_norms(parameter.grad)
        # Where the norm is within the limit the factor is exactly 1.
        parameter.grad.mul_(torch.where(norms > limit, limit / norms, 1.0))


def gradient_norm(model: nn.Module) -> Tensor | None:
    """Returns the norm of all gradients together, as one vector, 0-dim; None: no parameter has one."""
    gradients = [values_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients) if gradients else None


def unit_norms(tensor: Tensor) -> Tensor:
    """Returns the norm of each unit, in a shape that stretches over the tensor's."""
    if tensor.dim() <= 1:
        return tensor.abs()
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True)
    return norms
