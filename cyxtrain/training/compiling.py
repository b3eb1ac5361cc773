"""The model compiled by `torch.compile`, for as long as a fit lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from cyxtrain import torch_compat
from cyxtrain.errors import ConfigError


def check_compiler(device: torch.device) -> None:
    """Compiles something small, to find out whether anything can be compiled here.

    Cost: some seconds, the first time in a process; the model's own compilation would have taken them else.

    Raises:
        ConfigError: With what PyTorch says.
    """
    try:
        torch.compile(_small)(torch.ones(2, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"compile=True: torch.compile does not work here: {type(error).__name__}: {reason} It needs a C++ compiler "
            "on CPUs and Triton on GPUs; without compile=True the model runs as it is."
        ) from error


def _small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


@contextlib.contextmanager
def compiled(model: nn.Module) -> Iterator[None]:
    """Within, calls of the model are compiled, unless the user has compiled it; it is handed back as it was."""
    before = torch_compat.compiled_call(model)
    if before is None:
        model.compile()
    try:
        yield
    finally:
        torch_compat.set_compiled_call(model, before)
