"""Tensors with a row per sample, alone or in dictionaries, tuples and lists: several inputs, several targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Tensor | dict[str, "Tree"] | tuple["Tree", ...] | list["Tree"]


def map_tree(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Returns a tree of the same form, with what a function makes of each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: map_tree(function, part) for name, part in tree.items()}
    parts = [map_tree(function, part) for part in tree]
    if isinstance(tree, list):
        return parts
    make: Callable[[list[Tree]], tuple[Tree, ...]] = getattr(tree, "_make", tuple)  # a named tuple's own
    return make(parts)


def as_tensor(value: Any) -> Tensor:
    """Returns a tensor as it is, a number as one on the CPU; PyTorch's moves both to the device that is the default."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def map_output(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Returns what a model gave, with what a function makes of each tensor; of an unknown kind, as it is."""
    if isinstance(output, Tensor):
        return function(output)
    if type(output) in (tuple, list):
        return type(output)(map_output(function, part) for part in output)
    return {name: map_output(function, part) for name, part in output.items()} if type(output) is dict else output


def leaves(tree: Tree | None, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Gives (name, tensor) of each, named as Python reaches it, such as "X['image']" or "y[0]"; of None, nothing."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from leaves(part, f"{name}[{key!r}]")
    elif tree is not None:
        for number, part in enumerate(tree):
            yield from leaves(part, f"{name}[{number}]")


def tensors(tree: Tree | None) -> list[Tensor]:
    """Returns the tensors of a tree."""
    return [tree] if isinstance(tree, Tensor) else [tensor for _, tensor in leaves(tree)]


def num_rows(tree: Tree) -> int:
    """Returns how many rows each of its tensors has."""
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree.shape[0]  # len() of a tensor is slow
