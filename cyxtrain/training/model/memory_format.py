"""The memory format of images and convolution weights: by channel, or by pixel (`channels_last`)."""

from __future__ import annotations

from torch import nn

from cyxtrain.data.batches.prefetch import as_channels_last
from cyxtrain.errors import ConfigError


def put_channels_last(model: nn.Module) -> None:
    """Give a model's weights of four and five dimensions that format, in place; raise ConfigError if it has none."""
    if not any(parameter.dim() in (4, 5) for parameter in model.parameters()):
        raise ConfigError(
            f"channels_last=True is for 2-d and 3-d convolutions, and no parameter of {type(model).__name__} has 4 or "
            "5 dimensions: leave it out."
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() in (4, 5):
            tensor.data = as_channels_last(tensor.data)
