"""The split into training and validation rows."""

from __future__ import annotations

import math
from fractions import Fraction

from cyxtrain.config.settings import require, require_integer
from cyxtrain.errors import ConfigError


def validation_rows(num_rows: int, fraction: float) -> int:
    """Return the first row of the validation part: the last `fraction` of the rows, before shuffling.

    The training part is rounded down, as in Keras, but with the decimal fraction: 0.1 of 10 rows is one row, although
    in binary 10 * (1 - 0.9) is less than one. Raises ConfigError if either part would be empty.
    """
    require_integer("validation_split", "num_rows", num_rows, 0)
    require(0 < fraction < 1, f"validation_split must be above 0 and below 1 to split data, got {fraction!r}.")
    first = math.floor(num_rows * (1 - Fraction(str(float(fraction)))))
    if not 0 < first < num_rows:
        raise ConfigError(
            f"validation_split={fraction} of {num_rows} rows leaves {first} for training and {num_rows - first} for "
            "validation; both need at least one. Give more rows or another fraction."
        )
    return first
