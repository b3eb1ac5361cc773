"""Batches of indices from a sampler: batch k of every rank belongs to step k."""

from __future__ import annotations

from collections.abc import Iterator

from cyxtrain.config.settings import names_checked, require_integer
from cyxtrain.data.sampler import DistributedSampler, Indices
from cyxtrain.errors import ConfigError


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

        A `for` begins at the first batch all the same.

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
