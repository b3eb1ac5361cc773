"""How PyTorch's objects are made anew in another process, where their own pickles leave something out."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cyxtrain.environment import torch_compat

_WRAPPED = "step"
"""Attribute of an optimizer that a schedule puts there; `LearningRates` does so again."""


def reduced(obj: Any) -> tuple[Any, ...] | None:
    """Returns how an object is to be made anew, as pickle wants to know it; None: as its own pickle says."""
    if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
        return _bare, (type(obj).__base__,), vars(obj), None, None, _fill_parametrized
    if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, torch.optim.Optimizer):
        # Its own pickle has neither hooks nor what its user keeps in it.
        return _bare, (type(obj),), {name: value for name, value in vars(obj).items() if name != _WRAPPED}
    if isinstance(obj, Tensor) and obj.is_leaf and any(hooks := torch_compat.hooks_of(obj)):
        plain = obj.__reduce_ex__(5)
        assert isinstance(plain, tuple)
        return _with_hooks, (*plain[:2], *hooks)
    return None


def is_plain(obj: Any) -> bool:
    """Returns whether an object is no more than a class and its attributes, as most that people write are."""
    kind = type(obj)
    ways: tuple[Any, ...] = (kind.__reduce_ex__, kind.__reduce__)
    if ways != (object.__reduce_ex__, object.__reduce__) or kind in copyreg.dispatch_table:
        return False
    if isinstance(obj, (type, types.ModuleType, types.FunctionType)) or not isinstance(_attributes_of(obj), dict):
        return False
    return bool(obj.__reduce_ex__(5)[0] is copyreg.__newobj__)  # type: ignore[attr-defined]


def _attributes_of(obj: Any) -> Any:
    """Returns an object's attributes; None: it has no place for any."""
    return getattr(obj, "__dict__", None)


def same(value: Any) -> Any:
    """Returns a value as it is."""
    return value


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _fill_parametrized(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Makes a module one whose parameters are calculated, as spectral norm does; PyTorch refuses to pickle those."""
    vars(module).update(attributes)
    torch_compat.inject_parametrizations(module, [*attributes["_modules"]["parametrizations"]])


def _with_hooks(
    remake: Callable[..., Tensor], arguments: tuple[Any, ...], hooks: Sequence[Any], after: Sequence[Any]
) -> Tensor:
    """Returns a tensor whose gradient its user's functions see; hooks are no part of PyTorch's pickle."""
    tensor = remake(*arguments)
    for hook in hooks:
        tensor.register_hook(hook)
    for hook in after:
        tensor.register_post_accumulate_grad_hook(hook)
    return tensor
