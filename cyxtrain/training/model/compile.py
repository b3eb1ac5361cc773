"""The model compiled by `torch.compile`, for as long as a fit lasts; and CUDA graphs, which compiled models may use.

A CUDA graph writes its results to the same memory in every step. What is kept longer is copied (`own_copy`), and each
step tells PyTorch where it begins (`marked_steps`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from cyxtrain.environment import torch_compat
from cyxtrain.environment.accelerator import is_accelerator, may_use_cuda_graphs
from cyxtrain.errors import ConfigError
from cyxtrain.training.model.recompute import stacked_layers

_Batch = TypeVar("_Batch")
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which a model's kernels are launched together, as a CUDA graph."""


def check_compiler(mode: bool | str, device: torch.device) -> None:
    """Compiles something small, to find out whether anything can be compiled here.

    Cost: some seconds, the first time in a process; the model's own compilation would have taken them else.

    Args:
        mode: That was asked for.
        device: That computes.

    Raises:
        ConfigError: With what PyTorch says.
    """
    try:
        torch.compile(_small)(torch.ones(2, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"compile={mode!r}: torch.compile does not work here: {type(error).__name__}: {reason}. It needs "
            "a C++ compiler on CPUs and Triton on GPUs; without compile the model runs as it is."
        ) from error


def _small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def compiles_by_layer(model: nn.Module, mode: bool | str, device: torch.device, world_size: int) -> bool:
    """Returns whether a fit compiles the model's layers one by one, after a look whether it can compile at all.

    Only so do gradients travel while backward runs. On CPUs the model stays whole: there nobody has measured that
    layers by themselves gain anything.

    Args:
        model: Not wrapped.
        mode: Of `torch.compile`; False: nothing is compiled.
        device: That computes.
        world_size: Number of ranks.

    Raises:
        ConfigError: As `check_compiler`.
    """
    if not mode:
        return False
    check_compiler(mode, device)
    is_free = torch_compat.compiled_call(model) is None
    return is_free and world_size > 1 and is_accelerator(device) and bool(layers_to_compile(model, mode))


def layers_to_compile(model: nn.Module, mode: bool | str) -> list[nn.Module]:
    """Returns the layers to compile one by one, so that each one's gradients are there as soon as it has run backward.

    Of a model that is compiled as a whole all gradients arrive together, when its backward is complete.

    Args:
        model: Not wrapped.
        mode: Of `torch.compile`.

    Returns:
        What has layers itself, of what stands in the model's outermost Sequentials and ModuleLists; nothing where that
        is less than two, or where the mode captures the model as one CUDA graph.
    """
    if mode in _WITH_GRAPHS:
        return []
    found = [layer for layer in stacked_layers(model) if next(layer.children(), None) is not None]
    return found if len(found) > 1 else []


def explain_compiled(mode: bool | str, by_layer: bool) -> str:
    """Returns how a model is compiled, in words; "": it is not."""
    if not mode:
        return ""
    return "compiled" + (f" ({mode})" if isinstance(mode, str) else "") + (" layer by layer" if by_layer else "")


@contextlib.contextmanager
def compiled(model: nn.Module, mode: bool | str, *, by_layer: bool = False) -> Iterator[None]:
    """Within, calls of the model are compiled, unless the user has compiled it; it is handed back as it was.

    Args:
        model: Not wrapped.
        mode: Of `torch.compile`, or True; False: it runs as it is.
        by_layer: Compile its `layers_to_compile` one by one, where there are any.
    """
    parts = (layers_to_compile(model, mode) if by_layer else []) or [model]
    is_free = bool(mode) and torch_compat.compiled_call(model) is None
    before = [(part, torch_compat.compiled_call(part)) for part in parts if is_free]
    for part, call in before:
        if call is None:
            part.compile(**({"mode": mode} if isinstance(mode, str) else {}))
    try:
        yield
    finally:
        for part, call in before:
            torch_compat.set_compiled_call(part, call)


def marked_steps(batches: Iterable[_Batch], device: torch.device) -> Generator[_Batch]:
    """Yield batches, and tell PyTorch where the step with each begins, so that CUDA graphs may reuse their memory.

    Without it, PyTorch takes each call of a compiled function for a step: the second micro-batch would overwrite
    outputs and gradients of the first one that are still needed.
    """
    if not may_use_cuda_graphs(device):
        yield from batches
        return
    try:
        for batch in batches:
            torch.compiler.cudagraph_mark_step_begin()
            yield batch
    finally:
        torch_compat.unmark_cuda_graph_steps()
