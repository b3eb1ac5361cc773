"""Which rank sees which sample: one global order per (seed, epoch), divided among the ranks one by one.

The order does not depend on the number of ranks, and rank r of N takes every N-th sample from the r-th on. So batch k
of N ranks, joined, is batch k of one rank with N times the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from cyxtrain.config.settings import names_checked, require, require_boolean, require_integer
from cyxtrain.errors import ConfigError
from cyxtrain.world import runtime
from cyxtrain.world.world import World

Indices: TypeAlias = npt.NDArray[np.int64]  # sample numbers of a data set

_WORD = 2**32


def global_order(dataset_size: int, shuffle: bool, seed: int, epoch: int) -> Indices:
    """Return every index once, in the order of an epoch: the same on every rank and machine.

    The generator is NumPy's `RandomState` (MT19937), whose stream never changes: NEP 19 lets the newer `Generator`, and
    PyTorch lets `randperm`, change between versions, and a run that resumes after an update would see some samples
    twice and others never. Cost: 8 bytes and about 0.1 microseconds per sample.
    """
    order = np.arange(dataset_size, dtype=np.int64)
    if shuffle:
        # A seed and an epoch that are added would make (seed 1, epoch 2) and (seed 2, epoch 1) one order.
        words = np.array([seed % _WORD, seed // _WORD, epoch], dtype=np.uint32)
        np.random.RandomState(words).shuffle(order)
    return order


@names_checked
class DistributedSampler(Sampler[int]):
    """Shards a dataset over the ranks: a new order in every epoch, the same shards on every machine.

    Use it as `DataLoader(sampler=...)`; it takes the arguments of PyTorch's sampler of the same name, by name. Call
    `set_epoch` before each epoch, otherwise every epoch has the same order.

    Args:
        dataset_size: Number of samples, or the dataset itself (anything with `len`).
        shuffle: A new order in every epoch. False: the samples in their own order.
        seed: Determines the order, with the epoch; 0 to 2**64 - 1, the same on every rank.
        drop_last: Leave out the last samples of the order, so that every rank gets the same number.
        rank: This rank. None (and for `world_size`): from the default torch.distributed group, or 0 of 1 without one.
        world_size: Number of ranks.
        pad: Give every rank the same number of indices by repeating the head of the order. False: every index exactly
            once, so the first ranks may get one index more than the last.
        num_replicas: PyTorch's name for `world_size`.

    Raises:
        ConfigError: No samples, a rank outside the world, two different numbers of ranks.
    """

    def __init__(
        self,
        dataset_size: int | Sized,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = False,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        pad: bool = True,
        num_replicas: int | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        require(
            isinstance(shuffle, bool),
            f"{owner}: after the data set comes shuffle, True or False, got {shuffle!r}. PyTorch's sampler has "
            f"num_replicas and rank there: give them by name, as in {owner}(dataset, num_replicas=2, rank=0).",
        )
        for name, flag in (("drop_last", drop_last), ("pad", pad)):
            require_boolean(owner, name, flag)
        require_integer(owner, "seed", seed, 0)
        require(seed < _WORD**2, f"{owner}.seed must be below 2**64, got {seed}.")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0
        if isinstance(dataset_size, Sized):
            dataset_size = len(dataset_size)
        self._total_size = dataset_size
        require_integer(owner, "dataset_size", self._total_size, 0)
        require(self._total_size > 0, f"{owner}: the data set is empty. Give it at least one sample.")
        self.rank, self.world_size = _place(rank, world_size, num_replicas)
        require(
            self.padded_size() > 0,
            f"{owner}: drop_last=True leaves nothing of {self._total_size} samples on {self.world_size} ranks. "
            f"Set drop_last=False, or use at most {self._total_size} ranks.",
        )
        self._cached: tuple[int, Indices] | None = None

    def local_size(self) -> int:
        """Return the number of indices that this rank gets in an epoch."""
        return len(range(self.rank, self.padded_size(), self.world_size))

    def total_size(self) -> int:
        """Return the number of samples in the dataset."""
        return self._total_size

    def padded_size(self) -> int:
        """Return the number of indices of all ranks together, after padding or dropping."""
        if self.drop_last:  # takes precedence over `pad`
            return self._total_size // self.world_size * self.world_size
        if self.pad:
            return -(-self._total_size // self.world_size) * self.world_size
        return self._total_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order.

        Args:
            epoch: 0 to 2**32 - 1, the same on every rank.
        """
        require_integer(type(self).__name__, "epoch", epoch, 0)
        require(epoch < _WORD, f"{type(self).__name__}.epoch must be below 2**32, got {epoch}.")
        self.epoch = epoch

    def global_indices(self) -> Indices:
        """Return this epoch's indices of all ranks together, in order.

        Returns:
            Shape (padded_size,), read-only, cached until the epoch changes. The padding comes last, and repeats the
            head of the order (several times if the dataset is smaller than the padding).
        """
        if self._cached is None or self._cached[0] != self.epoch:
            order = global_order(self._total_size, self.shuffle, self.seed, self.epoch)
            order = np.resize(order, self.padded_size())  # cuts, or repeats from the head
            order.flags.writeable = False
            self._cached = (self.epoch, order)
        return self._cached[1]

    def get_indices(self) -> list[int]:
        """Return this rank's indices of this epoch, in order."""
        indices: list[int] = self.global_indices()[self.rank :: self.world_size].tolist()
        return indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.get_indices())

    def __len__(self) -> int:
        return self.local_size()

    def state_dict(self) -> dict[str, Any]:
        """Return what determines the order, as JSON types; the same on every rank."""
        return {"epoch": self.epoch, "seed": self.seed, "shuffle": self.shuffle, "dataset_size": self._total_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch of a `state_dict` from any number of ranks.

        Args:
            state: What `state_dict` returned.

        Raises:
            ConfigError: The state has a different dataset size, seed or shuffle, hence a different order of samples.
        """
        own = self.state_dict()
        for name in ("dataset_size", "seed", "shuffle"):
            require(
                state.get(name) == own[name],
                f"{type(self).__name__}: the state has {name}={state.get(name)!r} and this sampler has "
                f"{name}={own[name]!r}: the order of samples would differ. Build the sampler with the same data set "
                "size, seed and shuffle.",
            )
        self.set_epoch(state.get("epoch"))  # type: ignore[arg-type]  # checked there


def _place(rank: int | None, world_size: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return rank and world size as given, otherwise of the default group, otherwise (0, 1)."""
    owner = "DistributedSampler"
    if None not in (world_size, num_replicas) and world_size != num_replicas:
        raise ConfigError(f"{owner}: world_size={world_size} and num_replicas={num_replicas} differ. Give one of them.")
    if world_size is None:
        world_size = num_replicas
    has_world = runtime.is_initialized()
    if not has_world and (rank is None) != (world_size is None):
        # A guess here would give several ranks the same samples.
        raise ConfigError(
            f"{owner}: rank={rank} and world_size={world_size}. Give both, or neither after cyxtrain.init()."
        )
    world = runtime.current() if has_world else World()
    if world_size is None:
        world_size = world.size
    if rank is None:
        rank = world.rank
    require_integer(owner, "world_size", world_size, 1)
    require_integer(owner, "rank", rank, 0)
    require(
        rank < world_size,
        f"{owner}: rank {rank} is outside a world of {world_size}: ranks count from 0, "
        f"so the highest is {world_size - 1}.",
    )
    return rank, world_size


@names_checked
class DistributedBatchIterator:
    """This rank's batches of an epoch, as many as on every other rank.

    Batch k over all ranks is `effective_batch_size` samples of the global order, divided among the ranks one by one. At
    the tail, or if the world size does not divide them, a rank may have one sample less than another, or none: an empty
    batch is still a step, because the other ranks take it too (with `pad=False`; a sampler that pads gives all ranks
    equal batches).

    Each `for` starts at the beginning of the sampler's current epoch. In a custom loop, divide the gradients of batch k
    by `global_batch_size(k)`, as in `examples/custom_loop.py`.

    Args:
        sampler: Determines the order, the rank and the world size.
        batch_size: Samples per batch on each rank.
        effective_batch_size: Samples per batch over all ranks; takes precedence over `batch_size`.

    Raises:
        ConfigError: A batch size below 1.
    """

    def __init__(
        self, sampler: DistributedSampler, batch_size: int, *, effective_batch_size: int | None = None
    ) -> None:
        owner = type(self).__name__
        require_integer(owner, "batch_size", batch_size, 1)
        if effective_batch_size is None:
            effective_batch_size = batch_size * sampler.world_size
        require_integer(owner, "effective_batch_size", effective_batch_size, 1)
        self.sampler = sampler
        self.batch_size = batch_size
        self.effective_batch_size = effective_batch_size
        self._next_number = 0
        self._order: Indices | None = None

    def num_batches(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        return -(-self.sampler.padded_size() // self.effective_batch_size)

    def global_batch_size(self, number: int) -> int:
        """Return the number of samples of batch `number` over all ranks: the divisor of its gradients.

        Raises:
            ConfigError: There is no batch of that number.
        """
        if not 0 <= number < self.num_batches():
            raise ConfigError(f"There is no batch {number}: an epoch has the batches 0 to {self.num_batches() - 1}.")
        return min(self.effective_batch_size, self.sampler.padded_size() - number * self.effective_batch_size)

    def has_next(self) -> bool:
        """Return whether this epoch has another batch."""
        return self._next_number < self.num_batches()

    def next(self) -> Indices:
        """Return this rank's indices of the next batch.

        Returns:
            Row numbers, int64, shape (n,), n at most ceil(effective_batch_size / world_size); a copy.

        Raises:
            StopIteration: After the last batch of the epoch.
        """
        if not self.has_next():
            raise StopIteration
        if self._order is None:
            # Taken once per epoch: a set_epoch() in the middle must not mix two orders.
            self._order = self.sampler.global_indices()
        first = self._next_number * self.effective_batch_size
        self._next_number += 1
        global_batch = self._order[first : first + self.effective_batch_size]
        # A copy: PyTorch warns of read-only arrays as indices.
        own: Indices = global_batch[self.sampler.rank :: self.sampler.world_size].copy()
        return own

    def reset(self, epoch: int | None = None, batch: int = 0) -> None:
        """Set the batch, and if given the epoch, from which `next` continues.

        A `for` loop still begins at the first batch.

        Args:
            epoch: Of the sampler; None: unchanged.
            batch: Number of the batch in the epoch.
        """
        if epoch is not None:
            self.sampler.set_epoch(epoch)
        self._next_number = batch
        self._order = None

    def __iter__(self) -> Iterator[Indices]:
        self.reset()
        return self

    def __next__(self) -> Indices:
        return self.next()

    def __len__(self) -> int:
        return self.num_batches()
