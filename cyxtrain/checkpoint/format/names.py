"""Names of a model's parts as the user wrote them, without the prefixes of `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cyxtrain.tensors.fingerprint import fingerprint
from cyxtrain.tensors.layouts import is_dense, parts_of, write

# the prefix of `torch.compile` in the names of a module and its parts
_COMPILED = "_orig_mod."


def plain_name(name: str) -> str:
    """Return a name without the prefixes of `torch.compile`."""
    return name.replace(_COMPILED, "")


def plain_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict` under plain names; its tensors are the live ones."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def plain_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (plain name, parameter), each parameter once."""
    return ((plain_name(name), parameter) for name, parameter in model.named_parameters())


def load_plain_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of `plain_state` into a model, compiled or not."""
    own = model.state_dict()
    given = {name: state[plain_name(name)] for name in own}
    # load_state_dict cannot copy into sparse tensors with other indices, nor if elements share memory.
    special = {name for name, value in own.items() if isinstance(value, torch.Tensor) and not is_dense(value)}
    for name in special:
        if parts_of(own[name]) is not None and fingerprint(own[name]) != fingerprint(given[name]):
            write(own[name], given[name])
    if not special:
        model.load_state_dict(given)
        return
    found = model.load_state_dict({name: given[name] for name in own if name not in special}, strict=False)
    unknown = [*found.unexpected_keys, *(name for name in found.missing_keys if name not in special)]
    if unknown:
        raise RuntimeError(f"the state has no place for, or lacks, {', '.join(unknown)}")
