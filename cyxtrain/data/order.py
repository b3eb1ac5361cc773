"""The order of a dataset's samples in each epoch: our own, or a DataLoader's sampler's; the same on every rank."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler
from typing_extensions import override

from cyxtrain.data.rng import begin_pass, generators_kept, generators_of
from cyxtrain.data.sampler import DistributedSampler, Indices, global_order
from cyxtrain.errors import ConfigError

# Rows are sorted by length within at most 50 steps, and within at most a fifth of an epoch.
_SORTED_STEPS = 50
_SORTED_PARTS = 5


class EpochOrder(NamedTuple):
    """The sample numbers of an epoch, of all ranks, and the ends of batches that are made in advance."""

    indices: Indices
    ends: Indices | None = None

    def rows(self, places: range) -> Indices:
        """Return the sample numbers at places, a view."""
        return self.indices[places.start : places.stop : places.step]

    @property
    def digest(self) -> int:
        """A hash of the order."""
        digest = xxhash.xxh3_64(self.indices.tobytes())
        if self.ends is not None:
            digest.update(self.ends.tobytes())
        return digest.intdigest() >> 1


class Order(ABC):
    """The order of each epoch."""

    is_drawn = False  # whether the user's sampler makes it, so that it may differ between ranks
    in_batches = False  # whether it comes in batches that are made in advance
    rows_per_step = 1  # over all ranks
    stateful: Sequence[Any] = ()  # parts of it with a `state_dict` that decides what comes next

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in an epoch; of batches, if they are made in advance."""

    @abstractmethod
    def of(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch, from 0."""

    @abstractmethod
    def to_evaluate(self) -> EpochOrder:
        """Return the order in which rows are evaluated and predicted."""

    @abstractmethod
    def describe(self) -> str:
        """Return a description for the header."""


class SeededOrder(Order):
    """Our own order: the rows as they are, or shuffled by (seed, epoch); then perhaps sorted by length."""

    lengths: Indices | None = None  # of the rows, if a step has samples of similar length

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self.size = size
        self.shuffle = shuffle
        self._seed = seed
        self._cached: tuple[tuple[int, ...], EpochOrder] | None = None

    @override
    def __len__(self) -> int:
        return self.size

    @override
    def of(self, epoch: int) -> EpochOrder:
        key = (epoch, self.size, self.rows_per_step)
        if self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        indices = global_order(self.size, self.shuffle, self._seed, epoch)
        if self.lengths is not None:
            # A dataset whose set_epoch changes its length does not fit any more.
            if len(self.lengths) != self.size:
                raise ConfigError(f"group_by_length has {len(self.lengths):,} lengths; X has {self.size:,} samples.")
            indices = self._grouped(indices, self.lengths, epoch)
        order = EpochOrder(indices)
        self._cached = key, order
        return order

    def _grouped(self, indices: Indices, lengths: Indices, epoch: int) -> Indices:
        """Return the order with rows of similar length in each step; rows that do not fill the last step stay there.

        If the rows are shuffled, so are the steps: from the longest to the shortest, they would train on one kind of
        row after the other. The step with the longest row comes first all the same: it needs most memory.
        """
        num_steps = self.size // self.rows_per_step
        filled = indices[: num_steps * self.rows_per_step]
        tail = indices[num_steps * self.rows_per_step :]
        sorted_steps = max(1, min(_SORTED_STEPS, num_steps // _SORTED_PARTS))
        groups = np.arange(len(filled)) // (sorted_steps * self.rows_per_step)
        by_group_and_length = np.lexsort((-lengths[filled], groups))
        steps = filled[by_group_and_length].reshape(num_steps, self.rows_per_step)
        if self.shuffle and num_steps:
            steps = steps[global_order(num_steps, self.shuffle, self._seed, epoch)]
            longest = int(lengths[steps[:, 0]].argmax())
            steps[[0, longest]] = steps[[longest, 0]]
        return np.concatenate([steps.reshape(-1), tail])

    @override
    def to_evaluate(self) -> EpochOrder:
        return EpochOrder(np.arange(self.size, dtype=np.int64))

    @override
    def describe(self) -> str:
        order = "in their own order"
        if self.shuffle:
            order = "in a new order in each epoch"
        if self.lengths is not None:
            order += ", grouped by length"
        return order


class SamplerOrder(Order):
    """The order of a user's sampler of rows or batches, drawn with the same seeds on all ranks."""

    is_drawn = True

    def __init__(self, sampler: Any, seed: int, *, in_batches: bool) -> None:
        self._sampler = sampler
        self._name = type(sampler).__name__
        self._seed = seed
        self.in_batches = in_batches
        self._first: EpochOrder | None = None
        self._parts = [sampler, getattr(sampler, "sampler", None)]
        self.stateful = list(filter(is_stateful, self._parts))
        try:
            self._size = len(sampler)
        except TypeError as error:
            raise ConfigError(
                f"the DataLoader's {self._name} has no length, and each epoch must have the same number of steps on "
                "all ranks: give it a __len__."
            ) from error

    @override
    def __len__(self) -> int:
        return self._size

    @override
    def of(self, epoch: int) -> EpochOrder:
        generators = generators_of(self._parts)
        with generators_kept(others=generators):
            begin_pass(self._parts, generators, self._seed, epoch)
            given = list(self._sampler)
        if len(given) != len(self._sampler):  # not the length at the beginning: it may differ by epoch
            raise ConfigError(
                f"the DataLoader's {self._name} has the length {len(self._sampler):,}, but gave {len(given):,}."
            )
        if not self.in_batches:
            return EpochOrder(self._numbers(given))
        batches = [self._numbers(batch) for batch in given]
        if not all(map(len, batches)):
            raise ConfigError(f"the DataLoader's {self._name} gave an empty batch: each batch needs a sample.")
        sizes = [len(batch) for batch in batches]
        return EpochOrder(np.concatenate(batches), np.cumsum(sizes, dtype=np.int64))

    def _numbers(self, given: Iterable[Any]) -> Indices:
        try:
            return np.array([operator.index(number) for number in given], dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the DataLoader's {self._name} must give sample numbers: {error}") from error

    @override
    def to_evaluate(self) -> EpochOrder:
        """Return the order of the first epoch; the sampler is iterated once, and its state restored."""
        if self._first is None:
            states = states_of(self.stateful)
            self._first = self.of(0)
            load_states(self.stateful, states)
        return self._first

    @override
    def describe(self) -> str:
        return f"as {self._name} draws them, alike on all ranks"


def order_of(loader: DataLoader[Any], size: int, seed: int) -> Order:
    """Return a DataLoader's order: our own for PyTorch's samplers that shuffle, keep or shard a dataset."""
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return SamplerOrder(batches, seed, in_batches=True)
    sampler: Any = loader.sampler
    if batches is not None:
        sampler = batches.sampler  # a DataLoader that is given a batch_sampler does not use its own sampler
    shuffle = _shuffle_of(sampler, size)
    if shuffle is None:
        return SamplerOrder(sampler, seed, in_batches=False)
    return SeededOrder(size, shuffle, seed)


def _shuffle_of(sampler: Any, size: int) -> bool | None:
    """Return whether a sampler of all samples shuffles them; None for other samplers."""
    kind = type(sampler)
    if kind is TorchSampler and len(sampler.dataset) == size:
        return bool(sampler.shuffle)
    if kind is DistributedSampler and sampler.total_size() == size:
        return bool(sampler.shuffle)
    if kind is SequentialSampler and len(sampler.data_source) == size:
        return False
    if kind is RandomSampler and len(sampler.data_source) == len(sampler) == size and not sampler.replacement:
        return True
    return None


def lengths_of(asked: Any, size: int, dataset: Any = None) -> Indices:
    """Return the length of each sample: as given, by a function of a sample, or of its first part (True)."""
    if asked is True:
        asked = _first_length
    if callable(asked):
        if dataset is None:
            raise ConfigError("X is arrays: give the length of each sample, such as group_by_length=mask.sum(1).")
        with generators_kept():
            asked = [asked(dataset[row]) for row in range(size)]
    if isinstance(asked, Tensor):
        asked = asked.cpu()
    found = np.asarray(asked)
    if found.shape != (size,) or found.dtype.kind not in "iuf":
        raise ConfigError(
            f"group_by_length has the shape {list(found.shape)} and the type {found.dtype}, and X has {size:,} "
            "samples: give True, a function of a sample that returns its length, or one number for each sample."
        )
    return found.astype(np.int64)


def _first_length(sample: Any) -> int:
    part = sample
    if isinstance(part, (tuple, list)):
        part = part[0]
    if isinstance(part, Mapping):
        part = next(iter(part.values()))
    return len(part)


def is_stateful(part: Any) -> bool:
    """Return whether a part of the data has a state that can be saved and loaded."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def states_of(parts: Iterable[Any]) -> list[Any]:
    """Return copies of the states of parts of the data."""
    return [copy.deepcopy(part.state_dict()) for part in parts]  # it may be the live state


def load_states(parts: Sequence[Any], states: Sequence[Any]) -> None:
    """Load into parts of the data the states that `states_of` returned."""
    for part, state in zip(parts, states, strict=False):
        part.load_state_dict(copy.deepcopy(state))  # which the part may keep and change
