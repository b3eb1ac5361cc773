"""Apply what a call has changed in one process to the same objects in another.

A trainer's parts have the same names on both sides: `parts_of`. One side records digests of their attributes before the
call (`AttributeDigests`) and collects the `Changes` afterwards; the other applies them to its own objects, in place.

A checkpoint holds less: what a program that rebuilds everything needs to resume. Here also attributes, buffers outside
`state_dict` and values of any type are transferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from cyxtrain.callbacks.callback import Callback
from cyxtrain.environment import torch_compat
from cyxtrain.errors import warn
from cyxtrain.notebook.sharing import CODE, address_of, as_bytes, from_bytes, returning
from cyxtrain.optim.learning_rates import LearningRates, schedules_in
from cyxtrain.optim.optimizers import place_state
from cyxtrain.training.delegation import TrainerParts
from cyxtrain.training.trainer import DistributedTrainer

# Attributes of every module: parameters, buffers and children are parts themselves; hooks are not transferred.
_OF_MODULES = frozenset(vars(nn.Module()))
_OF_OPTIMIZERS = frozenset({"state", "param_groups", "step", "defaults"})
_NOTHING = object()
# Types that are compared and sent directly.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), *CODE, torch.dtype, torch.device)


def parts_of(trainer: DistributedTrainer, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Return the parts of a trainer, and of a call's callbacks, that both sides have, by name."""
    own = TrainerParts.of(trainer)
    schedules: list[Any] = []
    for owner in own.owners.values():
        if isinstance(owner, LearningRates):
            schedules += schedules_in(owner.scheduler)
    parts = dict(own.owners)
    parts |= {f"schedule {number}": schedule for number, schedule in enumerate(schedules)}
    for root, module in own.modules.items():
        parts |= {f"{root} module {name}": each for name, each in module.named_modules()}
        parts |= {f"{root} parameter {name}": each for name, each in module.named_parameters()}
        parts |= {f"{root} buffer {name}": each for name, each in module.named_buffers()}
    parts |= {f"callback {number}": each for number, each in enumerate([*trainer.callbacks, *callbacks])}
    return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class _Packed:
    """An attribute, pickled separately: if one cannot be rebuilt, the others can."""

    data: bytes


@dataclass(frozen=True)
class _Attribute:
    """An attribute's new value, or `_Packed`, and whether it is still the same object."""

    value: Any
    is_same: bool


@dataclass
class Changes:
    """Changes of a trainer's parts."""

    children: dict[tuple[str, str], nn.Module] = field(default_factory=dict)
    """New modules, by (parent module, name)."""
    tensors: dict[str, tuple[Tensor, bool]] = field(default_factory=dict)
    """Parameters and buffers by name, with `requires_grad`."""
    optimizers: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """The state by parameter of each, and its groups, by the optimizer's name."""
    attributes: dict[str, dict[str, _Attribute]] = field(default_factory=dict)
    """Changed ones, by part and name."""
    removed: list[tuple[str, str]] = field(default_factory=list)
    """(part, name) of attributes that were deleted."""
    lost: list[tuple[str, str, str]] = field(default_factory=list)
    """(part, name, reason) of attributes that cannot be sent."""


class AttributeDigests:
    """Digests of the attributes of a trainer's parts (`parts_of`) and of other objects, to find changes."""

    def __init__(self, trainer: DistributedTrainer, parts: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
        self._trainer = trainer
        named = {id(part) for part in parts.values()}
        others = {name: each for name, each in objects.items() if id(each) not in named}
        self._parts = {**others, **parts}
        self._pickler = returning(self._parts)
        self._known = {id(part) for part in self._parts.values()}
        self._addresses = {address_of(part) for part in self._parts.values() if isinstance(part, Tensor)}
        self._values = {(part, name): value for part, name, value in _attributes(self._parts)}
        self._before = {place: self._digest(value)[0] for place, value in self._values.items()}

    def changes(self) -> tuple[Changes, dict[str, Any]]:
        """Return the changes, and the parts that they may refer to."""
        found = Changes()
        for part, module in self._parts.items():
            if isinstance(module, nn.Module) and " module " in part:
                new = {name: each for name, each in module.named_children() if id(each) not in self._known}
                found.children |= {(part, name): each for name, each in new.items()}
        for root, module in TrainerParts.of(self._trainer).modules.items():
            # Detached: the parameter or buffer itself would be sent by name, without its values.
            for name, parameter in module.named_parameters():
                found.tensors[f"{root} parameter {name}"] = (parameter.detach(), parameter.requires_grad)
            for name, buffer in module.named_buffers():
                found.tensors[f"{root} buffer {name}"] = (buffer.detach(), False)
        for name, optimizer in self._trainer.optimizers.items():
            found.optimizers[name] = (dict(optimizer.state), optimizer.param_groups)
        self._compare_attributes(found)
        return found, self._parts

    def _compare_attributes(self, found: Changes) -> None:
        """Add the attributes that were changed or removed, and those that cannot be sent."""
        now = set()
        for part, name, value in _attributes(self._parts):
            now.add((part, name))
            digest, sent = self._digest(value)
            if self._before.get((part, name)) == digest:
                continue
            if isinstance(sent, Exception):
                found.lost.append((part, name, f"{type(sent).__name__}: {sent}"))
            else:
                is_same = value is self._values.get((part, name), _NOTHING)
                found.attributes.setdefault(part, {})[name] = _Attribute(sent, is_same)
        found.removed = [each for each in self._before if each not in now]

    def _digest(self, value: Any) -> tuple[Any, Any]:
        """Return (a digest of a value, what to send of it, or the error of one that cannot be pickled)."""
        if id(value) in self._known:
            return ("a part", id(value)), value
        if type(value) in _PLAIN or (type(value) is tuple and all(type(each) in _PLAIN for each in value)):
            return (type(value), value), value
        try:
            # A view of a part's memory is pickled, to come back as a view of the same part.
            in_a_part = isinstance(value, Tensor) and address_of(value) in self._addresses
            if type(value) in (np.ndarray, Tensor) and _is_contiguous(value) and not in_a_part:
                return (type(value), value.shape, value.dtype, xxhash.xxh3_128_digest(_memory_of(value))), value
            data = as_bytes(value, self._pickler)
        except Exception as error:
            # Without a digest, it counts as changed if another object has replaced it.
            return ("cannot be sent", id(value)), error
        return xxhash.xxh3_128_digest(data), _Packed(data)


def _is_contiguous(array: Any) -> bool:
    """Return whether the memory of an array or tensor is exactly its values, at least one."""
    if isinstance(array, Tensor):
        plain = address_of(array) != 0 and not array.is_conj() and not array.is_neg() and not array.requires_grad
        return plain and array.is_contiguous() and array.numel() > 0
    return bool(array.flags.c_contiguous and array.dtype.kind in "biufc" and array.size > 0)


def _memory_of(array: Any) -> Any:
    if isinstance(array, Tensor):
        array = array.detach().reshape(-1).view(torch.uint8).numpy()
    return array.data


def _attributes(parts: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, name, value) of all attributes to transfer."""
    for part, owner in parts.items():
        hidden: frozenset[str] = frozenset()
        if isinstance(owner, (Tensor, *CODE)):
            continue
        if isinstance(owner, nn.Module) and " module " in part:
            hidden = _OF_MODULES
        elif part == "trainer":
            hidden = TrainerParts.of(owner).local
        elif isinstance(owner, torch.optim.Optimizer):
            hidden = _OF_OPTIMIZERS
        for name, value in list(vars(owner).items()):
            if name not in hidden:
                yield part, name, value


def merge(changes: Changes, trainer: DistributedTrainer, parts: Mapping[str, Any]) -> None:
    """Apply the changes of another process to a trainer's parts (`parts_of`)."""
    modules = TrainerParts.of(trainer).modules
    # New modules first: parameters and buffers are set by their path.
    for (part, name), child in changes.children.items():
        vars(parts[part]).pop(name, None)
        torch_compat.own_modules(parts[part])[name] = child
    with torch.no_grad():
        _merge_tensors(changes.tensors, modules)
    # Gradients are not sent; the present ones belong to the weights before the call.
    trainer.model.zero_grad()
    for name, (state, groups) in changes.optimizers.items():
        _merge_optimizer(trainer.optimizers[name], state, groups)
    _merge_attributes(changes, parts)
    for part, name in changes.removed:
        vars(parts[part]).pop(name, None)
    for part, name, why in changes.lost:
        owner = f"{part} ({type(parts[part]).__name__})"
        warn(f"{owner} has changed .{name} in the workers, which cannot be sent back: {why}.")


def _merge_tensors(tensors: Mapping[str, tuple[Tensor, bool]], modules: Mapping[str, nn.Module]) -> None:
    """Set parameters and buffers, and clear the buffers that the other process no longer has."""
    for name, (tensor, is_trained) in tensors.items():
        root, kind, path = name.split(" ", 2)
        _merge_tensor(modules[root], path, tensor, is_parameter=kind == "parameter", is_trained=is_trained)
    for root, module in modules.items():
        for path in [path for path, _ in module.named_buffers()]:
            if f"{root} buffer {path}" not in tensors:
                owner, _, name = path.rpartition(".")
                torch_compat.own_buffers(module.get_submodule(owner))[name] = None


def _merge_tensor(root: nn.Module, path: str, tensor: Tensor, *, is_parameter: bool, is_trained: bool) -> None:
    owner, _, name = path.rpartition(".")
    module = root.get_submodule(owner)
    held: Any = torch_compat.own_buffers(module)
    if is_parameter:
        held = torch_compat.own_parameters(module)
    own = held.get(name)
    if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
        new = tensor.clone() if own is None else tensor.to(own.device, copy=True)
        held[name] = nn.Parameter(new, is_trained) if is_parameter else new
        return
    own.copy_(tensor)  # in place: the optimizer and the program hold this tensor
    if is_parameter:
        own.requires_grad_(is_trained)


def _merge_optimizer(optimizer: torch.optim.Optimizer, state: Any, groups: Sequence[dict[str, Any]]) -> None:
    merged = _in_place(dict(optimizer.state), state)
    optimizer.state.clear()
    optimizer.state.update(merged)
    # A callback may have added groups in the workers.
    for group, new in zip(optimizer.param_groups, groups, strict=False):
        _in_place(group, new)
    optimizer.param_groups.extend(groups[len(optimizer.param_groups) :])
    place_state(optimizer)


def _merge_attributes(changes: Changes, parts: Mapping[str, Any]) -> None:
    """Set the changed attributes; add those whose value cannot be rebuilt here to `changes.lost`."""
    for part, attributes in changes.attributes.items():
        own = vars(parts[part])
        for name, sent in attributes.items():
            value = sent.value
            if isinstance(value, _Packed):
                try:
                    value = from_bytes(value.data, parts)
                except Exception as error:
                    changes.lost.append((part, name, f"{type(error).__name__}: {error}"))
                    continue
            if sent.is_same and name in own:
                value = _refilled(own[name], value)
            own[name] = value


def _in_place(own: Any, new: Any) -> Any:
    """Return an optimizer's value, filled recursively into the existing objects."""
    if isinstance(own, dict) and isinstance(new, dict):
        return _refilled(own, {key: _in_place(own.get(key), each) for key, each in new.items()})
    return _refilled(own, new) if isinstance(own, Tensor) else new


def _refilled(own: Any, new: Any) -> Any:
    """Return a value, filled into the existing object if that is possible: others may refer to it."""
    if type(own) is not type(new) or own is new:
        return new
    if isinstance(own, (dict, set)):
        own.clear()
        own.update(new)
    elif isinstance(own, list):
        own[:] = new
    elif type(own) is Tensor and _is_alike(own, new) and not own.requires_grad:
        own.copy_(new)
    elif type(own) is np.ndarray and _is_alike(own, new) and own.flags.writeable:
        own[...] = new
    else:
        return new
    return own


def _is_alike(own: Any, new: Any) -> bool:
    return bool(own.shape == new.shape and own.dtype == new.dtype)
