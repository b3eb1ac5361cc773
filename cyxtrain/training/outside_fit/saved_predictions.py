"""Predictions in a folder, as `predict(output_dir=...)` writes them, read row by row.

index.json           what was predicted and, after the last shard, the shapes of all parts of all shards
shard-000003.json    dtypes and shapes of the fourth shard; it is written last, so that the shard is complete
shard-000003-0.npy   the first part of its output, shape (rows, ...); flat if rows differ in shape
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cyxtrain.config.settings import names_checked
from cyxtrain.data.batches.specs import example_of
from cyxtrain.data.batches.structure import leaves, with_parts
from cyxtrain.environment.regular_files import read_text
from cyxtrain.errors import ConfigError, counted
from cyxtrain.metrics.whole_set import as_numpy

Shapes: TypeAlias = list[list[int]]
INDEX, FORMAT = "index.json", "cyxtrain predictions 1"
_HEADER_BYTES = 128


@names_checked
def open_predictions(folder: str | os.PathLike[str]) -> Predictions:
    """Open the predictions that `DistributedTrainer.predict(X, output_dir=folder)` has written.

    Args:
        folder: As given there.

    Returns:
        `predictions[5]`, `predictions[10:20]`, `predictions[[3, 1]]`, `len(predictions)` and iteration read from the
        files the rows that you ask for; the others are not loaded. Rows have the structure of the model's output, with
        dictionaries for dataclasses, and slices the form that `predict` returns.

    Raises:
        ConfigError: The folder has no predictions, or they are not complete.
    """
    found = Predictions(folder)
    if not found.is_complete:
        raise ConfigError(f"{folder}: predict has not finished. Call it again with output_dir={str(folder)!r}.")
    return found


class Predictions:
    """Rows of a model's output, in a folder; see `open_predictions`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        index = read_index(self.folder)
        self.is_complete: bool = index["complete"]
        self._example, self._is_numpy, self._pad_value = example_of(index["output"]), index["numpy"], index["pad_value"]
        self._parts = [
            _Part(self.folder, number, part["dtype"], part["rows_second"], [shard[number] for shard in index["shards"]])
            for number, part in enumerate(index["parts"])
        ]

    def __repr__(self) -> str:
        return f"Predictions({counted(len(self), 'row')} in {self.folder})"

    def __len__(self) -> int:
        return self._parts[0].ends[-1] if self._parts else 0

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))
        if isinstance(index, slice):
            return self._output(rows[index])
        with contextlib.suppress(TypeError):
            return self._output([rows[operator.index(index)]], single=True)
        return self._output([rows[operator.index(each)] for each in index])

    def _output(self, rows: Sequence[int], *, single: bool = False) -> Any:
        """Return rows by number, as one batch of output; if `single`, the one row without its dimension."""
        found: list[Any] = []
        for part in self._parts:
            arrays = [part.row(row) for row in rows]
            shapes = [list(array.shape) for array in arrays] or [[0, *part.shapes[0][1:]]]
            flat = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0)
            values = torch.from_numpy(flat).to(getattr(torch, part.dtype))
            joined = joined_rows(values, shapes, None, self._pad_value, part.longest)
            if single:
                joined = joined[0]
            elif isinstance(joined, Tensor) and part.rows_second:
                joined = joined.transpose(0, 1)
            found.append(finished(joined, as_array=self._is_numpy))
        names = [name for name, _ in leaves(self._example)]
        return with_parts(self._example, dict(zip(names, found, strict=True)))


class _Part:
    """One tensor of the output; `shards` are the shapes of its runs of rows that are alike."""

    def __init__(self, folder: Path, number: int, dtype: str, rows_second: bool, shards: list[Shapes]) -> None:
        self._folder, self._number, self.dtype, self.rows_second = folder, number, dtype, rows_second
        self.shapes = [shape for shapes in shards for shape in shapes]
        self.longest = longest_of(self.shapes)
        self.ends = [*itertools.accumulate(shape[0] for shape in self.shapes)]
        sizes = [[0, *itertools.accumulate(map(math.prod, shapes))] for shapes in shards]
        self._places = [(shard, first) for shard, firsts in enumerate(sizes) for first in firsts[:-1]]
        self._opened: tuple[int, Any] = -1, None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": (-1, None)}

    def row(self, row: int) -> Any:
        """Return a row, shape (1, ...), as a view of its file."""
        run = bisect.bisect_right(self.ends, row)
        (count, *shape), (shard, first) = self.shapes[run], self._places[run]
        if self._opened[0] != shard:
            path = file_of(self._folder, shard, self._number)
            has_numbers = path.stat().st_size > _HEADER_BYTES  # nothing else can be mapped
            self._opened = shard, np.load(path, mmap_mode="r" if has_numbers else None).reshape(-1)
        first += (row - self.ends[run] + count) * math.prod(shape)
        return self._opened[1][first : first + math.prod(shape)].reshape(1, *shape)


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of a folder; raise ConfigError if there is none."""
    index: Any = None
    with contextlib.suppress(OSError, ValueError):
        index = json.loads(read_text(folder / INDEX))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ConfigError(f"{folder} has no {INDEX} of predictions: predict(X, output_dir=...) writes it.")
    return index


def file_of(folder: Path, shard: int, part: int | None = None) -> Path:
    """Return the file of a part of a shard; without a part, the one that completes the shard."""
    return folder / (f"shard-{shard:06}.json" if part is None else f"shard-{shard:06}-{part}.npy")


def longest_of(shapes: Shapes) -> list[int] | None:
    """Return the largest length in each dimension of rows whose shapes differ; None: they are alike."""
    if all(shape[1:] == shapes[0][1:] for shape in shapes):
        return None
    return [max(lengths) for lengths in zip(*shapes, strict=True)][1:]


def joined_rows(
    values: Tensor, shapes: Shapes, order: Tensor | None, pad_value: float | None, longest: list[int] | None
) -> Tensor | list[Tensor]:
    """Return the rows of several batches in their order, as one tensor; if their shapes differ, padded or as a list.

    Args:
        values: Of all batches, one after the other.
        shapes: Of the batches.
        order: The place of each row; None: as they come.
        pad_value: Put at the ends of rows that are shorter than others; None: such rows become a list.
        longest: The shape of padded rows; None: the shapes are alike.
    """
    count = sum(shape[0] for shape in shapes)
    if longest is None:
        rows = values.view(count, *shapes[0][1:])
        return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)
    order = torch.arange(count, device="cpu") if order is None else order
    pieces = zip(values.split(list(map(math.prod, shapes))), shapes, strict=True)
    batches = [piece.view(shape) for piece, shape in pieces]
    if pad_value is None:
        several = [row for batch in batches for row in batch]
        return [several[number] for number in order.argsort().tolist()]
    if not (values.is_floating_point() or values.is_complex() or float(pad_value).is_integer()):
        raise ConfigError(f"pad_value must be an integer for outputs of {values.dtype}, got {pad_value}.")
    padded = torch.full((count, *longest), pad_value, dtype=values.dtype, device="cpu")
    for places, batch in zip(order.split([shape[0] for shape in shapes]), batches, strict=True):
        corner = (places, *map(slice, batch.shape[1:]))
        padded[corner] = batch
    return padded


def finished(rows: Tensor | list[Tensor], *, as_array: bool) -> Any:
    """Return rows as NumPy arrays, or as they are."""
    finish: Any = as_numpy if as_array else (lambda row: row)
    return finish(rows) if isinstance(rows, Tensor) else list(map(finish, rows))
