"""Which rows validation_split holds out: the last ones, or rows that the seed draws. The same on every rank."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cyxtrain.data.sampler import global_order
from cyxtrain.errors import ConfigError, counted, shortened

_Chosen = npt.NDArray[np.bool_]


def validation_rows(num_rows: int, fraction: float) -> int:
    """Return the first row of the validation part: the last `fraction` of the rows, before shuffling.

    The training part is rounded down, as in Keras, but with the decimal fraction: 0.1 of 10 samples is one, although
    in binary 10 * (1 - 0.9) is less than one. Raises ConfigError if either part would be empty.
    """
    first = math.floor(num_rows * (1 - Fraction(str(float(fraction)))))
    if not 0 < first < num_rows:
        raise ConfigError(
            f"validation_split={fraction} of {num_rows} samples leaves {first} for training and {num_rows - first} for "
            "validation; both need at least one. Give more samples or another fraction."
        )
    return first


def stratified_rows(targets: Any, count: int, seed: int) -> _Chosen:
    """Return whether each sample validates: `count` samples, with the same share of each class, up to rounding."""
    classes = _class_numbers(targets)
    names, numbers, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    single = [str(name) for name in names[sizes < 2]]
    if single:
        raise ConfigError(
            f"validation_stratify=True needs two samples of each class, and these have one: {shortened(single)}. Leave "
            "the classes out, or validation_stratify."
        )
    # The largest remainders are rounded up, so that `count` rows are held out in all.
    held_out, remainders = np.divmod(sizes * count, len(classes))
    left = count - int(held_out.sum())
    held_out[np.argsort(-remainders, kind="stable")[:left]] += 1
    held_out = np.minimum(held_out, sizes - 1)  # one sample of each class stays to train on
    order = global_order(len(classes), True, seed, 0)
    drawn = order[np.argsort(numbers.reshape(-1)[order], kind="stable")]  # by class, in the seed's order
    first_of_class = np.cumsum(sizes) - sizes
    place_in_class = np.arange(len(drawn)) - np.repeat(first_of_class, sizes)
    chosen = np.zeros(len(classes), dtype=bool)
    chosen[drawn[place_in_class < np.repeat(held_out, sizes)]] = True
    return chosen


def _class_numbers(targets: Any) -> np.ndarray[Any, Any]:
    """Return the class of each sample; raise ConfigError if targets are not classes."""
    what = type(targets).__name__
    if isinstance(targets, Tensor):
        what = f"{targets.dtype} of shape {list(targets.shape)}"
        if targets.numel() == len(targets):
            classes = targets.cpu().numpy()
            if np.array_equal(classes, classes.astype(np.int64)):
                return classes
    raise ConfigError(
        f"validation_stratify=True holds out the same share of each class, and y is {what}: give one class number "
        "per sample, or leave validation_stratify out."
    )


def grouped_rows(groups: Any, num_rows: int, count: int, seed: int) -> _Chosen:
    """Return whether each sample validates: whole groups, of at most `count` samples, or the smallest group."""
    if isinstance(groups, Tensor):
        groups = groups.cpu()
    found = np.asarray(groups)
    if found.shape != (num_rows,):
        raise ConfigError(
            f"validation_groups has the shape {list(found.shape)}, and X has {counted(num_rows, 'sample')}: give one "
            "entry for each sample."
        )
    known: dict[Any, int] = {}
    numbers = np.array([known.setdefault(each, len(known)) for each in found.tolist()])
    if len(known) < 2:
        raise ConfigError(
            "validation_groups has 1 group, and a group is never split: give at least two, or leave it out."
        )
    sizes = np.bincount(numbers)
    held_out: list[int] = []
    rows = 0
    for group in global_order(len(sizes), True, seed, 0).tolist():
        if rows + sizes[group] <= count:
            held_out.append(group)
            rows += sizes[group]
    return np.isin(numbers, held_out or [int(sizes.argmin())])
