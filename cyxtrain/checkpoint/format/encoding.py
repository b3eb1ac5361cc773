"""Nested Python values as strict JSON: exact, typed, with tensors stored separately, without running code.

What JSON cannot express is an object with one key that begins with a dollar sign:

    {"$tuple": [0.9, 0.999]}      a tuple
    {"$float": "nan"}             nan, inf, -inf
    {"$dict": [[1, "a"]]}         a dictionary whose keys are not plain text
    {"$tensor": "weight.step"}    a tensor, stored under that name elsewhere
    {"$array": ["<u4", [624], "0f.."]}   a NumPy array: dtype, shape and bytes
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cyxtrain.errors import CheckpointError

_NUMBERS = (int, float, torch.Tensor)


def encode_tree(value: Any, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a value as JSON types; floats are restored bit for bit (a nan as a nan), tuples as tuples.

    `path`, such as "weight.exp_avg", names it in messages. `tensors` collects the tensors, under names made from their
    paths; without it, tensors and arrays are refused.
    """
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor) and tensors is not None:
        name = path
        while name in tensors:  # "a" + "b.c" and "a.b" + "c" are one path
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and tensors is not None:
        little = value.astype(value.dtype.newbyteorder("<"))
        return {"$array": [little.dtype.str, list(value.shape), little.tobytes().hex()]}
    if isinstance(value, list):
        return [encode_tree(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode_tree(list(value), path, tensors)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode_tree(item, f"{path}.{key}", tensors) for key, item in value.items()}
        pairs = ((key, item, f"{path}.{key}") for key, item in value.items())
        return {"$dict": [[encode_tree(key, path), encode_tree(item, place, tensors)] for key, item, place in pairs]}
    raise CheckpointError(
        f"'{path}' is a {type(value).__name__}, which a checkpoint cannot hold: it takes numbers, text, lists, tuples "
        f"and dictionaries{'' if tensors is None else ', and tensors'}, so that loading never runs code. "
        "Convert it before saving."
    )


def decode_tree(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the value that `encode_tree` encoded."""
    if isinstance(value, list):
        return [decode_tree(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(key, content)] = value.items()
        if key == "$tuple":
            return tuple(decode_tree(content, tensors))
        if key == "$float":
            return float(content)
        if key == "$dict":
            return {decode_tree(name): decode_tree(item, tensors) for name, item in content}
        if key == "$array":
            dtype, shape, data = content
            return np.frombuffer(bytes.fromhex(data), dtype=_plain(dtype)).reshape(shape).copy()
        if key == "$tensor":
            return (tensors or {})[content]
    return {key: decode_tree(item, tensors) for key, item in value.items()}


def _plain(name: Any) -> np.dtype[Any]:
    """Return the dtype of an array of numbers."""
    dtype = np.dtype(str(name))
    if dtype.kind not in "biufc":
        raise ValueError(f"{name} is no dtype of numbers")
    return dtype


def same_kinds(saved: Any, own: Any) -> bool:
    """Return whether a saved value may replace the present one: a number a number, a dictionary a dictionary.

    Anything but a text may replace None. Names in only one of two dictionaries, and the items of lists, are not
    compared; tuples must have the same length.
    """
    if own is None:
        return not isinstance(saved, str)
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        return all(same_kinds(saved[name], own[name]) for name in own if name in saved)
    if isinstance(own, tuple) and isinstance(saved, (list, tuple)):
        return len(own) == len(saved) and all(map(same_kinds, saved, own))
    numbers = all(isinstance(each, _NUMBERS) and not isinstance(each, bool) for each in (saved, own))
    return numbers or type(own) is type(saved)
