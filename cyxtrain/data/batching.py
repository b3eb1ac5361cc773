"""What a DataLoader or a generator gives as a batch, taken apart: x; (x, y); (x, y, sample_weight); a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cyxtrain.data.rows import NAMES, Rows, as_rows
from cyxtrain.errors import ConfigError

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""What a dictionary that is a batch may call its targets; and a model that computes its own loss of inputs by name."""
_WEIGHTS = "sample_weight"


def as_batch(given: Any) -> Rows:
    """Returns a batch as rows.

    A dictionary is the model's inputs by name, and the targets under a usual name.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(given, Mapping):
        name = next((name for name in TARGET_NAMES if name in given), None)
        inputs = {key: value for key, value in given.items() if key not in (name, _WEIGHTS)}
        parts: tuple[Any, ...] = (inputs, None if name is None else given[name], given.get(_WEIGHTS))
    elif isinstance(given, (tuple, list)):
        if not 1 <= len(given) <= 3:
            raise ConfigError(
                f"a batch must be x, (x, y) or (x, y, sample_weight), and one has {len(given)} parts. Give several "
                "inputs as x together: ((x1, x2), y)."
            )
        parts = tuple(given)
    else:
        parts = (given,)
    try:
        rows = as_rows(*parts)
    except ConfigError as error:
        hint = (
            " (X must give batches; one that gives rows is an IterableDataset.)"
            if "single number" in str(error)
            else ""
        )
        raise ConfigError(f"in a batch of the data, {error}{hint}") from error
    rows.check_lengths()
    return rows


def check_parts(rows: Rows, first: Rows) -> None:
    """Refuses a batch without what the first one had, or with more.

    Raises:
        ConfigError: With what it is about.
    """
    for name, part, expected in zip(NAMES[1:], rows[1:], first[1:], strict=True):
        if (part is None) != (expected is None):
            has, had = ("no", "some") if part is None else ("some", "none")
            raise ConfigError(f"a batch of the data has {has} {name}, and the first one had {had}: all must be alike.")
