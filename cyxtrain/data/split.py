"""Where the training data end and the validation data begin."""

from __future__ import annotations

import math
from fractions import Fraction

from cyxtrain.config.settings import require, require_integer
from cyxtrain.errors import ConfigError


def validation_rows(num_rows: int, fraction: float) -> int:
    """Returns the first row of the validation part, which is the last `fraction` of the rows, before shuffling.

    The training part is rounded down, as in Keras, but the fraction is taken as it is written: 0.1 of 10
    rows is one row, although in binary 10 * (1 - 0.9) is less than one.

    Args:
        num_rows: Rows in the data.
        fraction: Above 0 and below 1.

    Raises:
        ConfigError: Either part would be empty.
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
