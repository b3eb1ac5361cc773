"""`torch.compile` and gradient checkpointing during a fit, and CUDA graphs of compiled models.

A CUDA graph writes its results to the same memory in every step. What is kept longer is copied
(`accelerator.own_copy`), and each step tells PyTorch where it begins (`marked_steps`). With gradient checkpointing
backward recomputes what forward did not keep.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), section 4.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import torch_compat
from cyxtrain.environment.accelerator import is_accelerator, may_use_cuda_graphs
from cyxtrain.errors import ConfigError
from cyxtrain.training.model.snapshot import BuffersKept

_CONTAINERS = (nn.Sequential, nn.ModuleList)
_Batch = TypeVar("_Batch")
# Modes in which a model's kernels are launched together, as a CUDA graph.
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


def check_compiler(mode: bool | str, device: torch.device) -> None:
    """Compile something small; raise ConfigError if that does not work here.

    Cost: some seconds, the first time in a process, which the model's own compilation saves.
    """
    try:
        torch.compile(lambda tensor: tensor + 1)(torch.ones(2, device=device))
    except Exception as error:  # whatever a missing compiler or its driver raises
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"compile={mode!r}: torch.compile does not work here: {type(error).__name__}: {reason}. It needs "
            "a C++ compiler on CPUs and Triton on GPUs; without compile the model runs as it is."
        ) from error


def compiles_by_layer(model: nn.Module, mode: bool | str, device: torch.device, num_slices: int) -> bool:
    """Return whether a fit compiles the model's layers one by one; raise ConfigError if it cannot compile.

    Only then are gradients averaged while backward runs. On CPUs the model is compiled as a whole: there, compiling by
    layer was measured to gain nothing.
    """
    if not mode:
        return False
    check_compiler(mode, device)
    if torch_compat.compiled_call(model) is not None:  # the user has compiled it
        return False
    return num_slices > 1 and is_accelerator(device) and bool(layers_to_compile(model, mode))


def layers_to_compile(model: nn.Module, mode: bool | str) -> list[nn.Module]:
    """Return the layers to compile one by one: gradients are ready once each has run backward.

    These are the layers that have layers themselves, in the model's outermost Sequentials and ModuleLists; none if
    there are fewer than two, or if the mode captures the model as one CUDA graph.
    """
    if mode in _WITH_GRAPHS:
        return []
    found = [layer for layer in stacked_layers(model) if next(layer.children(), None) is not None]
    if len(found) < 2:
        return []
    return found


def explain_compiled(mode: bool | str, by_layer: bool) -> str:
    """Describe how a model is compiled; "": it is not."""
    if not mode:
        return ""
    words = "compiled"
    if isinstance(mode, str):
        words += f" ({mode})"
    if by_layer:
        words += " layer by layer"
    return words


@contextlib.contextmanager
def compiled(model: nn.Module, config: DistributedTrainingConfig, *, by_layer: bool = False) -> Iterator[None]:
    """Compile calls of the model within, unless the user has compiled it; restore it afterwards.

    With virtual ranks, each shape has kernels of its own: which ones a slice has must not depend on the slices before
    it. PyTorch then raises an error if there are too many shapes, and does not compute some of them uncompiled.
    """
    mode = config.compile
    if not mode or torch_compat.compiled_call(model) is not None:
        yield
        return
    layers = layers_to_compile(model, mode) if by_layer else []
    before = [(part, torch_compat.compiled_call(part)) for part in layers or [model]]
    options: dict[str, Any] = {}
    if isinstance(mode, str):
        options["mode"] = mode
    with contextlib.ExitStack() as stack:
        if config.virtual_ranks is not None:
            options["dynamic"] = False
            stack.enter_context(torch.compiler.config.patch(fail_on_recompile_limit_hit=True))  # type: ignore[attr-defined]
        for part, call in before:
            stack.callback(torch_compat.set_compiled_call, part, call)
            # A layer that the user has compiled keeps its mode.
            if call is None:
                part.compile(**options)
        yield


def marked_steps(batches: Iterator[_Batch], device: torch.device) -> Iterator[_Batch]:
    """Return batches that mark for PyTorch where steps begin: CUDA graphs may reuse memory there.

    Without it, PyTorch takes each call of a compiled function for a step: the second micro-batch would overwrite
    outputs and gradients of the first one that are still needed.
    """
    if may_use_cuda_graphs(device):
        return _marked_steps(batches)
    return batches


def _marked_steps(batches: Iterator[_Batch]) -> Iterator[_Batch]:
    try:
        for batch in batches:
            torch.compiler.cudagraph_mark_step_begin()
            yield batch
    finally:
        torch_compat.unmark_cuda_graph_steps()


def layers_of(model: nn.Module, wanted: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the layers to recompute, by the classes or names that are `wanted`.

    By default, the layers with parameters in the outermost Sequentials and ModuleLists, or else the model's children.
    """
    if wanted:
        found = _layers_named(model, wanted)
    else:
        stacked = stacked_layers(model) or model.children()
        found = [layer for layer in stacked if next(layer.parameters(), None) is not None]
    if not found:
        raise ConfigError("enable_gradient_checkpointing: the model has no such layers; give their classes or names.")
    inner: set[int] = set()
    for layer in found:
        inner.update(id(part) for part in layer.modules() if part is not layer)
    if any(id(layer) in inner for layer in found):
        raise ConfigError("enable_gradient_checkpointing: some of these layers are parts of others; give one kind.")
    return found


def _layers_named(model: nn.Module, wanted: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    layers = dict(model.named_modules())
    classes = tuple(each for each in wanted if isinstance(each, type))
    names = [each for each in wanted if isinstance(each, str)]
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise ConfigError(f"the model has no layers named {', '.join(unknown)}.")
    return [layer for name, layer in layers.items() if name in names or isinstance(layer, classes)]


def stacked_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers in the outermost containers."""
    if isinstance(module, _CONTAINERS):
        return list(module)
    return [layer for child in module.children() for layer in stacked_layers(child)]


@contextlib.contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Make these layers recompute in backward what they do not keep; restore them afterwards."""
    with contextlib.ExitStack() as stack:
        # A compiled model is compiled layer by layer here: as a whole, it may run twice what changes buffers.
        # Only with layers: torch.compiler.disable imports the compiler, which takes seconds.
        forward = torch.compiler.disable(_forward, recursive=False) if layers else _forward
        for layer in layers:
            own = layer.__dict__.get("forward")  # a user may have replaced it
            if own is None:
                stack.callback(delattr, layer, "forward")
            else:
                stack.callback(setattr, layer, "forward", own)
            layer.forward = functools.partial(forward, layer, layer.forward)
        yield


def _forward(layer: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Call a layer's own `forward`, which runs again in backward."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), _buffers_kept(layer)

    # The second run has the same randomness and autocast; buffers, such as running means, must not change once more.
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


@contextlib.contextmanager
def _buffers_kept(layer: nn.Module) -> Iterator[None]:
    kept = BuffersKept(layer)
    try:
        yield
    finally:
        kept.restore()
