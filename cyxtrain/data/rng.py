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
from numpy.random.mtrand import get_bit_generator, set_bit_generator  # type checkers miss numpy.random's
from torch.utils.data import ConcatDataset, Subset

from cyxtrain.environment import accelerator

States = tuple[Any, Any, torch.Tensor, torch.Tensor | None]
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


class MT19937(np.random.MT19937):
    """NumPy's, whose state can leave out its 624 words: they take 0.1 ms. A state holds the name of the class."""

    is_brief = False

    @property
    def state(self) -> Any:
        """The state; if `is_brief`, without the words. `np.random` adds a normal number that it has in store."""
        if self.is_brief:
            return {"bit_generator": "MT19937", "state": {}}
        return super().state

    @state.setter
    def state(self, value: Any) -> None:
        vars(np.random.MT19937)["state"].__set__(self, value)


def use_own_numpy() -> None:
    """Let `np.random` continue in a generator of ours, which `Generators` exchanges in microseconds."""
    state = np.random.get_state(legacy=False)
    set_bit_generator(_numpy_copy())
    if state["has_gauss"]:
        np.random.set_state({**state, **get_bit_generator().state})  # which may be of another kind


def _numpy_copy() -> MT19937:
    """Return a generator of ours in the state of `np.random`, or in any if that is of another kind."""
    found = MT19937(0)
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        found.state = state
    return found


class Generators:
    """The generators of this process and of a device, and the data's `others`, to be put back in place later.

    NumPy's is kept itself, not its state: another must take its place before anything is drawn.
    """

    def __init__(self, others: Sequence[torch.Generator] = (), device: torch.device = CPU) -> None:
        self.python = random.getstate()
        self.cpu = torch.default_generator.get_state()
        self._numpy = get_bit_generator()
        self._numpy_state = _numpy_state(self._numpy)
        self._others = [(generator, generator.get_state()) for generator in others]
        self._device = device
        self._of_device = _device_state(device)

    def use(self) -> None:
        """Put them in place."""
        random.setstate(self.python)
        torch.default_generator.set_state(self.cpu)
        _set_device_state(self._of_device, self._device)
        set_bit_generator(self._numpy)  # which forgets the normal number
        if self._numpy_state["has_gauss"]:
            np.random.set_state({**self._numpy_state, **self._numpy.state})
        for generator, state in self._others:
            generator.set_state(state)

    def states(self) -> States:
        """Return copies of the states of those of the CPU, while they are not in place."""
        return self.python, {**self._numpy_state, **self._numpy.state}, self.cpu, None


def _numpy_state(generator: Any) -> dict[str, Any]:
    """Return the state of `np.random`, which draws from a generator; without words if that is one of ours."""
    if not isinstance(generator, MT19937):
        return np.random.get_state(legacy=False)
    generator.is_brief = True
    try:
        return np.random.get_state(legacy=False)
    finally:
        generator.is_brief = False


@contextlib.contextmanager
def generators_apart(others: Sequence[torch.Generator] = (), device: torch.device = CPU) -> Iterator[Generators]:
    """Put the generators back in place afterwards. Put another NumPy's in place before anything is drawn."""
    found = Generators(others, device)
    try:
        yield found
    finally:
        found.use()


@contextlib.contextmanager
def generators_kept(device: torch.device = CPU, others: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the generators afterwards, whatever is drawn or seeded within."""
    numpy_generator = get_bit_generator()
    states = _get_states(device)
    own = [(generator, generator.get_state()) for generator in others]
    try:
        yield
    finally:
        set_bit_generator(numpy_generator)
        _set_states(states, device)
        for generator, state in own:
            generator.set_state(state)


class RowGenerators:
    """The generators of the CPU while rows are loaded; once rows draw from any, they are seeded for each row.

    Rows draw from copies of training's at first. What a copy gives next tells whether rows have drawn from it: to
    compare states would take longer than to load some rows.
    """

    def __init__(self) -> None:
        self.are_drawn_from = False
        self._python_is = False  # seeding it takes longest
        self._python: tuple[Any, int] | None = None  # the state in which rows find it, and what it gives then
        self._numpy: list[MT19937] = []  # rows draw from the first; the second is in the same state
        self._seeded: MT19937 | None = None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Keep training's generators as they are, whatever rows draw within."""
        with generators_apart() as training:
            self._cpu = training.cpu
            if self._python is None:
                # Without a normal number in store, which would be drawn without a trace.
                state = (*training.python[:2], None)
                random.setstate(state)
                self._python = (state, random.getrandbits(128))
                self._numpy = [_numpy_copy(), _numpy_copy()]
            random.setstate(self._python[0])
            if self.are_drawn_from:
                self._use_seeded()
            else:
                set_bit_generator(self._numpy[0])
            yield

    def find_draws(self) -> bool:
        """Return whether rows have drawn from a generator that was not seeded, and is from now on."""
        assert self._python is not None
        state, expected = self._python
        python = not self._python_is and random.getrandbits(128) != expected
        others = not self.are_drawn_from and self._are_others_drawn_from()
        self._python_is = self._python_is or python
        if python or others:
            self.are_drawn_from = True
            random.setstate(state)
            self._use_seeded()
        return python or others

    def _are_others_drawn_from(self) -> bool:
        numpy_next, expected = (each.random_raw(4).tolist() for each in self._numpy)
        cpu = torch.default_generator.get_state()
        # torch.equal takes longer.
        return numpy_next != expected or cpu.numpy().tobytes() != self._cpu.numpy().tobytes()

    def _use_seeded(self) -> None:
        if self._seeded is None:
            self._seeded = MT19937(0)
        set_bit_generator(self._seeded)

    def seed_row(self, seed: int) -> None:
        """Seed those that rows draw from."""
        if self._python_is:
            random.seed(seed)
        _seed_others(seed)

    def seed_all(self, seed: int) -> None:
        """Seed all, for what cannot be loaded again."""
        self._use_seeded()
        random.seed(seed)
        _seed_others(seed)


def _seed_others(seed: int) -> None:
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.default_generator.manual_seed(seed >> 1)


def generators_as_json(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators as JSON values."""
    return as_json(_get_states(device), device)


def as_json(states: States, device: torch.device = CPU) -> dict[str, Any]:
    """Return states as JSON values."""
    python, numpy_state, cpu, own = states
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


def _get_states(device: torch.device) -> States:
    numpy_state = np.random.get_state(legacy=False)
    return random.getstate(), numpy_state, torch.default_generator.get_state(), _device_state(device)


def _set_states(states: States, device: torch.device) -> None:
    python, numpy_state, cpu, own = states
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.default_generator.set_state(cpu)
    _set_device_state(own, device)


def _device_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of an accelerator's generator; None for the CPU."""
    if not accelerator.is_accelerator(device):
        return None
    with _on(device) as module:
        state: torch.Tensor = module.get_rng_state()
    return state


def _set_device_state(state: torch.Tensor | None, device: torch.device) -> None:
    if state is not None and accelerator.is_accelerator(device):
        with _on(device) as module:
            module.set_rng_state(state)


def _from_hex(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[Any]:
    """Make an accelerator the current device within; yield PyTorch's module for its type."""
    with torch.accelerator.device_index(accelerator.indexed(device).index):
        yield torch.get_device_module(device)


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


def begin_pass(parts: Iterable[Any], others: Sequence[torch.Generator], seed: int, number: int, rank: int = 0) -> None:
    """Seed all generators for a pass of a rank (0: ranks have the same data); call `set_epoch` of the parts.

    NumPy's is a new one: the one before is training's.
    """
    set_bit_generator(MT19937(0))
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
