"""Batches of a DataLoader or generator as rows: x; (x, y); (x, y, sample_weight); a dictionary. No strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cyxtrain.data.batches.rows import NAMES, Rows, as_rows
from cyxtrain.data.batches.structure import OpaqueBatch, Tree, fields_of
from cyxtrain.errors import ConfigError

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""Names of targets in a batch that is a dictionary, and among the inputs by name of a model that computes its loss."""
_WEIGHTS = "sample_weight"
_OWN = " A train_step of your own gets batches of any form as they are, from a DataLoader over a Dataset with a length."
_WAYS = f" Let the collate_fn pad to one row per sample, as torch.nn.utils.rnn.pad_sequence does.{_OWN}"


def labels_of(inputs: Tree, targets: Tree | None) -> Tree | None:
    """Return the targets, or labels among the inputs by name, as of a model that computes its own loss."""
    if targets is not None or not isinstance(inputs, Mapping):
        return targets
    name = _name_of_targets(inputs)
    if name is None or not isinstance(inputs[name], Tensor):
        return None
    return inputs[name]


def _name_of_targets(parts: Mapping[Any, Any]) -> str | None:
    return next((name for name in TARGET_NAMES if name in parts), None)


def as_batch(given: Any) -> Rows:
    """Return a batch as rows; raise ConfigError if it is not one.

    A dictionary, a dataclass or a named tuple is the model's inputs by name, and the targets under a usual name.
    Strings, such as file names, are left out: `left_out` lists them.
    """
    parts = _parts(given)
    try:
        rows = as_rows(*map(_without_strings, parts))
        rows.check_lengths()
    except ConfigError as error:
        hint = ""
        if "single number" in str(error):
            hint = " (X must give batches; one that gives samples is an IterableDataset.)"
        raise ConfigError(f"in a batch of the data, {error}{hint}{_WAYS}") from error
    return rows


def left_out(given: Any) -> list[str]:
    """Return the names of the strings that `as_batch` leaves out."""
    found: list[str] = []
    for part, name in zip(_parts(given), NAMES, strict=False):
        found.extend(_strings_in(part, name))
    if _named(given) is None and isinstance(given, (tuple, list)) and any(map(_is_string, [*given][2:])):
        found.append("part 3")
    return found


def batch_parts(given: Any) -> Rows:
    """Return inputs, targets and weights of a batch of tensors, as they are."""
    return Rows(*(*_parts(given), None, None)[:3])


def target_name(given: Any) -> str | None:
    """Return under which name a batch has its targets: "" if other parts have names, None if none has one."""
    parts = _parts_by_name(given)
    named = _named(given)
    if parts is None or named is None or not isinstance(named[0], Mapping):
        return None
    return _name_of_targets(parts) or ""


def as_given(rows: Rows, name: str | None) -> Any:
    """Return rows in the form of their data, (x, y, sample_weight) or a dictionary with the target `name`."""
    if isinstance(rows.inputs, OpaqueBatch):
        return rows.inputs.given
    if name is None or not isinstance(rows.inputs, dict):
        if rows.weights is not None:
            return tuple(rows)
        if rows.targets is not None:
            return rows.inputs, rows.targets
        return (rows.inputs,)
    found: dict[str, Any] = dict(rows.inputs)
    if rows.targets is not None:
        found[name] = rows.targets
    if rows.weights is not None:
        found[_WEIGHTS] = rows.weights
    return found


def _parts(given: Any) -> tuple[Any, ...]:
    """Return one to three parts of a batch: inputs, targets and weights."""
    return _named(given) or _numbered(given)


def _parts_by_name(given: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a batch by name: of a dictionary, a dataclass, or a named tuple that has targets."""
    parts = fields_of(given)
    if parts is not None or not isinstance(given, tuple):
        return parts
    names: tuple[str, ...] = getattr(given, "_fields", ())
    if len(names) <= 3 and (len(names) < 2 or names[1] in TARGET_NAMES):
        return None  # x, y and the weights of samples, in this order
    if not {*TARGET_NAMES} & {*names}:
        return None
    return dict(zip(names, given, strict=True))


def _named(given: Any) -> tuple[Any, Any, Any] | None:
    """Return (inputs, targets, weights) of a batch whose parts have names, otherwise None."""
    parts = _parts_by_name(given)
    if parts is None:
        return None
    name = _name_of_targets(parts)
    targets = None if name is None else parts[name]
    inputs = {key: value for key, value in parts.items() if key not in (name, _WEIGHTS)}
    if not isinstance(given, Mapping):
        inputs = {key: value for key, value in inputs.items() if value is not None}
        if len(inputs) == 1:
            (inputs,) = inputs.values()
    return inputs, targets, parts.get(_WEIGHTS)


def _numbered(given: Any) -> tuple[Any, ...]:
    """Return the parts of a batch that is a tensor, or a tuple of x, y and the weights of samples."""
    if not isinstance(given, (tuple, list)) or isinstance(given, PackedSequence):  # a tuple, but one value
        return (given,)
    parts = [*given[:2], *(part for part in given[2:] if not _is_string(part))]
    if not 1 <= len(parts) <= 3:
        raise ConfigError(
            f"a batch must be x, (x, y) or (x, y, sample_weight), and one has {len(parts)} parts. Give several "
            f"inputs as x together: ((x1, x2), y); or by name, in a dictionary.{_OWN}"
        )
    if len(parts) == 3:
        check_weights(parts[2])
    return tuple(parts)


def check_weights(weights: Any) -> None:
    """Raise ConfigError if the third part of a batch cannot be row weights: integers, or of several dimensions."""
    found = weights if isinstance(weights, (Tensor, np.ndarray)) else np.asarray(weights)
    if _are_integers(found.dtype):
        what = f"integers ({str(found.dtype).removeprefix('torch.')})"
    elif found.ndim > 1:
        what = f"the shape {list(found.shape)}"
    else:
        return
    raise ConfigError(
        f"the third part of a batch is the weight of each sample (sample_weight), and this one has {what}: give "
        "weights as floats of shape (n,); if it is something else, such as ids or noise, nest it, as in "
        f"((x, noise), y).{_OWN}"
    )


def _are_integers(dtype: Any) -> bool:
    if isinstance(dtype, torch.dtype):
        return not dtype.is_floating_point and not dtype.is_complex
    return dtype.kind in "iub"


def check_parts(rows: Rows, first: Rows) -> None:
    """Raise ConfigError if a batch has other parts than the first one."""
    for name, part, expected in zip(NAMES[1:], rows[1:], first[1:], strict=True):
        if part is None and expected is not None:
            raise ConfigError(f"a batch of the data has no {name}, and the first one had some: all must be alike.")
        if part is not None and expected is None:
            raise ConfigError(f"a batch of the data has some {name}, and the first one had none: all must be alike.")


def _is_string(value: Any) -> bool:
    """Return whether a value is a string or bytes, or an array, a list or a tuple of these and None."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US" or (value.dtype.kind == "O" and _is_string(value.reshape(-1).tolist()))
    if isinstance(value, (list, tuple)):
        parts = [part for part in value if part is not None]
        return len(parts) > 0 and all(map(_is_string, parts))
    return isinstance(value, (str, bytes))


def _without_strings(value: Any) -> Any:
    """Return a value without the strings among its parts; a value of nothing but strings stays."""
    parts = fields_of(value)
    if parts is not None:
        kept = {name: _without_strings(part) for name, part in parts.items() if not _is_string(part)}
        return kept or value
    if not isinstance(value, (list, tuple)) or _is_string(value) or not any(map(_is_string, value)):
        return value
    left = [_without_strings(part) for part in value if not _is_string(part)]
    if len(left) == 1:
        return left[0]
    return left


def _strings_in(value: Any, name: str) -> Iterator[str]:
    """Yield the names of the strings that `_without_strings` leaves out, as Python reaches them."""
    if _is_string(value):
        return
    parts: Any = ()
    if isinstance(value, (list, tuple)):
        parts = enumerate(value)
    named = fields_of(value)
    if named is not None:
        parts = named.items()
    for key, part in parts:
        inner = f"{name}[{key!r}]"
        if _is_string(part):
            yield inner
        else:
            yield from _strings_in(part, inner)
