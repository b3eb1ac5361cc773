"""How tensors of images and convolution weights lie in memory: by channel, or by pixel (`channels_last`)."""

from __future__ import annotations

import torch
from torch import nn

from cyxtrain.data.batches.prefetch import as_channels_last
from cyxtrain.errors import ConfigError


def put_channels_last(model: nn.Module) -> None:
    """Gives a model's weights of four and five dimensions that format, in place: an optimizer has them still.

    Raises:
        ConfigError: It has none.
    """
    if not any(parameter.dim() in (4, 5) for parameter in model.parameters()):
        raise ConfigError(
            f"channels_last=True is for 2-d and 3-d convolutions, and no parameter of {type(model).__name__} has 4 or "
            "5 dimensions: leave it out."
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() in (4, 5):
            tensor.data = as_channels_last(tensor.data)


def match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Lets what an optimizer keeps of a parameter lie in memory as the parameter does.

    PyTorch's fused kernels for CPUs go through both as they lie, and do not notice a difference: steps would be wrong.
    It comes from state that was saved, or made, while the parameter had another format.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            same_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
