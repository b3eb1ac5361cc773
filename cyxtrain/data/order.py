"""In which order the rows of a data set come, where a DataLoader says so: its sampler, made the same on every rank."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from cyxtrain.data.rng import generators_kept
from cyxtrain.data.row_rng import begin_pass, generators_of
from cyxtrain.data.sampler import DistributedSampler, Indices, global_order
from cyxtrain.errors import ConfigError


class OrderOf(NamedTuple):
    """The rows of an epoch, of all ranks together.

    Attributes:
        indices: Their numbers in the data set, shape (rows,).
        ends: Of each batch in them, where batches are made in advance, shape (batches,); else None.
    """

    indices: Indices
    ends: Indices | None = None

    @property
    def digest(self) -> int:
        """A number that another order does not have."""
        digest = xxhash.xxh3_64(self.indices.tobytes())
        digest.update(b"" if self.ends is None else self.ends.tobytes())
        return digest.intdigest() >> 1


class Order(ABC):
    """The order of each epoch.

    Attributes:
        is_drawn: Whether the user's own sampler makes it, so that it may differ between ranks.
        in_batches: Whether it comes in batches that are made in advance.
        stateful: Parts of it whose own `state_dict` decides what comes next.
    """

    is_drawn = False
    in_batches = False
    stateful: Sequence[Any] = ()

    @abstractmethod
    def __len__(self) -> int:
        """How many rows an epoch has; where batches are made in advance, how many batches."""

    @abstractmethod
    def of(self, epoch: int) -> OrderOf:
        """Returns the order of an epoch, from 0."""

    @abstractmethod
    def to_evaluate(self) -> OrderOf:
        """Returns the order in which rows are evaluated and predicted."""

    @abstractmethod
    def describe(self) -> str:
        """Returns what it is, for people."""


class OwnOrder(Order):
    """Ours, as that of arrays.

    Args:
        size: Rows of the data set.
        shuffle: False: the rows in their own order.
        seed: Of the run.
    """

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self.size = size
        self.shuffle = shuffle
        self._seed = seed

    def __len__(self) -> int:
        return self.size

    def of(self, epoch: int) -> OrderOf:
        """As `Order`."""
        return OrderOf(global_order(self.size, self.shuffle, self._seed, epoch))

    def to_evaluate(self) -> OrderOf:
        """Returns the rows in their own order."""
        return OrderOf(np.arange(self.size, dtype=np.int64))

    def describe(self) -> str:
        """As `Order`."""
        return "in a new order in each epoch" if self.shuffle else "in their own order"


class DrawnOrder(Order):
    """That of a user's sampler: drawn from generators that are seeded alike on all ranks.

    Args:
        sampler: Gives row numbers; or, where `in_batches`, lists of them.
        seed: Of the run.
        in_batches: Whether it is a batch sampler.
    """

    is_drawn = True

    def __init__(self, sampler: Any, seed: int, *, in_batches: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self.in_batches = in_batches
        self._first: OrderOf | None = None
        parts = (sampler, getattr(sampler, "sampler", None))
        self.stateful = [part for part in parts if callable(getattr(part, "state_dict", None)) and _takes_state(part)]
        try:
            self._size = len(sampler)
        except TypeError as error:
            raise ConfigError(
                f"the DataLoader's {type(sampler).__name__} has no length, and each epoch must have as many steps on "
                "all ranks: give it a __len__."
            ) from error

    def __len__(self) -> int:
        return self._size

    def of(self, epoch: int) -> OrderOf:
        """Returns what the sampler gives; where it has a `set_epoch`, it is told the epoch.

        Raises:
            ConfigError: It gives no row numbers, an empty batch of them, or another count than it says.
        """
        parts = [self._sampler, getattr(self._sampler, "sampler", None)]
        own = generators_of(parts)
        with generators_kept(others=own):
            begin_pass(parts, own, self._seed, epoch)
            given = list(self._sampler)
        name = type(self._sampler).__name__
        if len(given) != len(self._sampler):  # it may have another length in each epoch
            raise ConfigError(
                f"the DataLoader's {name} says that it has {len(self._sampler):,}, and gave {len(given):,}."
            )
        return self._batches(given, name) if self.in_batches else OrderOf(_numbers(given, name))

    def _batches(self, given: list[Any], name: str) -> OrderOf:
        batches = [_numbers(batch, name) for batch in given]
        if not all(map(len, batches)):
            raise ConfigError(f"the DataLoader's {name} gave a batch without rows: each must have some.")
        return OrderOf(np.concatenate(batches), np.cumsum([len(batch) for batch in batches], dtype=np.int64))

    def to_evaluate(self) -> OrderOf:
        """Returns what the sampler gives in the first epoch; it is asked once, and is as before."""
        if self._first is None:
            states = states_of(self.stateful)
            self._first = self.of(0)
            load_states(self.stateful, states)
        return self._first

    def describe(self) -> str:
        """As `Order`."""
        return f"as {type(self._sampler).__name__} draws them, alike on all ranks"


def order_of(loader: DataLoader[Any], size: int, seed: int) -> Order:
    """Returns the order that a DataLoader's user has asked for.

    Samplers of PyTorch's that shuffle a data set, keep its order or deal it to ranks are done by ours.

    Args:
        loader: With rows by number.
        size: Rows of its data set.
        seed: Of the run.

    Raises:
        ConfigError: A sampler without a length.
    """
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return DrawnOrder(batches, seed, in_batches=True)
    sampler: Any = loader.sampler if batches is None else batches.sampler
    kind = type(sampler)
    if kind is TorchSampler and len(sampler.dataset) == size:
        return OwnOrder(size, sampler.shuffle, seed)
    if kind is DistributedSampler and sampler.total_size() == size:
        return OwnOrder(size, sampler.shuffle, seed)
    whole = kind in (RandomSampler, SequentialSampler) and len(sampler.data_source) == len(sampler) == size
    if whole and not (kind is RandomSampler and sampler.replacement):
        return OwnOrder(size, kind is RandomSampler, seed)
    return DrawnOrder(sampler, seed, in_batches=False)


def _takes_state(part: Any) -> bool:
    return callable(getattr(part, "load_state_dict", None))


def states_of(parts: Iterable[Any]) -> list[Any]:
    """Return the states of parts of the data, as copies."""
    return [copy.deepcopy(part.state_dict()) for part in parts]


def load_states(parts: Sequence[Any], states: Sequence[Any]) -> None:
    """Give parts of the data the states that `states_of` returned."""
    for part, state in zip(parts, states, strict=False):
        part.load_state_dict(copy.deepcopy(state))


def _numbers(given: Iterable[Any], name: str) -> Indices:
    try:
        return np.array([operator.index(number) for number in given], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the DataLoader's {name} must give row numbers: {error}") from error
