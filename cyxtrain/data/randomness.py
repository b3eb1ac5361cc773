"""The generators that training draws from: Python's, NumPy's and PyTorch's own, of this process and its device.

Training seeds them anew in each epoch, from (seed, epoch, rank): dropout and augmentation differ between epochs and
ranks, and are the same in every run. In the middle of an epoch a checkpoint keeps their states. Whoever called `fit`
finds them as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_States = tuple[Any, Any, torch.Tensor, torch.Tensor | None]


_CPU = torch.device("cpu")
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


class GeneratorStates:
    """The states of this process's generators, those of the CPU: taken when it is made."""

    def __init__(self) -> None:
        self._states = _states(_CPU)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeneratorStates):
            return NotImplemented
        (python, numbers, cpu, _), (others_python, others_numbers, others_cpu, _) = self._states, other._states
        return python == others_python and torch.equal(cpu, others_cpu) and _same_numbers(numbers, others_numbers)

    __hash__ = None  # type: ignore[assignment]

    def bring_back(self) -> None:
        """Makes the generators what they were."""
        _set_states(self._states, _CPU)


def _same_numbers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    words, others = one["state"], other["state"]
    rest = ("has_gauss", "gauss")
    same = words["pos"] == others["pos"] and all(one[name] == other[name] for name in rest)
    return bool(same and np.array_equal(words["key"], others["key"]))


def seed_generators(seed: int, epoch: int, samples: int, rank: int, device: torch.device) -> None:
    """Seeds all generators.

    Args:
        seed: Of the run.
        epoch: From 0.
        samples: Of the epoch that have been trained on before; 0 but where another number of ranks goes on.
        rank: This rank.
        device: Where the model computes.
    """
    # A hash that is the same for ever; NumPy's and PyTorch's ways of mixing seeds may change.
    digest = hashlib.blake2b(f"cyxtrain {seed} {epoch} {samples} {rank}".encode(), digest_size=24).digest()
    first, second, third = (int.from_bytes(digest[begin : begin + 8], "little") for begin in (0, 8, 16))
    random.seed(first)
    np.random.seed(np.frombuffer(digest[8:16], dtype=np.uint32))
    torch.default_generator.manual_seed(third % 2**63)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(second % 2**63)


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Whatever is drawn or seeded within, afterwards the generators are as they were."""
    states = _states(device)
    try:
        yield
    finally:
        _set_states(states, device)


def generators_as_json(device: torch.device) -> dict[str, Any]:
    """Returns the states of all generators: JSON values."""
    python, numbers, cpu, cuda = _states(device)
    version, words, gauss = python
    return {
        "python": [version, np.array(words, dtype=np.uint32).tobytes().hex(), gauss],
        "numpy": {**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].tobytes().hex()}},
        "torch": cpu.numpy().tobytes().hex(),
        "cuda": None if cuda is None else cuda.numpy().tobytes().hex(),
    }


def set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Brings back what `generators_as_json` gave.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: It is none.
    """
    version, words, gauss = states["python"]
    python = (version, tuple(int(word) for word in np.frombuffer(bytes.fromhex(words), dtype=np.uint32)), gauss)
    numbers = states["numpy"]
    key = np.frombuffer(bytes.fromhex(numbers["state"]["key"]), dtype=np.uint32)
    numbers = {**numbers, "state": {**numbers["state"], "key": key}}
    cuda = None if states["cuda"] is None else _bytes(states["cuda"])
    _set_states((python, numbers, _bytes(states["torch"]), cuda), device)


def _states(device: torch.device) -> _States:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state(), cuda


def _set_states(states: _States, device: torch.device) -> None:
    python, numbers, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numbers)
    torch.default_generator.set_state(cpu)
    if cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda, device)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
