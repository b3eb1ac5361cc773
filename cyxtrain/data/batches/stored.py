"""Rows of an HDF5 dataset that stay in the file: a tensor that reads rows when they are used.

h5py is the user's: it is not imported unless a dataset of it is given, or sent to another process. Each process opens
the file itself, because HDF5's handles are valid in one process alone.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from cyxtrain.data.batches.structure import map_tree
from cyxtrain.data.sampler import Indices
from cyxtrain.errors import ConfigError

# h5py selects rows one by one, and each costs more than the one before it.
_ROWS_AT_ONCE = 256
# To read rows that are not needed, too, is faster up to this many for each that is.
_SPREAD = 4
# Rows that checks of y look at, if a row has several numbers.
_FEW_ROWS = 8
# Functions and attributes that PyTorch answers without a tensor's values.
_DESCRIBING = frozenset(
    ("__len__", "device", "dim", "dtype", "is_complex", "is_cpu", "is_floating_point", "layout", "numel", "shape")
)


class StoredTensor(Tensor):
    """Rows of an HDF5 dataset as a tensor on the CPU, in native byte order.

    A slice of rows is such a tensor, too, and reads nothing. `sorted_rows` reads some of the rows, and any other
    operation of PyTorch reads all rows of this tensor.
    """

    _dataset: Any
    _rows: range | Indices  # numbers of rows of the dataset; a range has a step of 1

    @classmethod
    def of(cls, dataset: Any, rows: range | Indices) -> StoredTensor:
        """Return rows of an h5py dataset, by their numbers in it."""
        value = torch.from_numpy(np.zeros(1, _native(dataset.dtype)))
        row_shape = dataset.shape[1:]
        # The shape of all rows, with the memory of a single number.
        shaped = value.reshape([1] * len(dataset.shape)).expand(len(rows), *row_shape)
        made = shaped.as_subclass(cls)
        made._dataset = dataset
        made._rows = rows
        return made

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Describe the rows without reading them; read all of them for any other function."""
        if _name_of(func) in _DESCRIBING:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return func(*map_tree(loaded, args), **map_tree(loaded, kwargs or {}))

    @override
    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice) and index.step in (None, 1):
            return self.of(self._dataset, self._rows[index])
        return self.read()[index]

    def chosen(self, indices: Indices) -> StoredTensor:
        """Return some rows of this tensor, in that order; nothing is read."""
        return self.of(self._dataset, self._numbers(indices))

    def read(self) -> Tensor:
        """Return all rows of this tensor, in memory."""
        rows = self._rows
        if isinstance(rows, range):
            return torch.from_numpy(_read(self._dataset, np.arange(rows.start, rows.stop)))
        found, places = self.sorted_rows(np.arange(len(rows)))
        return found[places]

    def sorted_rows(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return rows by number, each once and in the order of the file; and the place of each index among them.

        Cost: each chunk of the dataset that has one of 256 neighboring rows is read, and decompressed, once.
        """
        numbers, places = np.unique(self._numbers(indices), return_inverse=True)
        return torch.from_numpy(_read(self._dataset, numbers)), torch.from_numpy(places.reshape(-1))

    def _numbers(self, indices: Indices) -> Indices:
        if isinstance(self._rows, range):
            return indices + self._rows.start
        return self._rows[indices]


def _name_of(function: Any) -> str:
    """Return the name of a function or a method; of the getter of an attribute, the attribute's."""
    name: str = function.__name__
    if name == "__get__":
        name = function.__self__.__name__
    return name


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which rows are read: PyTorch has neither foreign byte orders nor extended precision."""
    if dtype.kind == "f" and dtype.itemsize > 8:
        return np.dtype(np.float64)
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


def _read(dataset: Any, numbers: Indices) -> np.ndarray[Any, Any]:
    """Return rows of a dataset by their numbers, which are sorted and different."""
    if not dataset:
        raise ConfigError("the HDF5 file of the data was closed while it was read: close it after the fit.")
    found = np.empty((len(numbers), *dataset.shape[1:]), _native(dataset.dtype))
    for place in range(0, len(numbers), _ROWS_AT_ONCE):
        piece = numbers[place : place + _ROWS_AT_ONCE]
        first = int(piece[0])
        end = int(piece[-1]) + 1
        if end - first == len(piece):
            rows = dataset[first:end]
        elif end - first <= _SPREAD * len(piece):
            rows = dataset[first:end][piece - first]
        else:
            rows = dataset[piece]
        found[place : place + len(piece)] = rows
    return found


def stored_tensor(values: Any, name: str) -> StoredTensor | None:
    """Return an h5py dataset as a tensor that stays in the file; None for other data, and for one number per row.

    Those need no more memory than the order of an epoch, so they are read. Raises ConfigError, with the `name` of the
    data, if they are not numbers.
    """
    if not is_stored(values) or math.prod(values.shape[1:]) <= 1:
        return None
    if values.dtype.kind not in "fiubc":
        raise ConfigError(f"{name} is an HDF5 dataset of {values.dtype} values; it must hold numbers.")
    return StoredTensor.of(values, range(len(values)))


def is_stored(values: Any) -> bool:
    """Return whether values are an open h5py dataset with a first dimension."""
    h5py = sys.modules.get("h5py")
    return h5py is not None and isinstance(values, h5py.Dataset) and bool(values.shape)


def refuse_closed(values: Any, name: str) -> None:
    """Raise ConfigError for an HDF5 dataset or group whose file is closed."""
    if _is_of_file(values) and not values:
        raise ConfigError(
            f"{name} is in an HDF5 file that is closed: call fit, evaluate or predict before the file is closed, such "
            "as within its with statement."
        )


def loaded(tensor: Tensor) -> Tensor:
    """Return a tensor in memory: rows of a file are read."""
    if isinstance(tensor, StoredTensor):
        return tensor.read()
    return tensor


def holds_stored(tree: Any) -> bool:
    """Return whether a tree has tensors whose rows are in a file."""
    found: list[bool] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(isinstance(tensor, StoredTensor))
        return tensor

    map_tree(note, tree)
    return any(found)


def few_of_stored(tree: Any) -> Any:
    """Return a tree with the first rows alone of each tensor whose rows are in a file."""

    def few(tensor: Tensor) -> Tensor:
        if isinstance(tensor, StoredTensor):
            return loaded(tensor[:_FEW_ROWS])
        return tensor

    return map_tree(few, tree)


def reopening(obj: Any) -> tuple[Callable[[str, str], Any], tuple[str, str]] | None:
    """Return how another process opens an HDF5 dataset, group or file itself, for reading; None for other objects.

    Raises ConfigError if it cannot: the file is closed, is not on disk, or is open for writing.
    """
    if not _is_of_file(obj):
        return None
    refuse_closed(obj, "an h5py object")
    path = os.path.abspath(obj.file.filename)
    if not os.path.isfile(path) or obj.name is None:
        raise ConfigError(f"{obj!r} has no file on disk, and other processes open it by its path.")
    if obj.file.mode != "r":
        raise ConfigError(f"{path} is open for writing, and other processes read it: open it with h5py.File(path, 'r')")
    return _reopened, (path, obj.name)


def _is_of_file(obj: Any) -> bool:
    h5py = sys.modules.get("h5py")
    return h5py is not None and isinstance(obj, (h5py.Dataset, h5py.Group))


def _reopened(path: str, name: str) -> Any:
    import h5py

    return h5py.File(path, "r")[name]
