"""An IterableDataset in several workers of a DataLoader: each row once, and not once per worker.

PyTorch gives each worker a copy of the data set, and leaves it to the data set to give each its part. One that asks
`torch.utils.data.get_worker_info()` does so; of one that does not, each worker here gives every n-th row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def needs_split(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's workers might all give the same rows.

    With a `worker_init_fn`, that function gives each worker its part: PyTorch's other way.
    """
    own_way = type(loader).__iter__ is not DataLoader.__iter__
    iterable = isinstance(loader.dataset, IterableDataset)
    return iterable and loader.num_workers > 1 and loader.worker_init_fn is None and not own_way


class SplitOverWorkers(IterableDataset[Any]):
    """The rows of an iterable data set, each in one worker alone.

    Args:
        dataset: Without a length, or with that of all rows together.
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
        worker, workers = info.id, info.num_workers
        asked = _noticing(info)
        object.__setattr__(info, "dataset", self.dataset)  # the user's, as PyTorch documents it
        for number, row in enumerate(self.dataset):
            if asked or number % workers == worker:
                yield row


def _noticing(info: Any) -> list[str]:
    """Return a list that becomes non-empty when somebody asks which worker this is."""
    asked: list[str] = []
    kind: type = type(info)

    class ChangeDetector(kind):  # type: ignore[misc]
        """As PyTorch's, and notes what is read."""

        __slots__ = ()  # so that an object of PyTorch's may become one

        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers"):
                asked.append(name)
            return super().__getattribute__(name)

    object.__setattr__(info, "__class__", ChangeDetector)
    return asked
