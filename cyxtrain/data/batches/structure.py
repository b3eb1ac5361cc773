"""Trees of tensors with a row per sample: one, or several in dictionaries, tuples and lists; None stays None.

Their structure as JSON values, from which a rank without samples makes a batch of the same structure.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Tree: TypeAlias = "Tensor | dict[str, Tree] | tuple[Tree, ...] | list[Tree] | OpaqueBatch"
"""Parts of the containers may be None, such as a mask that is not used; the type leaves that out for brevity."""


@runtime_checkable
class Movable(Protocol):
    """A tensor, or an object that holds tensors, such as a batch of graphs."""

    def to(self, device: Any) -> Any:
        """Return it on a device."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpaqueBatch:
    """A batch as a collate_fn made it, whose tensors need not have a row per sample, such as a batch of graphs."""

    given: Any
    rows: int

    def mapped(self, function: Callable[[Any], Any]) -> OpaqueBatch:
        """Return the batch with the result of a function for each tensor and each object with a `to`."""
        return OpaqueBatch(_mapped(function, self.given), self.rows)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Movable):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(function, part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return same_sequence(value, (_mapped(function, part) for part in value))
    fields = fields_of(value)
    if not fields:
        return value
    made = copy.copy(value)
    for name, part in fields.items():
        object.__setattr__(made, name, _mapped(function, part))  # it may be frozen
    return made


def map_tree(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a tree, or a model's output, with the result of a function for each tensor; unknown types unchanged."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, OpaqueBatch):
        return tree.mapped(lambda part: function(part) if isinstance(part, Tensor) else part)
    named = fields_of(tree)
    if named is not None:
        return with_fields(tree, {name: map_tree(function, part) for name, part in named.items()})
    if isinstance(tree, (tuple, list)):
        return same_sequence(tree, (map_tree(function, part) for part in tree))
    return tree


def same_sequence(sequence: Any, parts: Iterable[Any]) -> Any:
    """Return parts as a list, a tuple or a named tuple, whichever a sequence is."""
    if isinstance(sequence, list):
        return list(parts)
    make = getattr(sequence, "_make", tuple)  # a named tuple's takes the parts as one argument, its class does not
    return make(parts)


def as_tensor(value: Any) -> Tensor:
    """Return a tensor unchanged, a number as a tensor on the CPU, whatever the default device and dtype are."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    return torch.as_tensor(value, device="cpu")


def leaves(output: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield the name of each part as Python reaches it, such as "output['scores']", and the part, unless it is None."""
    if isinstance(output, OpaqueBatch):
        output = output.given
    named: Any = fields_of(output)
    if named is None and _is_sequence(output):
        named = dict(enumerate(output))
    if named is not None:
        for key, part in named.items():
            yield from leaves(part, f"{name}[{key!r}]")
    elif output is not None:
        yield name, output


def with_parts(output: Any, parts: Mapping[str, Any], name: str = "output") -> Any:
    """Return an output of the same structure with other parts, by the names of `leaves`."""
    named = fields_of(output)
    if named is not None:
        return with_fields(output, {key: with_parts(part, parts, f"{name}[{key!r}]") for key, part in named.items()})
    if _is_sequence(output):
        made = (with_parts(part, parts, f"{name}[{number}]") for number, part in enumerate(output))
        return same_sequence(output, made)
    if output is None:
        return None
    return parts[name]


def named_tensors(tree: Tree | None, name: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree with their names, as `leaves` has them."""
    return [(path, each) for path, each in leaves(tree, name) if isinstance(each, Tensor)]


def _is_sequence(output: Any) -> bool:
    return isinstance(output, (tuple, list)) and not isinstance(output, PackedSequence)


def tensors(tree: Tree | None) -> list[Tensor]:
    """Return the tensors of a tree."""
    if isinstance(tree, Tensor):  # most batches: without the names
        return [tree]
    return [tensor for _, tensor in named_tensors(tree, "")]


def num_rows(tree: Tree) -> int:
    """Return how many samples each tensor of a tree has."""
    while not isinstance(tree, Tensor):
        if isinstance(tree, OpaqueBatch):
            return tree.rows
        parts = tree.values() if isinstance(tree, dict) else tree
        tree = next(part for part in parts if part is not None)
    # len() of a tensor is slow.
    return tree.shape[0]


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the fields of a dictionary or a dataclass by name, otherwise None."""
    if isinstance(value, Tensor):  # first: the others take a microsecond
        return None
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def parts_by_name(value: Any) -> dict[str, Any]:
    """Return the parts of an output or a target by name; of a tuple without names, or a list, by place."""
    named = fields_of(value)
    if named is None and not isinstance(value, (tuple, list)):
        return {}
    if named is None:
        names = getattr(value, "_fields", range(len(value)))
        named = dict(zip(names, value, strict=True))
    return {str(name): part for name, part in named.items()}


def with_fields(value: Any, fields: Mapping[Any, Any]) -> Any:
    """Return a dataclass of a value's class, other fields None; a dictionary if value is not one, or on an error."""
    make: Any = type(value)
    if dataclasses.is_dataclass(value):
        others = dict.fromkeys(field.name for field in dataclasses.fields(value) if field.init)
        with contextlib.suppress(Exception):  # its own __init__ or __post_init__ may take other things
            return make(**{**others, **fields})
    return {str(name): part for name, part in fields.items()}


def form_of(tree: Any) -> Any:
    """Return types and row shapes of a tree's tensors."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return {"dtype": str(tree.dtype).removeprefix("torch."), "shape": list(tree.shape[1:])}
    if isinstance(tree, dict):
        return {"named": {name: form_of(part) for name, part in tree.items()}}
    parts = [form_of(part) for part in tree]
    if isinstance(tree, list):
        return {"list": parts}
    return {"tuple": parts, "fields": list(getattr(tree, "_fields", ()))}


def example_of(form: Any) -> Any:
    """Return one sample of zeros of that form."""
    if form is None:
        return None
    if "dtype" in form:
        return torch.zeros(1, *form["shape"], dtype=getattr(torch, form["dtype"]), device="cpu")
    if "named" in form:
        return {name: example_of(part) for name, part in form["named"].items()}
    if "list" in form:
        return list(map(example_of, form["list"]))
    parts = map(example_of, form["tuple"])
    if not form["fields"]:
        return tuple(parts)
    return namedtuple("Batch", form["fields"])(*parts)


def dtypes_of(form: Any) -> Any:
    """Return what all batches of the data share: the parts, their types and numbers of dimensions."""
    if isinstance(form, list):
        return [dtypes_of(part) for part in form]
    if form is None:
        return None
    if "dtype" in form:
        return f"{form['dtype']} of {len(form['shape']) + 1} dimensions"
    if "named" in form:
        return {name: dtypes_of(part) for name, part in form["named"].items()}
    return {kind: [dtypes_of(part) for part in parts] for kind, parts in form.items() if kind != "fields"}
