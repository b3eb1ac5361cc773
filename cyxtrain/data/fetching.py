"""Lists of rows, fetched one after the other by the settings of a user's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cyxtrain.data.randomness import GeneratorStates, generators_kept, seed_for_row

Place = tuple[int, int]
"""A row's number in the data set, and what generators are seeded with for it."""

_CPU = torch.device("cpu")


class Fetcher:
    """A DataLoader that fetches what it is told to.

    Args:
        dataset: With rows by number.
        loader: Whose settings it has, but for what is fetched; None: PyTorch's own.
        tries: Whether it is for a first look: without workers.
    """

    def __init__(self, dataset: Dataset[Any], loader: DataLoader[Any] | None, *, tries: bool = False) -> None:
        self._told = _Told()
        settings: dict[str, Any] = {}
        if loader is not None:
            names = ["collate_fn", "pin_memory", "worker_init_fn"]
            if loader.num_workers and not tries:
                names += ["num_workers", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
            settings = {name: getattr(loader, name) for name in names}
        # A generator of its own: PyTorch draws the seeds of workers from the one that training draws from.
        own = torch.Generator().manual_seed(0)
        rows: Dataset[Any] = _Rows(dataset)
        self._loader: DataLoader[Any] = DataLoader(rows, batch_sampler=self._told, generator=own, **settings)

    def fetch(self, lists: Iterable[list[Place]]) -> Iterator[Any]:
        """Gives what is made of each list of rows."""
        self._told.lists = lists
        return iter(self._loader)


class _Told:
    """A batch sampler that gives what somebody else says."""

    def __init__(self) -> None:
        self.lists: Iterable[list[Place]] = ()

    def __iter__(self) -> Iterator[list[Place]]:
        return iter(self.lists)


class _Rows(Dataset[Any]):
    """A data set that draws the same for a row wherever, and beside whichever others, it is fetched."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._draws = False

    def __getitems__(self, places: list[Place]) -> list[Any]:
        """Returns rows; a data set that is seen to draw is asked again, row by row, with generators of its own."""
        if not self._draws:
            before = GeneratorStates()
            items = self._fetch([index for index, _ in places])
            if before == GeneratorStates():
                return items
            before.bring_back()
            self._draws = True
        with generators_kept(_CPU):
            return [self._draw(index, key) for index, key in places]

    def _fetch(self, indices: list[int]) -> list[Any]:
        several = getattr(self._dataset, "__getitems__", None)  # as PyTorch looks for it
        if callable(several):
            items: list[Any] = several(indices)
            return items
        return [self._dataset[index] for index in indices]

    def _draw(self, index: int, key: int) -> Any:
        seed_for_row(key)
        return self._dataset[index]
