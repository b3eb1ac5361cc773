"""Texts in a batch, such as the names of files: they are no rows of numbers, and are left out beside those."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def is_text(value: Any) -> bool:
    """Return whether a value is a text or bytes, or an array, a list or a tuple of such; None among them is one."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US" or (value.dtype.kind == "O" and is_text(value.reshape(-1).tolist()))
    if isinstance(value, (list, tuple)):
        return any(part is not None for part in value) and all(part is None or is_text(part) for part in value)
    return isinstance(value, (str, bytes))


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a dictionary or a dataclass by name; None: it is neither."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def without_texts(value: Any) -> Any:
    """Return a value without the texts that are in it beside other parts; one that is nothing else stays."""
    parts = fields_of(value)
    if parts is not None:
        kept = {name: without_texts(part) for name, part in parts.items() if not is_text(part)}
        return kept or value
    if not isinstance(value, (list, tuple)) or is_text(value) or not any(map(is_text, value)):
        return value
    left = [without_texts(part) for part in value if not is_text(part)]
    return left[0] if len(left) == 1 else left


def texts_in(value: Any, name: str) -> Iterator[str]:
    """Yield the names of the texts that `without_texts` leaves out, as Python reaches them."""
    named = fields_of(value)
    parts: Any = named.items() if named is not None else enumerate(value) if isinstance(value, (list, tuple)) else ()
    if is_text(value):
        return
    for key, part in parts:
        inner = f"{name}[{key!r}]"
        if is_text(part):
            yield inner
        else:
            yield from texts_in(part, inner)
