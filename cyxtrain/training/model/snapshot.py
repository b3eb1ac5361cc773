"""Modes of modules, and snapshots of buffers, modules and other objects, to undo what a step or a trial changes."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cyxtrain.data.rng import generators_kept
from cyxtrain.environment import torch_compat
from cyxtrain.parallel import DistributedDataParallel, GatherCall, gathering_alone
from cyxtrain.tensors.fingerprint import fingerprint
from cyxtrain.tensors.layouts import is_plain, parts_of, write

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


def put_into_training(*modules: nn.Module) -> Callable[[], None]:
    """Put modules that are in evaluation mode into training mode, with all their parts.

    A module in training mode is not changed: its parts in evaluation mode, such as a frozen batch norm, are the user's
    choice. A model in evaluation mode is one as `from_pretrained` returns it. The returned function, called before each
    epoch, undoes an `eval()` of a whole module in between.
    """
    for module in modules:
        if not module.training:
            module.train()
    modes = [(module, [(part, part.training) for part in module.modules()]) for module in modules]

    def put_back() -> None:
        for module, parts in modes:
            if not module.training:
                module.train()
                for part, mode in parts:
                    part.training = mode

    return put_back


@contextlib.contextmanager
def modes_kept(*modules: nn.Module) -> Iterator[None]:
    """Restore the mode of every module within `modules` afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextlib.contextmanager
def snapshot(owners: Iterable[Any], device: torch.device, *, copies: bool) -> Iterator[list[GatherCall]]:
    """Restore what a trial changes in some objects, and the random generators, whatever happens within.

    Restored are attributes of the objects, of modules in them and of their classes (counters, modes), what lists and
    dictionaries among these hold, buffers, `.grad`, `requires_grad`, and the generators of torch, NumPy and Python;
    with `copies` also trained parameters and other tensors among the attributes. Values are compared: code that writes
    to `.data` changes no version counter. Within, no parameter has a `.grad`, and no rank waits for another:
    `all_gather_with_grad` returns this rank's rows. Yields the calls of that.

    Cost: a copy of the buffers, on their device; with `copies` also one of what is trained, on the CPU.

    Args:
        owners: Modules, functions, methods and other objects; their attributes are looked at one level deep.
        device: Whose generator is kept, besides the CPU's.
        copies: Whether parameters are copied, which would slow down each prediction for a few rows.
    """
    kept = _Kept([owner.__self__ if isinstance(owner, types.MethodType) else owner for owner in owners], copies=copies)
    with generators_kept(device, kept.generators), gathering_alone() as gathers:
        try:
            yield gathers
        finally:
            kept.restore()


@contextlib.contextmanager
def inputs_seen(layers: Iterable[nn.Module], look: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `look` with what reaches each of the layers within, unless it is passed by name."""

    def before_forward(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs:
            look(inputs[0])

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(before_forward).remove)
        yield


class _Kept:
    """The present state of objects, but for gradients, which are removed."""

    def __init__(self, owners: Iterable[Any], *, copies: bool) -> None:
        plain = [each for each in owners if isinstance(getattr(each, "__dict__", None), dict)]  # no class has such
        held = [each for owner in plain for each in (owner, *vars(owner).values()) if isinstance(each, nn.Module)]
        # What a lazy module makes in its first forward stays, as it does wherever else it runs first.
        modules = [
            part for part in dict.fromkeys(part for module in held for part in module.modules()) if not _is_lazy(part)
        ]
        objects = [*modules, *(each for each in plain if not isinstance(each, nn.Module))]
        self._buffers = [BuffersKept(module) for module in held if not any(map(_is_lazy, module.modules()))]
        self._attributes = [(vars(each), dict(vars(each))) for each in objects]
        self._classes = [
            (cls, dict(vars(cls))) for cls in dict.fromkeys(cls for each in objects for cls in _own_classes(each))
        ]
        values = [value for _, before in [*self._attributes, *self._classes] for value in before.values()]
        self._containers = [(value, copy.copy(value)) for value in values if type(value) in _CONTAINERS]
        found = [*values, *(part for _, container in self._containers for part in _flat(container))]
        self.generators = [each for each in found if isinstance(each, torch.Generator)]
        numpys = [each.bit_generator for each in found if isinstance(each, np.random.Generator)]
        self._numpys = [(each, copy.deepcopy(each.state)) for each in numpys]
        self._pythons = [(each, each.getstate()) for each in found if isinstance(each, random.Random)]
        tensors = {id(each): each for each in found if isinstance(each, Tensor)}
        self._parameters = [
            (each, each.requires_grad, each.grad) for each in tensors.values() if isinstance(each, nn.Parameter)
        ]
        for parameter, _, _ in self._parameters:
            parameter.grad = None
        others = _frozen(modules) | {id(each) for module in modules for each in module.buffers(recurse=False)}
        self._copies = [
            (tensor, tensor.detach().to("cpu", copy=True))
            for number, tensor in tensors.items()
            if copies and number not in others and tensor.layout is torch.strided and not tensor.is_meta
        ]

    def restore(self) -> None:
        """Restore the objects."""
        for now, before in [*self._attributes, *self._containers]:
            if _marks(now) != _marks(before):
                now.clear()
                now.extend(before) if isinstance(now, (list, collections.deque)) else now.update(before)
        for cls, before in self._classes:
            for name, value in before.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
        for parameter, requires_grad, gradient in self._parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for numbers, state in self._numpys:
            numbers.state = state
        for generator, before in self._pythons:
            generator.setstate(before)
        for buffers in self._buffers:
            buffers.restore()
        for tensor, copied in self._copies:
            if tensor.shape == copied.shape and not torch.equal(tensor.detach().cpu(), copied):
                tensor.data.copy_(copied)


def _own_classes(instance: Any) -> Iterator[type]:
    """Yield the classes of an object that a user wrote: `seen = 0` in a class is a counter, too."""
    libraries = ("builtins", "torch", "cyxtrain")
    return (cls for cls in type(instance).__mro__ if cls.__module__.partition(".")[0] not in libraries)


def _is_lazy(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(map(nn.parameter.is_lazy, tensors))


def _frozen(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of parameters that nothing changes: those of a partly frozen model are not copied."""
    return {
        id(parameter)
        for module in modules
        for parameter in torch_compat.own_parameters(module).values()
        # An embedding with max_norm changes its weight in forward, frozen or not.
        if parameter is not None and not parameter.requires_grad and getattr(module, "max_norm", None) is None
    }


def _flat(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _marks(container: Any) -> list[int]:
    parts = itertools.chain.from_iterable(container.items()) if isinstance(container, dict) else container
    return [id(part) for part in parts]


@dataclass
class _KeptBuffer:
    module: nn.Module
    name: str
    buffer: Tensor | None
    copy: Tensor
    version: float = -1
    """Of the buffer, when it was copied; where nothing changes it without that."""


class BuffersKept:
    """Copies of a module's buffers, of any kind of tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            _KeptBuffer(module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def keep(self) -> None:
        """Copy the buffers as they are now."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for kept in self._kept:
            before, kept.buffer = kept.buffer, torch_compat.own_buffers(kept.module).get(kept.name)
            now = kept.buffer
            if now is None:
                continue
            if not is_plain(now):
                version = torch_compat.version_of(now)
                if now is not before or version != kept.version:
                    kept.copy, kept.version = now.detach().clone(), version
                continue
            if _form(now) != _form(kept.copy):
                kept.copy = torch.empty_like(now, memory_format=torch.contiguous_format)
            copies, buffers = kinds.setdefault((now.device, now.dtype), ([], []))
            copies.append(kept.copy)
            buffers.append(now)
        # All of them: PyTorch's batch norm, and code that writes to .data, change one without a change of its version.
        for copies, buffers in kinds.values():
            torch_compat.copy_all(copies, buffers)

    def restore(self) -> None:
        """Restore the buffers; unchanged ones are not written."""
        for kept in self._kept:
            if kept.buffer is not None:
                kept.buffer = _restored(kept.buffer, kept.copy)  # changed in place
            setattr(kept.module, kept.name, kept.buffer)  # or replaced


class StepBuffers:
    """The buffers of a wrapped model, which each step's forward changes; `depth`: copies of so many steps are kept."""

    def __init__(self, ddp: DistributedDataParallel, depth: int) -> None:
        self._ddp = ddp
        self._copies = [BuffersKept(ddp.module) for _ in range(depth)]

    def keep(self) -> Callable[[], None]:
        """Copy the buffers; return what restores them, and the number of rows that they have counted."""
        self._copies.append(self._copies.pop(0))
        kept, rows = self._copies[-1], self._ddp.buffer_rows
        kept.keep()

        def restore() -> None:
            kept.restore()
            self._ddp.buffer_rows = rows

        return restore


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _restored(buffer: Tensor, copy: Tensor) -> Tensor:
    """Return a buffer with the values of a copy: itself, written in place, or a new copy if it cannot be written."""
    if buffer.is_cpu and fingerprint(buffer) == fingerprint(copy):
        return buffer
    if parts_of(buffer) is None:
        return copy.clone()
    write(buffer, copy)
    return buffer
