"""What a DataLoader or a generator gives as a batch, taken apart: x; (x, y); (x, y, sample_weight); a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cyxtrain.data.batches.rows import NAMES, Rows, as_rows
from cyxtrain.data.batches.structure import Tree
from cyxtrain.data.batches.texts import fields_of, is_text, texts_in, without_texts
from cyxtrain.errors import ConfigError

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""What a dictionary that is a batch may call its targets; and a model that computes its own loss of inputs by name."""
_WEIGHTS = "sample_weight"


def answers_in(inputs: Tree, targets: Tree | None) -> Tree | None:
    """Return the targets; without any, those that a model which computes its own loss gets among inputs by name."""
    if targets is not None or not isinstance(inputs, Mapping):
        return targets
    found = next((inputs[name] for name in TARGET_NAMES if name in inputs), None)
    return found if isinstance(found, Tensor) else None


def as_batch(given: Any) -> Rows:
    """Returns a batch as rows.

    A dictionary, a dataclass or a named tuple is the model's inputs by name, and the targets under a usual name. Texts,
    such as the names of files, are left out: `left_out` says which.

    Raises:
        ConfigError: It is none.
    """
    parts = _named(given) or _numbered(given)
    try:
        rows = as_rows(*map(without_texts, parts))
    except ConfigError as error:
        hint = (
            " (X must give batches; one that gives rows is an IterableDataset.)"
            if "single number" in str(error)
            else ""
        )
        raise ConfigError(f"in a batch of the data, {error}{hint}") from error
    rows.check_lengths()
    return rows


def left_out(given: Any) -> list[str]:
    """Return what of a batch is no part of its rows: the names of its texts."""
    named = _named(given)
    parts = _numbered(given) if named is None else named
    found = [name for part, name in zip(parts, NAMES, strict=False) for name in texts_in(part, name)]
    beyond: list[Any] = [] if named is not None or not isinstance(given, (tuple, list)) else [*given][2:]
    third = any(map(is_text, beyond))
    return [*found, *(["part 3"] if third else [])]


def _named(given: Any) -> tuple[Any, Any, Any] | None:
    """Return (inputs, targets, weights) of a batch whose parts have names; None: they have none."""
    parts = fields_of(given)
    if parts is None and isinstance(given, tuple):
        names: tuple[str, ...] = getattr(given, "_fields", ())
        usual = len(names) <= 3 and (len(names) < 2 or names[1] in TARGET_NAMES)  # x, y and the weights of rows
        parts = dict(zip(names, given, strict=True)) if not usual and {*TARGET_NAMES} & {*names} else None
    if parts is None:
        return None
    name = next((name for name in TARGET_NAMES if name in parts), None)
    inputs = {key: value for key, value in parts.items() if key not in (name, _WEIGHTS)}
    if not isinstance(given, Mapping) and len(inputs) == 1:
        [inputs] = inputs.values()
    return inputs, None if name is None else parts[name], parts.get(_WEIGHTS)


def _numbered(given: Any) -> tuple[Any, ...]:
    """Return the parts of a batch that is a tensor, or a tuple of x, y and the weights of rows."""
    if not isinstance(given, (tuple, list)):
        return (given,)
    parts = [*given[:2], *(part for part in given[2:] if not is_text(part))]
    if not 1 <= len(parts) <= 3:
        raise ConfigError(
            f"a batch must be x, (x, y) or (x, y, sample_weight), and one has {len(parts)} parts. Give several "
            "inputs as x together: ((x1, x2), y); or by name, in a dictionary."
        )
    if len(parts) == 3:
        check_weights(parts[2])
    return tuple(parts)


def check_weights(weights: Any) -> None:
    """Refuse a third part of a batch that is likely to be something else than the weights of rows.

    Raises:
        ConfigError: It holds integers or truths.
    """
    dtype = weights.dtype if isinstance(weights, (Tensor, np.ndarray)) else np.asarray(weights).dtype
    whole = not (dtype.is_floating_point or dtype.is_complex) if isinstance(dtype, torch.dtype) else dtype.kind in "iub"
    if whole:
        raise ConfigError(
            f"the third part of a batch is the weight of each row (sample_weight), and this one holds integers "
            f"({str(dtype).removeprefix('torch.')}): give weights as floats, as in weights.float(); if they are ids or "
            "something else, take them out of the tuple."
        )


def check_parts(rows: Rows, first: Rows) -> None:
    """Refuses a batch without what the first one had, or with more.

    Raises:
        ConfigError: With what it is about.
    """
    for name, part, expected in zip(NAMES[1:], rows[1:], first[1:], strict=True):
        if (part is None) != (expected is None):
            has, had = ("no", "some") if part is None else ("some", "none")
            raise ConfigError(f"a batch of the data has {has} {name}, and the first one had {had}: all must be alike.")
