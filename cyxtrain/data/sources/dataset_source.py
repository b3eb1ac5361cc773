"""Rows of a Dataset, loaded by number, with the workers, collate_fn and pinning of the user's DataLoader.

One order of each epoch is divided among the ranks, from any step on. What a dataset draws for a row, such as its
augmentation, depends on seed, epoch and the row's place in the epoch alone: it is the same on any number of ranks and
workers, and when a fit resumes in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import xxhash
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, default_collate
from typing_extensions import override

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, BatchShare, on_device
from cyxtrain.data.batches.collate import as_batch, left_out, target_name
from cyxtrain.data.batches.prefetch import Placement, make_copier
from cyxtrain.data.batches.rows import Rows, sampled_hash
from cyxtrain.data.batches.structure import OpaqueBatch, num_rows
from cyxtrain.data.batches.tables import check_format
from cyxtrain.data.feed import RowFeed
from cyxtrain.data.order import EpochOrder, Order, SeededOrder, lengths_of, order_of
from cyxtrain.data.rng import set_epoch_of
from cyxtrain.data.sampler import Indices
from cyxtrain.data.sources.fetching import RowLoader, RowRequest
from cyxtrain.data.sources.source import Source
from cyxtrain.errors import ConfigError, counted
from cyxtrain.world.world import World

_TRIED_ROWS = 2
_EVALUATION = -1  # the "epoch" whose random numbers an evaluation has: always the same


class DatasetSource(Source):
    """Rows of a Dataset, loaded with the settings and in the order of a DataLoader, if there is one."""

    def __init__(self, dataset: Any, loader: DataLoader[Any] | None, config: DistributedTrainingConfig) -> None:
        if loader is None or loader.collate_fn is default_collate:
            check_format(dataset)
        self._dataset = dataset
        self._loader = loader
        self._seed = config.seed
        size = _size(dataset)
        self._order: Order = SeededOrder(size, config.shuffle, config.seed)
        self.drop_last = False
        if loader is not None:
            self._order = order_of(loader, size, config.seed)
            batches = loader.batch_sampler
            if type(batches) is BatchSampler:
                self.batch_size = batches.batch_size
                self.drop_last = batches.drop_last
        if len(self._order) == 0:
            raise ConfigError(f"the {type(dataset).__name__} has no samples: nothing to train on or to evaluate.")
        self._to_train = RowLoader(dataset, loader, config.seed)
        self._to_evaluate = RowLoader(dataset, loader, config.seed)  # with its own workers
        self._try(config.batch_size)

    def _try(self, batch_size: int) -> None:
        """Load the first samples twice: a dataset may draw random numbers that cannot be seeded."""
        order = self._order.to_evaluate()
        rows = min(_TRIED_ROWS, self.batch_size or batch_size, len(order.indices))
        if order.ends is not None:
            rows = int(order.ends[0])
            self.batch_size = rows
        places = range(rows)
        once, again = self._local_loader().load(_requests(order, [places, places], self._seed, _EVALUATION))
        try:
            found = as_batch(once)
            if isinstance(found.inputs, (tuple, list)) and len(found.inputs) == rows:  # such as images in a list
                _with_length(found, rows)
            self.left_out = left_out(once)
            self.target_name = target_name(once)
        except ConfigError as error:
            self.no_rows = error
        self.example = self._as_rows(once, rows)
        pairs = zip(self.example.tensors(), self._as_rows(again, rows).tensors(), strict=True)
        self._is_reproducible = all(sampled_hash(one) == sampled_hash(other) for one, other in pairs)

    def _local_loader(self) -> RowLoader:
        """Return a loader for few samples; it starts workers only if a `worker_init_fn` prepares them."""
        uses_workers = self._loader is not None and self._loader.worker_init_fn is not None
        return RowLoader(self._dataset, self._loader, self._seed, uses_workers=uses_workers)

    def begin_pass(self, number: int) -> bool:
        """As `RowSource`: calls the dataset's `set_epoch`."""
        has_epochs = set_epoch_of(self._dataset, number)
        if has_epochs and isinstance(self._order, SeededOrder):
            self._order.size = _size(self._dataset)
        return has_epochs

    def fetch(self, order: EpochOrder, places: range, epoch: int) -> Rows:
        """As `RowSource`."""
        (loaded,) = self._local_loader().load(_requests(order, [places], self._seed, epoch))
        return self._rows(loaded, len(places)).mapped(Tensor.clone)

    def fetcher(
        self, order: EpochOrder, pieces: Iterable[range], epoch: int, *, pinned: bool
    ) -> Callable[[Indices], Rows]:
        """As `RowSource`."""
        loaded = self._to_train.load(_requests(order, pieces, self._seed, epoch))
        return lambda indices: self._rows(next(loaded), len(indices))

    @override
    def describe(self) -> str:
        rows = len(self._order)
        if self._order.in_batches:
            rows = len(self._order.to_evaluate().indices)
        kind = "a list" if isinstance(self._dataset, list) else type(self._dataset).__name__
        return f"{counted(rows, 'sample')} of {kind}"

    @override
    def explain(self, world: World) -> str:
        found = f", {self._order.describe()}"
        if self._loader is not None and self._loader.num_workers:
            found += f", by {counted(self._loader.num_workers, 'worker')} per rank"
        if not self._is_reproducible:
            found += ", with random numbers that cannot be seeded: runs differ"
        return found

    @override
    def own_settings(self) -> dict[str, Any]:
        shuffle = None
        if self._loader is not None and isinstance(self._order, SeededOrder):
            shuffle = self._order.shuffle
        return {"batch_size": self.batch_size, "shuffle": shuffle, "drop_last": self.drop_last}

    def _rows(self, loaded: Any, requested: int) -> Rows:
        return self.checked(self._as_rows(loaded, requested))

    def _as_rows(self, loaded: Any, requested: int) -> Rows:
        if self.no_rows is not None:
            return Rows(OpaqueBatch(loaded, requested), None, None)
        return _with_length(as_batch(loaded), requested)

    @override
    def first(self, rows: int) -> Rows:
        order = self._order.to_evaluate()
        if self.no_rows is None or order.ends is not None:
            return super().first(rows)
        # Opaque batches cannot be sliced: collate_fn makes one of fewer samples.
        return self.fetch(order, range(min(rows, num_rows(self.example.inputs))), _EVALUATION)

    @override
    def facts(self, name: str) -> dict[str, Any]:
        """Return the types of dataset and sampler, and types and hashes of the first samples."""
        facts: dict[str, Any] = {
            f"the {name} data set": f"{counted(len(self._order), 'row')} of {type(self._dataset).__name__}",
            f"the order of the {name} data": self._order.describe(),
            f"the order of the {name} data: hash": self._order.to_evaluate().digest if self._order.is_drawn else 0,
        }
        if isinstance(self._order, SeededOrder) and self._order.lengths is not None:
            facts[f"the lengths of the {name} data: hash"] = xxhash.xxh3_64_hexdigest(self._order.lengths.tobytes())
        for what, tensor in self.example.named():
            facts[f"{name} {what}: dtype"] = str(tensor.dtype).removeprefix("torch.")
            facts[f"{name} {what}: shape of a row"] = list(tensor.shape[1:])
            content = sampled_hash(tensor) if self._is_reproducible else ""
            facts[f"{name} {what}: hash of the first rows"] = content
        return facts

    @override
    def group_by_length(self, asked: Any) -> None:
        if not isinstance(self._order, SeededOrder):
            raise ConfigError(
                f"group_by_length orders the samples, and they come {self._order.describe()}: leave the sampler out."
            )
        self._order.lengths = lengths_of(asked, len(self._order), self._dataset)

    @override
    def feed(self, config: DistributedTrainingConfig, world: World) -> RowFeed:
        return RowFeed(self, self._order, config, world)

    @override
    def whole_batches(self, batch_size: int, placement: Placement, share: BatchShare) -> Iterator[Batch]:
        order, batches = self._batches(batch_size)
        numbers = share.of(len(batches))
        own = [batches[number] for number in numbers]
        loaded = self._to_evaluate.load(_requests(order, own, self._seed, _EVALUATION))
        rows = (self._rows(found, len(places)) for places, found in zip(own, loaded, strict=True))
        return on_device(zip(numbers, rows, strict=True), make_copier(placement))

    @override
    def num_batches(self, batch_size: int) -> int:
        return len(self._batches(batch_size)[1])

    def _batches(self, batch_size: int) -> tuple[EpochOrder, list[range]]:
        """Return the order of an evaluation, and the places of each batch in it."""
        order = self._order.to_evaluate()
        if order.ends is None:
            rows = len(order.indices)
            found = [range(first, min(first + batch_size, rows)) for first in range(0, rows, batch_size)]
        else:
            found = [range(first, end) for first, end in zip([0, *order.ends[:-1]], order.ends, strict=True)]
        return order, found[: self._limit]


def _with_length(rows: Rows, requested: int) -> Rows:
    """Return rows; raise ConfigError unless as many as requested: gradients are divided by that number."""
    if num_rows(rows.inputs) != requested:
        raise ConfigError(
            f"the DataLoader's collate_fn turned {counted(requested, 'sample')} into {num_rows(rows.inputs)}, and each "
            "rank must know how many samples the others have. To leave some out, use a sampler that does; for batches "
            "of any size, use an IterableDataset or a generator."
        )
    return rows


def _size(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"{type(dataset).__name__} has no length, and samples are divided among the ranks by number: give it a "
            "__len__, or make it an IterableDataset."
        ) from error


def _requests(order: EpochOrder, pieces: Iterable[range], seed: int, epoch: int) -> Iterator[RowRequest]:
    # Not a method: it must not hold the source. The loader that reads it would keep itself, and its workers, alive.
    for places in pieces:
        yield RowRequest(seed, epoch, places, order.rows(places).tolist())
