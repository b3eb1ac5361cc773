"""Names of a model's parts as the user wrote them, without the prefixes of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from cyxtrain.environment import torch_compat
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


def loads_itself(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function that tells whether a plain name in the state is loaded by a module's own rules."""
    modules = torch.nn.Module.named_modules(model)  # by their names in the state, which a model may change
    own = [name for name, module in modules if torch_compat.has_own_loading(module)]
    prefixes = tuple(plain_name(f"{name}.").removeprefix(".") for name in own)
    return lambda name: name.startswith(prefixes)


def resizable_buffers(model: torch.nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Return by plain name where buffers are that forward may make, or replace by larger ones: all but a norm's."""
    return {
        plain_name(f"{path}.{name}".removeprefix(".")): (torch_compat.own_buffers(module), name)
        for path, module in torch.nn.Module.named_modules(model)
        if not isinstance(module, torch_compat.NormModule)
        for name in torch_compat.own_buffers(module)
    }


def load_plain_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of `plain_state` into a model, compiled or not; buffers take the saved shape."""
    is_left = loads_itself(model)
    for name, (buffers, last) in resizable_buffers(model).items():
        now = buffers[last]
        saved = state.get(name)
        if not isinstance(saved, Tensor) or is_left(name):
            continue
        if now is None:
            buffers[last] = saved.to(next((each.device for each in model.parameters()), saved.device), copy=True)
        elif now.shape != saved.shape:
            write(now, saved.to(now.dtype))
    own = model.state_dict()
    # load_state_dict cannot copy into sparse tensors with other indices, nor if elements share memory.
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor) and not is_lazy(value)}
    special = {name for name, value in tensors.items() if not is_dense(value) and not is_left(plain_name(name))}
    for name in special:
        if parts_of(own[name]) is not None and fingerprint(own[name]) != fingerprint(state[plain_name(name)]):
            write(own[name], state[plain_name(name)])
    paths = {plain_name(path): path for path, _ in torch.nn.Module.named_modules(model)}
    names = {plain_name(name): name for name in own}
    for name in state.keys() - names.keys():  # for a module that loads itself
        place, dot, last = name.rpartition(".")
        names[name] = f"{paths.get(place, place)}{dot}{last}"
    given = {own_name: state[name] for name, own_name in names.items() if name in state and own_name not in special}
    found = model.load_state_dict(torch_compat.with_versions(given, own), strict=not special)
    unknown = [*found.unexpected_keys, *(name for name in found.missing_keys if name not in special)]
    if unknown:
        raise RuntimeError(f"the state has no place for, or lacks, {', '.join(unknown)}")
