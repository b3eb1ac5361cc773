"""An IterableDataset in several workers of a DataLoader: each row once, and not once per worker.

PyTorch copies the dataset to each worker, and expects it to yield that worker's part. A dataset that reads
`torch.utils.data.get_worker_info()` does so; for any other, each worker here yields every n-th row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def needs_split(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's workers might all yield the same rows.

    With a `worker_init_fn`, that function gives each worker its part: PyTorch's other way.
    """
    own_way = type(loader).__iter__ is not DataLoader.__iter__
    iterable = isinstance(loader.dataset, IterableDataset)
    return iterable and loader.num_workers > 1 and loader.worker_init_fn is None and not own_way


class SplitOverWorkers(IterableDataset[Any]):
    """The rows of an iterable dataset, each in one worker alone."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            yield from self.dataset
            return
        worker, workers = info.id, info.num_workers
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
