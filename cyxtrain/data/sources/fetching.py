"""Batches of a dataset, loaded with the settings of a user's DataLoader; each sample once in several workers."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from cyxtrain.data.rng import RowGenerators, row_seeds, set_epoch_of, use_own_numpy
from cyxtrain.environment import loader_workers

_COLLATE = 0x5DEECE66D  # turns the seed of a batch's first row into its collate_fn's seed


class RowRequest(NamedTuple):
    """Rows to be loaded as one batch: their numbers, and their places in an epoch (below 0: an evaluation)."""

    seed: int
    epoch: int
    places: range
    indices: list[int]


class RowLoader:
    """A DataLoader that loads requested samples with the settings of the user's, if there is one."""

    def __init__(
        self, dataset: Dataset[Any], loader: DataLoader[Any] | None, seed: int, *, uses_workers: bool = True
    ) -> None:
        self._requests = _Requests()
        settings: dict[str, Any] = {"batch_sampler": self._requests}
        if loader is not None:
            names = ["pin_memory"]
            if loader.num_workers and uses_workers:
                names += ["num_workers", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
            settings |= {name: getattr(loader, name) for name in names}
            settings["worker_init_fn"] = _WorkerInit(loader.worker_init_fn)
        # Its own generator: PyTorch draws the seeds of workers from the one that training draws from.
        own = torch.Generator().manual_seed(seed % 2**63)
        collate = default_collate if loader is None else loader.collate_fn
        self._batches = _SeededBatches(dataset, collate)
        self._loader: DataLoader[Any] = DataLoader(self._batches, collate_fn=_unchanged, generator=own, **settings)

    def load(self, requests: Iterable[RowRequest]) -> Iterator[Any]:
        """Return an iterator over the batch of each request."""
        self._requests.given, own = itertools.tee(requests)
        return self._loaded(iter(self._loader), own)

    def _loaded(self, batches: Iterator[Any], requests: Iterator[RowRequest]) -> Iterator[Any]:
        """Yield batches of the loader; if its workers die in a stop, load the rest in this process."""
        try:
            for batch in batches:
                next(requests)
                yield batch
        except loader_workers.DEATHS:
            if not loader_workers.may_end():
                raise
            yield from map(self._batches.__getitems__, requests)


class _Requests:
    """A batch sampler that yields requests instead of sample numbers."""

    given: Iterable[RowRequest] = ()

    def __iter__(self) -> Iterator[RowRequest]:
        return iter(self.given)


class _WorkerInit:
    """A `worker_init_fn` that calls the user's; `get_worker_info().dataset` is the user's, as PyTorch documents it."""

    def __init__(self, given: Callable[[int], object] | None) -> None:
        self._given = given

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # PyTorch loads from its own reference
        use_own_numpy()
        if self._given is not None:
            self._given(worker)


def _unchanged(batch: Any) -> Any:
    return batch


class _SeededBatches(Dataset[Any]):
    """Collated batches of a dataset, whose random numbers depend only on the seeds of their rows."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._generators = RowGenerators()
        self._epoch = -1

    def __getitems__(self, request: RowRequest) -> Any:
        if request.epoch not in (-1, self._epoch) and get_worker_info() is not None:  # a persistent worker has a copy
            self._epoch = request.epoch
            set_epoch_of(self.dataset, request.epoch)
        with self._generators.apart():
            items = self._load(request)
            while self._generators.find_draws():
                items = self._load(request)
            with _naming("collating samples", request.indices):
                if self._collate is not default_collate:  # which draws nothing
                    (seed,) = row_seeds(request.seed, request.epoch, request.places[:1])
                    self._generators.seed_all(seed ^ _COLLATE)
                return self._collate(items)

    def _load(self, request: RowRequest) -> list[Any]:
        """Return the rows, seeded if rows have drawn random numbers."""
        seeds: list[int] = []
        if self._generators.are_drawn_from:
            seeds = row_seeds(request.seed, request.epoch, request.places)
        several = getattr(self.dataset, "__getitems__", None)  # as PyTorch looks for it
        if callable(several) and not seeds:
            with _naming("loading samples", request.indices):
                return list(several([*request.indices]))
        items = []
        try:
            for number, index in enumerate(request.indices):
                if seeds:
                    self._generators.seed_row(seeds[number])
                items.append(self.dataset[index])
        except Exception as error:
            _add_note(error, "loading sample", index)
            raise
        return items


@contextlib.contextmanager
def _naming(what: str, rows: Any) -> Iterator[None]:
    """Add the samples that it concerns to an error."""
    try:
        yield
    except Exception as error:
        _add_note(error, what, rows)
        raise


def _add_note(error: Exception, what: str, rows: Any) -> None:
    if sys.version_info >= (3, 11):  # Python 3.10 has no notes
        error.add_note(f"This happened while {what} {rows} of the dataset.")


def needs_split(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's workers might all yield the same samples.

    With a `worker_init_fn`, that function gives each worker its part: PyTorch's other way.
    """
    own_way = type(loader).__iter__ is not DataLoader.__iter__
    iterable = isinstance(loader.dataset, IterableDataset)
    return iterable and loader.num_workers > 1 and loader.worker_init_fn is None and not own_way


class SplitOverWorkers(IterableDataset[Any]):
    """The rows of an iterable dataset, each in one worker alone.

    PyTorch copies the dataset to each worker, and expects it to yield that worker's part. A dataset that reads
    `get_worker_info()` does so; for any other, each worker yields every n-th row.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            yield from self.dataset
            return
        worker = info.id
        workers = info.num_workers
        was_read = _watched(info)
        object.__setattr__(info, "dataset", self.dataset)  # the user's, as PyTorch documents it
        for number, row in enumerate(self.dataset):
            if was_read or number % workers == worker:
                yield row


def _watched(info: Any) -> list[str]:
    """Return a list that becomes non-empty when the number of this worker, or of workers, is read."""
    read: list[str] = []
    kind: type = type(info)

    class WatchedInfo(kind):  # type: ignore[misc]
        """PyTorch's, recording what is read."""

        __slots__ = ()  # so that an object of PyTorch's may become one

        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers"):
                read.append(name)
            return super().__getattribute__(name)

    object.__setattr__(info, "__class__", WatchedInfo)
    return read
