"""Batches of a DataLoader or generator as rows: x; (x, y); (x, y, sample_weight); a dictionary. Texts are left out."""

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
    """Return the targets, or those among the inputs by name of a model that computes its own loss."""
    if targets is not None or not isinstance(inputs, Mapping):
        return targets
    found = next((inputs[name] for name in TARGET_NAMES if name in inputs), None)
    return found if isinstance(found, Tensor) else None


def as_batch(given: Any) -> Rows:
    """Return a batch as rows; raise ConfigError if it is not one.

    A dictionary, a dataclass or a named tuple is the model's inputs by name, and the targets under a usual name. Texts,
    such as file names, are left out: `left_out` lists them.
    """
    parts = _named(given) or _numbered(given)
    try:
        rows = as_rows(*map(_without_texts, parts))
        rows.check_lengths()
    except ConfigError as error:
        single = "single number" in str(error)
        hint = " (X must give batches; one that gives rows is an IterableDataset.)" if single else ""
        raise ConfigError(f"in a batch of the data, {error}{hint}{_WAYS}") from error
    return rows


def left_out(given: Any) -> list[str]:
    """Return the names of the texts that `as_batch` leaves out."""
    named = _named(given)
    parts = _numbered(given) if named is None else named
    found = [name for part, name in zip(parts, NAMES, strict=False) for name in _texts_in(part, name)]
    beyond: list[Any] = [] if named is not None or not isinstance(given, (tuple, list)) else [*given][2:]
    return [*found, *(["part 3"] if any(map(_is_text, beyond)) else [])]


def batch_parts(given: Any) -> Rows:
    """Return inputs, targets and weights of a batch of tensors, as they are."""
    return Rows(*(*(_named(given) or _numbered(given)), None, None)[:3])


def target_name(given: Any) -> str | None:
    """Return under which name a batch has its targets: "" if other parts have names, None if none has one."""
    parts, named = _parts_by_name(given), _named(given)
    if parts is None or named is None or not isinstance(named[0], Mapping):
        return None
    return next((name for name in TARGET_NAMES if name in parts), "")


def as_given(rows: Rows, name: str | None) -> Any:
    """Return rows as data gave them whose `target_name` is `name`: (x, y, sample_weight), or a dictionary."""
    if isinstance(rows.inputs, OpaqueBatch):
        return rows.inputs.given
    if name is None or not isinstance(rows.inputs, dict):
        count = 3 if rows.weights is not None else 2 if rows.targets is not None else 1
        return tuple(rows)[:count]
    others = {name: rows.targets, _WEIGHTS: rows.weights}
    return {**rows.inputs, **{key: value for key, value in others.items() if value is not None}}


def _parts_by_name(given: Any) -> Mapping[Any, Any] | None:
    parts = fields_of(given)
    if parts is None and isinstance(given, tuple):
        names: tuple[str, ...] = getattr(given, "_fields", ())
        usual = len(names) <= 3 and (len(names) < 2 or names[1] in TARGET_NAMES)  # x, y and the weights of rows
        parts = dict(zip(names, given, strict=True)) if not usual and {*TARGET_NAMES} & {*names} else None
    return parts


def _named(given: Any) -> tuple[Any, Any, Any] | None:
    """Return (inputs, targets, weights) of a batch whose parts have names, otherwise None."""
    parts = _parts_by_name(given)
    if parts is None:
        return None
    name = next((name for name in TARGET_NAMES if name in parts), None)
    inputs = {key: value for key, value in parts.items() if key not in (name, _WEIGHTS)}
    if not isinstance(given, Mapping):
        inputs = {key: value for key, value in inputs.items() if value is not None}
        inputs = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    return inputs, None if name is None else parts[name], parts.get(_WEIGHTS)


def _numbered(given: Any) -> tuple[Any, ...]:
    """Return the parts of a batch that is a tensor, or a tuple of x, y and the weights of rows."""
    if not isinstance(given, (tuple, list)) or isinstance(given, PackedSequence):
        return (given,)
    parts = [*given[:2], *(part for part in given[2:] if not _is_text(part))]
    if not 1 <= len(parts) <= 3:
        raise ConfigError(
            f"a batch must be x, (x, y) or (x, y, sample_weight), and one has {len(parts)} parts. Give several "
            f"inputs as x together: ((x1, x2), y); or by name, in a dictionary.{_OWN}"
        )
    if len(parts) == 3:
        check_weights(parts[2])
    return tuple(parts)


def check_weights(weights: Any) -> None:
    """Raise ConfigError if the third part of a batch is no row weights: integers, or of several dimensions."""
    found = weights if isinstance(weights, (Tensor, np.ndarray)) else np.asarray(weights)
    dtype = found.dtype
    whole = not (dtype.is_floating_point or dtype.is_complex) if isinstance(dtype, torch.dtype) else dtype.kind in "iub"
    if whole or found.ndim > 1:
        what = f"integers ({str(dtype).removeprefix('torch.')})" if whole else f"the shape {list(found.shape)}"
        raise ConfigError(
            f"the third part of a batch is the weight of each row (sample_weight), and this one has {what}: give "
            "weights as floats of shape (n,); if it is something else, such as ids or noise, nest it, as in "
            f"((x, noise), y).{_OWN}"
        )


def check_parts(rows: Rows, first: Rows) -> None:
    """Raise ConfigError if a batch has other parts than the first one."""
    for name, part, expected in zip(NAMES[1:], rows[1:], first[1:], strict=True):
        if (part is None) != (expected is None):
            has, had = ("no", "some") if part is None else ("some", "none")
            raise ConfigError(f"a batch of the data has {has} {name}, and the first one had {had}: all must be alike.")


def _is_text(value: Any) -> bool:
    """Return whether a value is text or bytes, or an array, a list or a tuple of such and None."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US" or (value.dtype.kind == "O" and _is_text(value.reshape(-1).tolist()))
    if isinstance(value, (list, tuple)):
        return any(part is not None for part in value) and all(part is None or _is_text(part) for part in value)
    return isinstance(value, (str, bytes))


def _without_texts(value: Any) -> Any:
    """Return a value without the texts among its parts; a value of nothing but texts stays."""
    parts = fields_of(value)
    if parts is not None:
        kept = {name: _without_texts(part) for name, part in parts.items() if not _is_text(part)}
        return kept or value
    if not isinstance(value, (list, tuple)) or _is_text(value) or not any(map(_is_text, value)):
        return value
    left = [_without_texts(part) for part in value if not _is_text(part)]
    return left[0] if len(left) == 1 else left


def _texts_in(value: Any, name: str) -> Iterator[str]:
    """Yield the names of the texts that `_without_texts` leaves out, as Python reaches them."""
    named = fields_of(value)
    parts: Any = named.items() if named is not None else enumerate(value) if isinstance(value, (list, tuple)) else ()
    if _is_text(value):
        return
    for key, part in parts:
        inner = f"{name}[{key!r}]"
        if _is_text(part):
            yield inner
        else:
            yield from _texts_in(part, inner)
