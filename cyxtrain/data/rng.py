"""The random generators of training and data: Python's, NumPy's and PyTorch's, of this process and its device.

Each epoch seeds them from (seed, epoch, rank): dropout and augmentation differ between epochs and ranks, and repeat in
every run. A checkpoint in the middle of an epoch stores their states. After `fit` they are as before.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cyxtrain.environment import accelerator

_States = tuple[Any, Any, torch.Tensor, torch.Tensor | None]
CPU = torch.device("cpu")


def seed_generators(seed: int, epoch: int, samples: int, rank: int, device: torch.device) -> None:
    """Seed all generators.

    Args:
        seed: Of the run.
        epoch: From 0.
        samples: Samples of the epoch already trained on, if a run resumes on another number of ranks; otherwise 0.
        rank: This rank.
        device: Where the model computes.
    """
    # A hash that never changes; NumPy's and PyTorch's ways of mixing seeds may.
    digest = hashlib.blake2b(f"cyxtrain {seed} {epoch} {samples} {rank}".encode(), digest_size=24).digest()
    first, second, third = (int.from_bytes(digest[begin : begin + 8], "little") for begin in (0, 8, 16))
    random.seed(first)
    np.random.seed(np.frombuffer(digest[8:16], dtype=np.uint32))
    torch.default_generator.manual_seed(third % 2**63)
    if accelerator.is_accelerator(device):
        with _on(device) as module:
            module.manual_seed(second % 2**63)


class GeneratorStates:
    """The states of this process's generators, and of the data's `others`, at construction."""

    def __init__(self, device: torch.device = CPU, others: Sequence[torch.Generator] = ()) -> None:
        self._device = device
        self._states = _get_states(device)
        self._others = [(generator, generator.get_state()) for generator in others]

    def is_unchanged(self) -> bool:
        """Return whether nothing has been drawn since from the generators of the CPU."""
        (python, numbers, cpu, _), now = self._states, _get_states(CPU)
        same = python == now[0] and torch.equal(cpu, now[2]) and _same_numbers(numbers, now[1])
        return same and all(torch.equal(state, generator.get_state()) for generator, state in self._others)

    def restore(self) -> None:
        """Restore the states."""
        _set_states(self._states, self._device)
        for generator, state in self._others:
            generator.set_state(state)


@contextlib.contextmanager
def generators_kept(device: torch.device = CPU, others: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the generators afterwards, whatever is drawn or seeded within."""
    states = GeneratorStates(device, others)
    try:
        yield
    finally:
        states.restore()


def generators_as_json(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators as JSON values."""
    python, numbers, cpu, own = _get_states(device)
    version, words, gauss = python
    return {
        "python": [version, np.array(words, dtype=np.uint32).tobytes().hex(), gauss],
        "numpy": {**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].tobytes().hex()}},
        "torch": cpu.numpy().tobytes().hex(),
        "cuda": None,  # which earlier versions expect
        **({} if own is None else {device.type: own.numpy().tobytes().hex()}),
    }


def set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `generators_as_json` returned.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: The states are malformed.
    """
    version, words, gauss = states["python"]
    python = (version, tuple(int(word) for word in np.frombuffer(bytes.fromhex(words), dtype=np.uint32)), gauss)
    numbers = states["numpy"]
    key = np.frombuffer(bytes.fromhex(numbers["state"]["key"]), dtype=np.uint32)
    numbers = {**numbers, "state": {**numbers["state"], "key": key}}
    own = states.get(device.type)  # the state of another kind of device is of no use
    _set_states((python, numbers, _bytes(states["torch"]), None if own is None else _bytes(own)), device)


def _get_states(device: torch.device) -> _States:
    own = None
    if accelerator.is_accelerator(device):
        with _on(device) as module:
            own = module.get_rng_state()
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state(), own


def _set_states(states: _States, device: torch.device) -> None:
    python, numbers, cpu, own = states
    random.setstate(python)
    np.random.set_state(numbers)
    torch.default_generator.set_state(cpu)
    if own is not None and accelerator.is_accelerator(device):
        with _on(device) as module:
            module.set_rng_state(own)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[Any]:
    """Make an accelerator the current device within; yield PyTorch's module for its type."""
    with torch.accelerator.device_index(accelerator.indexed(device).index):
        yield torch.get_device_module(device)


def _same_numbers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    words, others = one["state"], other["state"]
    rest = ("has_gauss", "gauss")
    same = words["pos"] == others["pos"] and all(one[name] == other[name] for name in rest)
    return bool(same and np.array_equal(words["key"], others["key"]))
