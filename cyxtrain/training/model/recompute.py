"""Gradient checkpointing: backward recomputes what forward did not keep.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), section 4.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cyxtrain.errors import ConfigError
from cyxtrain.training.model.snapshot import BuffersKept

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def layers_of(model: nn.Module, wanted: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the layers that keep only their inputs, of the classes or names that are `wanted`.

    None: what is in the outermost Sequentials and ModuleLists, otherwise the children; of these, those with parameters.
    """
    if wanted:
        named = dict(model.named_modules())
        unknown = [name for name in wanted if isinstance(name, str) and name not in named]
        if unknown:
            raise ConfigError(f"the model has no layers named {', '.join(map(str, unknown))}.")
        classes = tuple(each for each in wanted if isinstance(each, type))
        found = [layer for name, layer in named.items() if name in wanted or isinstance(layer, classes)]
    else:
        stacked = stacked_layers(model) or model.children()
        found = [layer for layer in stacked if next(layer.parameters(), None) is not None]
    if not found:
        raise ConfigError("enable_gradient_checkpointing: the model has no such layers; give their classes or names.")
    inner = {id(part) for layer in found for part in layer.modules() if part is not layer}
    if any(id(layer) in inner for layer in found):
        raise ConfigError("enable_gradient_checkpointing: some of these layers are parts of others; give one kind.")
    return found


def stacked_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers in the outermost containers."""
    if isinstance(module, _CONTAINERS):
        return list(module)
    return [layer for child in module.children() for layer in stacked_layers(child)]


@contextlib.contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Make these layers recompute in backward what they do not keep; restore them afterwards."""
    with contextlib.ExitStack() as stack:
        # PyTorch's compiler takes each layer by itself: of a model as a whole it may run twice what changes buffers.
        # Asking for that imports it, which takes seconds; so does the first call of checkpoint.
        forward = torch.compiler.disable(_forward, recursive=False) if layers else _forward
        for layer in layers:
            own = layer.__dict__.get("forward")  # a user may have replaced it
            stack.callback(_set_forward, layer, own)
            layer.forward = functools.partial(forward, layer, layer.forward)
        yield


def _set_forward(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward


def _forward(layer: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    # Randomness and autocast are as in the first run; buffers, such as running means, are kept from a second change.
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=functools.partial(_contexts, layer), **named)


def _contexts(layer: nn.Module) -> tuple[Any, Any]:
    return contextlib.nullcontext(), _buffers_kept(layer)


@contextlib.contextmanager
def _buffers_kept(layer: nn.Module) -> Iterator[None]:
    kept = BuffersKept(layer)
    try:
        yield
    finally:
        kept.restore()
