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
_COMPILED_PREFIX = "_orig_mod."


def plain_name(name: str) -> str:
    """Return a name without the prefixes of `torch.compile`."""
    return name.replace(_COMPILED_PREFIX, "")


def plain_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict` under plain names; its tensors are the live ones."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def plain_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (plain name, parameter), each parameter once."""
    return ((plain_name(name), parameter) for name, parameter in model.named_parameters())


def custom_loading(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function that tells whether a plain name belongs to a module with its own loading code."""
    modules = torch.nn.Module.named_modules(model)  # by their names in the state, which a model may change
    own = [name for name, module in modules if torch_compat.has_own_loading(module)]
    prefixes = tuple(plain_name(f"{name}.").removeprefix(".") for name in own)
    return lambda name: name.startswith(prefixes)


def resizable_buffers(model: torch.nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Return buffers that forward may make or enlarge, by plain name: their module's dict and key.

    These are all but the buffers of norms.
    """
    found = {}
    for path, module in torch.nn.Module.named_modules(model):
        if isinstance(module, torch_compat.NormModule):
            continue
        buffers = torch_compat.own_buffers(module)
        for name in buffers:
            found[plain_name(f"{path}.{name}".removeprefix("."))] = (buffers, name)
    return found


def load_plain_state(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load the result of `plain_state` into a model, compiled or not; buffers take the saved shape.

    Return the names that the state lacks, and those that the model does not know; with `strict`, raise RuntimeError.
    """
    is_custom = custom_loading(model)
    _resize_buffers(model, state, is_custom)
    own = model.state_dict()
    written = _write_uncopyable(own, state, is_custom)
    names = _model_names(model, own, state)
    given = {name: state[plain] for plain, name in names.items() if plain in state and name not in written}
    found = model.load_state_dict(torch_compat.with_versions(given, own), strict=strict and not written)
    missing = [plain_name(name) for name in found.missing_keys if name not in written]
    unexpected = [plain_name(name) for name in found.unexpected_keys]
    if strict and (missing or unexpected):
        raise RuntimeError(f"the state has no place for, or lacks, {', '.join([*unexpected, *missing])}")
    return missing, unexpected


def _resize_buffers(model: torch.nn.Module, state: Mapping[str, Any], is_custom: Callable[[str], bool]) -> None:
    """Make the buffers that only a forward would make, and give the others the saved shape."""
    for name, (buffers, key) in resizable_buffers(model).items():
        saved = state.get(name)
        if not isinstance(saved, Tensor) or is_custom(name):
            continue
        current = buffers[key]
        if current is None:
            device = next((parameter.device for parameter in model.parameters()), saved.device)
            buffers[key] = saved.to(device, copy=True)
        elif current.shape != saved.shape:
            write(current, saved.to(current.dtype))


def _write_uncopyable(own: Mapping[str, Any], state: Mapping[str, Any], is_custom: Callable[[str], bool]) -> set[str]:
    """Write saved tensors into which `load_state_dict` cannot copy; return their names in the model."""
    uncopyable = {
        name
        for name, value in own.items()
        if _is_uncopyable(value) and plain_name(name) in state and not is_custom(plain_name(name))
    }
    for name in uncopyable:
        tensor = own[name]
        if parts_of(tensor) is None:
            continue
        saved = state[plain_name(name)]
        if fingerprint(tensor) != fingerprint(saved):
            write(tensor, saved)
    return uncopyable


def _is_uncopyable(value: object) -> bool:
    # load_state_dict cannot copy into sparse tensors with other indices, nor into elements that share memory.
    return isinstance(value, Tensor) and not is_lazy(value) and not is_dense(value)


def _model_names(model: torch.nn.Module, own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in a model's `state_dict` by plain name, also those that only the saved state has.

    A module with its own loading code may load such names.
    """
    names = {plain_name(name): name for name in own}
    paths = {plain_name(path): path for path, _ in torch.nn.Module.named_modules(model)}
    for plain in state.keys() - names.keys():
        place, dot, last = plain.rpartition(".")
        names[plain] = f"{paths.get(place, place)}{dot}{last}"
    return names
