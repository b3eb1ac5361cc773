"""The names of a model's parts as the user wrote them, whatever has been wrapped around a part since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_COMPILED = "_orig_mod."
"""What `torch.compile` puts before the names of a module, and of modules within one."""


def plain_name(name: str) -> str:
    """Returns a name as it is in the model before it was compiled."""
    return name.replace(_COMPILED, "")


def plain_state(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the model's `state_dict` under plain names; its tensors are the live ones."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def plain_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Gives (plain name, parameter), each parameter once."""
    return ((plain_name(name), parameter) for name, parameter in model.named_parameters())


def load_plain_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Gives a model, compiled or not, what `plain_state` gave.

    Raises:
        KeyError, RuntimeError: Names or shapes differ.
    """
    model.load_state_dict({name: state[plain_name(name)] for name in model.state_dict()})
