"""Seeds of what data draw for a row, for a batch and in a pass."""

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


def row_seeds(seed: int, epoch: int, places: range) -> list[int]:
    """Return a seed for each row of an epoch; it depends on the row's place in the order of the epoch alone."""
    first = int.from_bytes(_digest(seed, epoch), "little")
    with np.errstate(over="ignore"):
        keys = np.uint64(first) + np.array(places, dtype=np.uint64) * np.uint64(_MIX[0])
        for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
            keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
        found: list[int] = (keys ^ (keys >> np.uint64(31))).tolist()
    return found


def _digest(*words: int) -> bytes:
    return hashlib.blake2b(f"cyxtrain row {' '.join(map(str, words))}".encode(), digest_size=8).digest()


def seed_for_row(seed: int) -> None:
    """Seed the CPU generators of this process, from which rows are made."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed >> 1)


def begin_pass(parts: Iterable[Any], others: Sequence[torch.Generator], seed: int, number: int, rank: int = 0) -> None:
    """Seed all generators for a pass through the data, and call `set_epoch` of those parts that have it.

    Args:
        parts: Parts of the data, such as a sampler.
        others: Generators of theirs.
        seed: Of the run.
        number: Of the pass, from 0.
        rank: The rank whose random numbers these are; 0 if all ranks have the same data.
    """
    seed_generators(seed, number, 0, rank, CPU)
    for generator in others:
        generator.manual_seed(int.from_bytes(_digest(seed, number), "little") >> 1)
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)


def set_epoch_of(dataset: Any, epoch: int) -> bool:
    """Call `set_epoch` of a dataset, or of those that it combines; return whether there is one."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
        return True
    parts: list[Any] = [dataset.dataset] if isinstance(dataset, Subset) else []
    parts += dataset.datasets if isinstance(dataset, ConcatDataset) else []
    found = [set_epoch_of(part, epoch) for part in parts]
    return any(found)


def generators_of(parts: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that parts of the data, such as a sampler, own."""
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
