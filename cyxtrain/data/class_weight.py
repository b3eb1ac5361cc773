"""Row weights by class, as Keras's class_weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cyxtrain.config.settings import is_number
from cyxtrain.data.batches.rows import Rows
from cyxtrain.errors import ConfigError, shortened


def weighted(rows: Rows, weights: Mapping[Any, Any], ignored: int | None) -> Rows:
    """Return rows whose weights are multiplied by those of their classes, by class number.

    The class `ignored` needs no weight. Raises ConfigError if targets are not class numbers, shape (n,) or (n, 1), a
    class has no weight, or a weight is negative or not a number.
    """
    targets = rows.targets
    if not isinstance(targets, Tensor) or targets.numel() != len(targets) or targets.is_complex():
        raise ConfigError("class_weight needs one class number per row in y; for other targets, give sample_weight.")
    wrong = [value for value in weights.values() if not is_number(value) or not 0 <= value < math.inf]
    if wrong:
        raise ConfigError(f"class_weight must hold numbers of at least 0, got {wrong[0]!r}.")
    classes, which = torch.unique(targets.reshape(-1), return_inverse=True)
    known = weights if ignored is None else {ignored: 0.0, **weights}
    missing = [number for number in classes.tolist() if number not in known]
    if missing:
        raise ConfigError(
            f"class_weight has no weight for class {shortened(f'{number:g}' for number in missing)}, which y holds: "
            "give one for each class."
        )
    table = [float(known[number]) for number in classes.tolist()]
    factors = torch.tensor(table, dtype=torch.float64, device=targets.device)[which]
    own = rows.weights
    return rows._replace(weights=factors if own is None else own * factors.to(own.device))
