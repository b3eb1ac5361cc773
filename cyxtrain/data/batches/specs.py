"""The structure of a batch as JSON values, from which a rank without rows makes a batch of the same structure."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor


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
    return {"tuple": parts, "fields": list(getattr(tree, "_fields", ()))}  # a named tuple's own


def example_of(form: Any) -> Any:
    """Return one row of zeros of that form."""
    if form is None:
        return None
    if "dtype" in form:
        return torch.zeros(1, *form["shape"], dtype=getattr(torch, form["dtype"]), device="cpu")
    if "named" in form:
        return {name: example_of(part) for name, part in form["named"].items()}
    if "list" in form:
        return list(map(example_of, form["list"]))
    parts = map(example_of, form["tuple"])
    return namedtuple("Batch", form["fields"])(*parts) if form["fields"] else tuple(parts)


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
