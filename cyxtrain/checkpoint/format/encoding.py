"""Nested Python values as strict JSON: exact, typed, tensors stored separately, without running code.

What JSON cannot express is an object with one key that begins with a dollar sign:

    {"$tuple": [0.9, 0.999]}      a tuple
    {"$float": "nan"}             nan, inf, -inf
    {"$dict": [[1, "a"]]}         a dictionary whose keys are not plain strings
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

_JSON_TYPES = (bool, int, str, type(None))
_MARKERS = ("$tuple", "$float", "$dict", "$array", "$tensor")
_NUMERIC_KINDS = "biufc"  # NumPy's letters: bool, signed and unsigned integer, float, complex


def encode_tree(value: Any, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a value as JSON types; floats are restored bit for bit (a nan as a nan), tuples as tuples.

    `path`, such as "weight.exp_avg", names it in messages. `tensors` collects the tensors, under names made from their
    paths; without it, tensors and arrays are refused.
    """
    if isinstance(value, (np.bool_, np.integer, np.floating)):  # json knows Python's numbers alone
        value = value.item()
    if isinstance(value, _JSON_TYPES):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode_tree(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode_tree(list(value), path, tensors)}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, path, tensors)
    allowed = "numbers, strings, lists, tuples and dictionaries"
    if tensors is not None:
        if isinstance(value, torch.Tensor):
            return {"$tensor": _stored_under(path, value, tensors)}
        if _is_numeric_array(value):
            return _encoded_array(value)
        allowed += ", and tensors"
    raise CheckpointError(
        f"'{path}' is a {type(value).__name__}, which a checkpoint cannot hold: it takes {allowed}, so that loading "
        "never runs code. Convert it before saving."
    )


def _stored_under(path: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """Add a tensor to the stored ones; return its name there."""
    name = path
    while name in tensors:  # "a" + "b.c" and "a.b" + "c" are one path
        name += "'"
    tensors[name] = tensor
    return name


def _is_numeric_array(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in _NUMERIC_KINDS


def _encoded_array(array: np.ndarray[Any, Any]) -> dict[str, list[Any]]:
    little_endian = array.astype(array.dtype.newbyteorder("<"))  # on any machine: another one may read it
    return {"$array": [little_endian.dtype.str, list(array.shape), little_endian.tobytes().hex()]}


def _encoded_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode_tree(item, f"{path}.{key}", tensors) for key, item in value.items()}
    pairs = [[encode_tree(key, path), encode_tree(item, f"{path}.{key}", tensors)] for key, item in value.items()]
    return {"$dict": pairs}


def decode_tree(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the value that `encode_tree` encoded."""
    if isinstance(value, list):
        return [decode_tree(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(key, content)] = value.items()
        if key in _MARKERS:
            return _decoded(key, content, tensors)
    return {key: decode_tree(item, tensors) for key, item in value.items()}


def _decoded(marker: str, content: Any, tensors: Mapping[str, torch.Tensor] | None) -> Any:
    """Return a value that JSON cannot express, by its marker."""
    if marker == "$tuple":
        return tuple(decode_tree(content, tensors))
    if marker == "$float":
        return float(content)
    if marker == "$dict":
        return {decode_tree(name): decode_tree(item, tensors) for name, item in content}
    if marker == "$array":
        dtype, shape, data = content
        return np.frombuffer(bytes.fromhex(data), dtype=_numeric_dtype(dtype)).reshape(shape).copy()  # writable
    return (tensors or {})[content]


def _numeric_dtype(name: Any) -> np.dtype[Any]:
    dtype = np.dtype(str(name))
    if dtype.kind not in _NUMERIC_KINDS:
        raise ValueError(f"{name} is not a numeric dtype")
    return dtype


def same_kinds(saved: Any, own: Any) -> bool:
    """Return whether a saved value may replace the present one: a number a number, a dict a dict.

    Anything but a string may replace None. Names in only one of two dictionaries, and the items of lists, are not
    compared; tuples must have the same length.
    """
    if own is None:
        return not isinstance(saved, str)
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        shared = [name for name in own if name in saved]
        return all(same_kinds(saved[name], own[name]) for name in shared)
    if isinstance(own, tuple) and isinstance(saved, (list, tuple)):
        return len(own) == len(saved) and all(map(same_kinds, saved, own))
    if _is_number(own) and _is_number(saved):
        return True
    return type(own) is type(saved)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
