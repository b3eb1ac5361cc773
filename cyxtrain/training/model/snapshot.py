"""Snapshots of buffers, modules and other objects, to undo what a step or a trial changes."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
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

    `from_pretrained` returns models in evaluation mode. A module in training mode is not changed: its parts in
    evaluation mode, such as a frozen batch norm, are the user's choice. The returned function, called before each
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

    It restores attributes of the objects, of modules in them and of their classes (counters, modes); the elements of
    lists and dictionaries among these; buffers, `.grad`, `requires_grad`, and the generators of torch, NumPy and
    Python; with `copies` also trained parameters and other tensors among the attributes. Values are compared: code that
    writes to `.data` changes no version counter. Within, no parameter has a `.grad`, and no rank waits for another:
    `all_gather_with_grad` returns this rank's samples. Yields the calls of `all_gather_with_grad`.

    Cost: a copy of the buffers, on their device; with `copies` also a copy of what is trained, on the CPU.

    Args:
        owners: Modules, functions, methods and other objects; their attributes are looked at one level deep.
        device: The device whose generator is kept, besides the CPU's.
        copies: Whether parameters are copied, which would slow down each prediction for a few samples.
    """
    kept = _Kept(owners, copies=copies)
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
    """The present state of objects, except for gradients, which are removed."""

    def __init__(self, owners: Iterable[Any], *, copies: bool) -> None:
        objects = _restorable(owners)
        held = _modules_in(objects)
        parts = dict.fromkeys(part for module in held for part in module.modules())
        # What a lazy module makes in its first forward stays, as it does wherever else it runs first.
        modules = [part for part in parts if not _is_lazy(part)]
        self._buffers = [BuffersKept(module) for module in held if not any(map(_is_lazy, module.modules()))]
        values = self._keep_attributes([*modules, *(each for each in objects if not isinstance(each, nn.Module))])
        self._keep_generators(values)
        tensors = [*{id(value): value for value in values if isinstance(value, Tensor)}.values()]
        self._keep_gradients(tensors)
        self._copies = _copied(tensors, modules) if copies else []

    def _keep_attributes(self, objects: Sequence[Any]) -> list[Any]:
        """Keep the attributes of objects and their classes, and the elements of containers; return all values."""
        self._attributes = [(vars(each), dict(vars(each))) for each in objects]
        self._classes = [(cls, dict(vars(cls))) for cls in _user_classes(objects)]
        values = [value for _, before in (*self._attributes, *self._classes) for value in before.values()]
        self._containers = [(value, copy.copy(value)) for value in values if type(value) in _CONTAINERS]
        for _, container in self._containers:
            elements = container.values() if isinstance(container, dict) else container
            values += elements
        return values

    def _keep_generators(self, values: Iterable[Any]) -> None:
        self.generators = [each for each in values if isinstance(each, torch.Generator)]
        numpys = [each.bit_generator for each in values if isinstance(each, np.random.Generator)]
        self._numpys = [(each, copy.deepcopy(each.state)) for each in numpys]
        self._pythons = [(each, each.getstate()) for each in values if isinstance(each, random.Random)]

    def _keep_gradients(self, tensors: Iterable[Tensor]) -> None:
        parameters = [each for each in tensors if isinstance(each, nn.Parameter)]
        self._gradients = [(each, each.requires_grad, each.grad) for each in parameters]
        for parameter in parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Restore the objects."""
        for container, elements in (*self._attributes, *self._containers):
            _restore_elements(container, elements)
        for cls, attributes in self._classes:
            _restore_class(cls, attributes)
        for parameter, requires_grad, gradient in self._gradients:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for numpy_generator, numpy_state in self._numpys:
            numpy_generator.state = numpy_state
        for python_generator, python_state in self._pythons:
            python_generator.setstate(python_state)
        for buffers in self._buffers:
            buffers.restore()
        for tensor, copied in self._copies:
            if tensor.shape == copied.shape and not torch.equal(tensor.detach().cpu(), copied):
                tensor.data.copy_(copied)


def _restorable(owners: Iterable[Any]) -> list[Any]:
    """Return the objects whose attributes can be restored; of a bound method, its object."""
    found: list[Any] = []
    for owner in owners:
        if isinstance(owner, types.MethodType):
            owner = owner.__self__
        if isinstance(getattr(owner, "__dict__", None), dict):  # of a class it is a proxy
            found.append(owner)
    return found


def _modules_in(owners: Iterable[Any]) -> list[nn.Module]:
    """Return the modules among objects and their attributes."""
    values = [value for owner in owners for value in (owner, *vars(owner).values())]
    return [value for value in values if isinstance(value, nn.Module)]


def _user_classes(objects: Iterable[Any]) -> list[type]:
    """Return the classes of objects that a user wrote: `seen = 0` in a class is a counter, too."""
    classes = dict.fromkeys(cls for each in objects for cls in type(each).__mro__)
    return [cls for cls in classes if cls.__module__.partition(".")[0] not in ("builtins", "torch", "cyxtrain")]


def _is_lazy(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(map(nn.parameter.is_lazy, tensors))


def _copied(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return (tensor, its copy on the CPU) of each, except frozen parameters and buffers."""
    excluded = _frozen(modules) | {id(buffer) for module in modules for buffer in module.buffers(recurse=False)}
    copies: list[tuple[Tensor, Tensor]] = []
    for tensor in tensors:
        if id(tensor) not in excluded and tensor.layout is torch.strided and not tensor.is_meta:
            copies.append((tensor, tensor.detach().to("cpu", copy=True)))
    return copies


def _frozen(modules: Iterable[nn.Module]) -> set[int]:
    found: set[int] = set()
    for module in modules:
        if getattr(module, "max_norm", None) is not None:
            continue  # such an embedding changes its weight in forward, frozen or not
        parameters = torch_compat.own_parameters(module).values()
        found |= {id(each) for each in parameters if each is not None and not each.requires_grad}
    return found


def _restore_elements(container: Any, elements: Any) -> None:
    """Restore the elements of a container that has others, or has them in another order."""
    if _ids(container) == _ids(elements):
        return
    container.clear()
    if isinstance(container, (list, collections.deque)):
        container.extend(elements)
    else:
        container.update(elements)


def _restore_class(cls: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)


def _ids(container: Any) -> list[int]:
    """Return the identities of a container's elements, of a dictionary's keys and values."""
    # Not compared by ==, which returns many answers for tensors and arrays, and runs the user's code for other objects.
    if isinstance(container, dict):
        container = itertools.chain.from_iterable(container.items())
    return [id(element) for element in container]


@dataclass
class _KeptBuffer:
    module: nn.Module
    name: str
    buffer: Tensor | None
    copy: Tensor
    version: float = -1
    """The buffer's version when it was copied; only for kinds of tensors that do not change without it."""


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
        by_type: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for kept in self._kept:
            before = kept.buffer
            now = torch_compat.own_buffers(kept.module).get(kept.name)
            kept.buffer = now
            if now is None:
                continue
            if not is_plain(now):
                version = torch_compat.version_of(now)
                if now is not before or version != kept.version:
                    kept.copy = now.detach().clone()
                    kept.version = version
                continue
            if _form(now) != _form(kept.copy):
                kept.copy = torch.empty_like(now, memory_format=torch.contiguous_format)
            copies, buffers = by_type.setdefault((now.device, now.dtype), ([], []))
            copies.append(kept.copy)
            buffers.append(now)
        # All are copied: PyTorch's batch norm, and code that writes to .data, change a buffer but not its version.
        for copies, buffers in by_type.values():
            torch_compat.copy_all(copies, buffers)

    def restore(self) -> None:
        """Restore the buffers; unchanged ones are not written."""
        for kept in self._kept:
            if kept.buffer is not None:
                kept.buffer = _restored(kept.buffer, kept.copy)  # changed in place
            setattr(kept.module, kept.name, kept.buffer)  # or replaced


class StepBuffers:
    """The buffers of a wrapped model, which each step changes; `depth`: of how many steps to keep."""

    def __init__(self, ddp: DistributedDataParallel, depth: int) -> None:
        self._ddp = ddp
        self._copies = [BuffersKept(ddp.module) for _ in range(depth)]

    def keep(self) -> Callable[[], None]:
        """Copy the buffers; return what restores them, and the number of samples that they have counted."""
        kept = self._copies.pop(0)  # the oldest copy is overwritten
        self._copies.append(kept)
        rows = self._ddp.buffer_rows
        kept.keep()

        def restore() -> None:
            kept.restore()
            self._ddp.buffer_rows = rows

        return restore


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _restored(buffer: Tensor, copy: Tensor) -> Tensor:
    """Return a buffer with the values of a copy: written in place, or a new one if it cannot be."""
    if buffer.is_cpu and fingerprint(buffer) == fingerprint(copy):
        return buffer
    if parts_of(buffer) is None:
        return copy.clone()
    write(buffer, copy)
    return buffer
