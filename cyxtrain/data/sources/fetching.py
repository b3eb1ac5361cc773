"""Lists of rows, fetched one after the other by the settings of a user's DataLoader."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from cyxtrain.data.rng import GeneratorStates, generators_kept
from cyxtrain.data.row_rng import seed_for_row, tell_epoch

KeyedRow = tuple[int, int]
"""A row's number in the data set, and what generators are seeded with for it."""


class KeyedRows(list[KeyedRow]):
    """Rows to be fetched together.

    Attributes:
        epoch: In which they are; below 0: they are to be evaluated.
    """

    epoch = -1


_COLLATES = 0x5DEECE66D
"""Makes another key of a row's."""


class Fetcher:
    """A DataLoader that fetches what it is told to.

    Args:
        dataset: With rows by number.
        loader: Whose settings it has, but for what is fetched; None: PyTorch's own.
        seed: Of the run.
        tries: Whether it is for a first look: without workers.
    """

    def __init__(
        self, dataset: Dataset[Any], loader: DataLoader[Any] | None, seed: int, *, tries: bool = False
    ) -> None:
        self._told = _Told()
        settings: dict[str, Any] = {"collate_fn": _Collate(default_collate if loader is None else loader.collate_fn)}
        if loader is not None:
            names = ["pin_memory", "worker_init_fn"]
            if loader.num_workers and not tries:
                names += ["num_workers", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
            settings |= {name: getattr(loader, name) for name in names}
        # A generator of its own: PyTorch draws the seeds of workers from the one that training draws from.
        own = torch.Generator().manual_seed(seed % 2**63)
        rows: Dataset[Any] = _Rows(dataset)
        self._loader: DataLoader[Any] = DataLoader(rows, batch_sampler=self._told, generator=own, **settings)

    def fetch(self, lists: Iterable[KeyedRows]) -> Iterator[Any]:
        """Gives what is made of each list of rows."""
        self._told.lists = lists
        return iter(self._loader)


class _Told:
    """A batch sampler that gives what somebody else says."""

    def __init__(self) -> None:
        self.lists: Iterable[KeyedRows] = ()

    def __iter__(self) -> Iterator[KeyedRows]:
        return iter(self.lists)


class _Items(list[Any]):
    """Rows that belong together.

    Args:
        items: Them.
        rows: Which they are.
    """

    def __init__(self, items: Iterable[Any], rows: Sequence[KeyedRow]) -> None:
        super().__init__(items)
        self.key = rows[0][1]
        self.indices = [index for index, _ in rows]


class _Collate:
    """Puts rows together; what it draws depends on the first row's key alone.

    Args:
        collate: The user's way.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: _Items) -> Any:
        with _naming("putting together rows", items.indices):
            if self._collate is default_collate:  # it draws nothing
                return default_collate(list(items))
            with generators_kept():
                seed_for_row(items.key ^ _COLLATES)
                return self._collate(list(items))


class _Rows(Dataset[Any]):
    """A data set that draws the same for a row wherever, and beside whichever others, it is fetched."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._draws = False
        self._epoch = -1

    def __getitems__(self, rows: KeyedRows) -> _Items:
        """Returns rows; a data set that is seen to draw is asked again, row by row, with generators of its own."""
        if rows.epoch not in (-1, self._epoch) and get_worker_info() is not None:  # a worker that stays has its own
            self._epoch = rows.epoch
            tell_epoch(self._dataset, rows.epoch)
        if not self._draws:
            before = GeneratorStates()
            items = self._fetch([index for index, _ in rows])
            if before.is_unchanged():
                return _Items(items, rows)
            before.bring_back()
            self._draws = True
        with generators_kept():
            return _Items([self._draw(index, key) for index, key in rows], rows)

    def _fetch(self, indices: list[int]) -> list[Any]:
        several = getattr(self._dataset, "__getitems__", None)  # as PyTorch looks for it
        if callable(several):
            with _naming("rows", indices):
                items: list[Any] = several(indices)
            return items
        return [self._row(index) for index in indices]

    def _draw(self, index: int, key: int) -> Any:
        seed_for_row(key)
        return self._row(index)

    def _row(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            _name(error, "row", index)
            raise


@contextlib.contextmanager
def _naming(what: str, rows: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _name(error, what, rows)
        raise


def _name(error: Exception, what: str, rows: Any) -> None:
    """Says of an error which rows it came with; Python 3.10 has no notes."""
    if sys.version_info >= (3, 11):
        error.add_note(f"That was {what} {rows} of the data set.")
