"""No other file than torch_compat.py reads a private name of PyTorch."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import cyxtrain
from cyxtrain.environment import torch_compat
from tests.structure import last_name, nodes

PACKAGE = Path(cyxtrain.__file__).parent
NOT_PYTORCH = {
    "_DYNAMIC_CLASS_TRACKER_BY_CLASS": "cloudpickle",
    "_DYNAMIC_CLASS_TRACKER_BY_ID": "cloudpickle",
    "_current_frames": "sys",
    "_ex_iterable": "datasets",
    "_exit": "os",
    "_is_synced": "torchmetrics",
    "_lru_cache_wrapper": "functools",
    "_reductions": "torchmetrics",
    "_replace": "named tuples",
    "_should_pickle_by_reference": "cloudpickle",
    "_update_count": "torchmetrics",
}
IN_A_HOT_PATH = {("parallel/consistency/broadcasting.py", name) for name in ("_buffers", "_modules", "_parameters")}
"""To go through all modules takes four times as long by way of a function. This list only shrinks."""
LAST_PARTS = {re.split(r"[.:]", entry.name)[-1] for entry in torch_compat.PRIVATE_NAMES}


@functools.cache
def files() -> dict[str, list[ast.AST]]:
    """The syntax nodes of every file of the package but the one that holds the names, by its path in it."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "torch_compat.py"]
    return {path.relative_to(PACKAGE).as_posix(): nodes(path) for path in paths}


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_names(tree: Iterable[ast.AST]) -> Iterator[str]:
    """The private names that a file reads of what is not its own `self`, or imports from PyTorch."""
    for node in tree:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "setattr", "delattr"):
            named = node.args[1] if len(node.args) > 1 else None
            if isinstance(named, ast.Constant) and is_private(str(named.value)):
                yield str(named.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from filter(is_private, parts)
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names if alias.name.startswith("torch.")]
            yield from (part for module in modules for part in module if is_private(part))


def own_names() -> set[str]:
    """The private names that the package itself defines: methods, functions, attributes, variables."""
    found: set[str] = set()
    for tree in files().values():
        for node in tree:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
                found.add(node.attr)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def test_no_other_file_uses_a_private_name_of_pytorch():
    allowed = (own_names() | set(NOT_PYTORCH) | {"_make", "_fields"}) - LAST_PARTS
    used = {(path, name) for path, tree in files().items() for name in foreign_names(tree) if name not in allowed}
    assert used == IN_A_HOT_PATH


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch._fused_adam_(x)", ["_fused_adam_"]),
        ("getattr(module, '_buffers', None)", ["_buffers"]),
        ("from torch._C import x", ["_C"]),
        ("from torch.distributed import _Work", ["_Work"]),
        ("self._x = cls._y", []),
    ],
)
def test_private_names_are_recognised(source, found):
    assert [*foreign_names(ast.walk(ast.parse(source)))] == found
