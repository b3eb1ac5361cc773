"""Random generators of training and data: Python's, NumPy's and PyTorch's, of this process and its device.

Each epoch seeds them from (seed, epoch, rank): dropout and augmentation differ between epochs and ranks, and repeat in
every run. A checkpoint in the middle of an epoch stores their states. After `fit` they are restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from cyxtrain.environment import accelerator

_States = tuple[Any, Any, torch.Tensor, torch.Tensor | None]
CPU = torch.device("cpu")
# Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (2014), figure 16, with Stafford's mix 13.
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def seed_generators(seed: int, epoch: int, samples: int, rank: int, device: torch.device) -> None:
    """Seed all generators; `samples`: rows of the epoch that were trained before a resume, or 0 at its beginning."""
    # A hash that never changes; NumPy's and PyTorch's ways of mixing seeds may.
    digest = hashlib.blake2b(f"cyxtrain {seed} {epoch} {samples} {rank}".encode(), digest_size=24).digest()
    python_seed, device_seed, torch_seed = (int.from_bytes(digest[begin : begin + 8], "little") for begin in (0, 8, 16))
    random.seed(python_seed)
    np.random.seed(np.frombuffer(digest[8:16], dtype=np.uint32))
    torch.default_generator.manual_seed(torch_seed % 2**63)
    if accelerator.is_accelerator(device):
        with _on(device) as module:
            module.manual_seed(device_seed % 2**63)


class GeneratorStates:
    """The states of this process's generators, and of the data's `others`, at construction."""

    def __init__(self, device: torch.device = CPU, others: Sequence[torch.Generator] = ()) -> None:
        self._device = device
        self._states = _get_states(device)
        self._others = [(generator, generator.get_state()) for generator in others]

    def is_unchanged(self) -> bool:
        """Return whether nothing has been drawn since from the generators of the CPU."""
        python, numpy_state, cpu, _ = self._states
        python_now, numpy_now, cpu_now, _ = _get_states(CPU)
        if python != python_now or not torch.equal(cpu, cpu_now) or not _is_same_numpy_state(numpy_state, numpy_now):
            return False
        return all(torch.equal(state, generator.get_state()) for generator, state in self._others)

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
    python, numpy_state, cpu, own = _get_states(device)
    version, words, gauss = python
    key = numpy_state["state"]["key"].tobytes().hex()
    found: dict[str, Any] = {
        "python": [version, np.array(words, dtype=np.uint32).tobytes().hex(), gauss],
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "torch": cpu.numpy().tobytes().hex(),
        "cuda": None,  # which earlier versions expect
    }
    if own is not None:
        found[device.type] = own.numpy().tobytes().hex()
    return found


def set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `generators_as_json` returned; malformed states raise one of several exceptions."""
    version, words, gauss = states["python"]
    python = (version, tuple(int(word) for word in np.frombuffer(bytes.fromhex(words), dtype=np.uint32)), gauss)
    numpy_state = states["numpy"]
    key = np.frombuffer(bytes.fromhex(numpy_state["state"]["key"]), dtype=np.uint32)
    numpy_state = {**numpy_state, "state": {**numpy_state["state"], "key": key}}
    own = states.get(device.type)  # the state of another kind of device is of no use
    if own is not None:
        own = _from_hex(own)
    _set_states((python, numpy_state, _from_hex(states["torch"]), own), device)


def _get_states(device: torch.device) -> _States:
    own = None
    if accelerator.is_accelerator(device):
        with _on(device) as module:
            own = module.get_rng_state()
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state(), own


def _set_states(states: _States, device: torch.device) -> None:
    python, numpy_state, cpu, own = states
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.default_generator.set_state(cpu)
    if own is not None and accelerator.is_accelerator(device):
        with _on(device) as module:
            module.set_rng_state(own)


def _from_hex(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[Any]:
    """Make an accelerator the current device within; yield PyTorch's module for its type."""
    with torch.accelerator.device_index(accelerator.indexed(device).index):
        yield torch.get_device_module(device)


def _is_same_numpy_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["state"]["pos"] != other["state"]["pos"]:
        return False
    if one["has_gauss"] != other["has_gauss"] or one["gauss"] != other["gauss"]:
        return False
    return np.array_equal(one["state"]["key"], other["state"]["key"])


def row_seeds(seed: int, epoch: int, places: range) -> list[int]:
    """Return a seed for each sample of an epoch, by its place in the order of the epoch alone."""
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
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.default_generator.manual_seed(seed >> 1)


def begin_pass(parts: Iterable[Any], others: Sequence[torch.Generator], seed: int, number: int, rank: int = 0) -> None:
    """Seed all generators for a pass of a rank (0: ranks have the same data); call `set_epoch` of the parts."""
    seed_generators(seed, number, 0, rank, CPU)
    for generator in others:
        generator.manual_seed(int.from_bytes(_digest(seed, number), "little") >> 1)
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)


def set_epoch_of(dataset: Any, epoch: int) -> bool:
    """Call `set_epoch` of a dataset, or of the datasets that it combines; return whether any has it."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
        return True
    parts: list[Any] = []
    if isinstance(dataset, Subset):
        parts.append(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts.extend(dataset.datasets)
    found = [set_epoch_of(part, epoch) for part in parts]
    return any(found)


def generators_of(parts: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that parts of the data, such as a sampler, own."""
    found: dict[int, torch.Generator] = {}
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator  # PyTorch's DataLoader shares its own with its sampler
    return list(found.values())
