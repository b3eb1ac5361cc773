"""The loss that a model computed itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cyxtrain.config.settings import is_number
from cyxtrain.errors import ConfigError

NO_LOSS = (
    "there is no loss: give the trainer a loss_fn, or let the model return a scalar or (sum, weight), an output with "
    "such a 'loss', or a dictionary of losses."
)


def models_own(output: Any) -> tuple[Any, dict[str, Any]]:
    """Return (the model's own loss, its other scalars by name); without a loss, the scalars are losses to be added."""
    scalars: dict[str, Any] = {}
    if isinstance(output, Mapping):
        scalars = {str(name): value for name, value in output.items() if name != "loss" and _is_scalar(value)}
        own = output.get("loss")
        if own is None and scalars and "loss" not in output:
            return None, scalars
    elif isinstance(output, Tensor) or type(output) is tuple:
        own = output
    else:
        own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own, scalars
    if isinstance(own, tuple) and _is_scalar(own):
        return own, scalars
    raise ConfigError(NO_LOSS)


def _is_scalar(value: Any) -> bool:
    """Return whether a value is one number, or (sum, weight)."""
    if type(value) is tuple:
        return len(value) == 2 and all(not isinstance(each, tuple) and _is_scalar(each) for each in value)
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype is not torch.bool and not value.is_complex()
    return is_number(value)
