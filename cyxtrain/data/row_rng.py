"""The random numbers that data draw: for a row, for a batch, in a pass."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from cyxtrain.data.rng import CPU, seed_generators

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (2014), figure 16, with Stafford's mix 13."""


def row_keys(seed: int, epoch: int, places: range) -> list[int]:
    """Returns what generators are seeded with for each row of an epoch: it depends on the row's place in it alone.

    Args:
        seed: Of the run.
        epoch: From 0.
        places: Of rows in the order of the epoch.
    """
    first = int.from_bytes(_digest(seed, epoch), "little")
    with np.errstate(over="ignore"):
        keys = np.uint64(first) + np.array(places, dtype=np.uint64) * np.uint64(_MIX[0])
        for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
            keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
        found: list[int] = (keys ^ (keys >> np.uint64(31))).tolist()
    return found


def _digest(*words: int) -> bytes:
    return hashlib.blake2b(f"cyxtrain row {' '.join(map(str, words))}".encode(), digest_size=8).digest()


def seed_for_row(key: int) -> None:
    """Seeds the generators of this process that rows are made with: those of the CPU."""
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key >> 1)


def begin_pass(parts: Iterable[Any], others: Sequence[torch.Generator], seed: int, number: int, rank: int = 0) -> None:
    """Seeds all generators for a pass through data, and tells those parts of the data that want to know its number.

    Args:
        parts: Such as a sampler; what has a `set_epoch` is told.
        others: Generators of theirs.
        seed: Of the run.
        number: Of the pass, from 0.
        rank: Whose random numbers these are: 0 where all ranks have the same.
    """
    seed_generators(seed, number, 0, rank, CPU)
    for generator in others:
        generator.manual_seed(int.from_bytes(_digest(seed, number), "little") >> 1)
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)


def tell_epoch(dataset: Any, epoch: int) -> bool:
    """Call `set_epoch` of a data set, or of those that it is made of; return whether there is one."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
        return True
    parts: list[Any] = [dataset.dataset] if isinstance(dataset, Subset) else []
    parts += dataset.datasets if isinstance(dataset, ConcatDataset) else []
    told = [tell_epoch(part, epoch) for part in parts]
    return any(told)


def generators_of(parts: Iterable[Any]) -> list[torch.Generator]:
    """Returns the generators that parts of the data, such as a sampler, have of their own, each once."""
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
