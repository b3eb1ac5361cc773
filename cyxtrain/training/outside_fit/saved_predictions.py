"""Predictions in a folder, which `predict(output_dir=...)` writes in shards, read row by row.

index.json           what was predicted and, after the last shard, the shapes of all parts of all shards
shard-000003.json    dtypes and shapes of the fourth shard; it is written last, so that the shard is complete
shard-000003-0.npy   the first part of its output, shape (rows, ...); flat if rows differ in shape

A shard is a group of neighboring batches, which one rank predicts and writes. Their sizes do not depend on the number
of ranks, and so neither do the files. A call that was killed continues with the shards that are missing. In a store, a
file is written to the local staging folder, and uploaded whole.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from cyxtrain.checkpoint.files import TEMPORARY_SUFFIX, remove_leftover, replacing, try_folder
from cyxtrain.checkpoint.remote_files import list_files, read_remote, read_text_of, require_reachable
from cyxtrain.config.settings import names_checked
from cyxtrain.data.batches.structure import example_of, fields_of, form_of, leaves, same_sequence, with_parts
from cyxtrain.environment.regular_files import path_or_url, url_of
from cyxtrain.errors import ConfigError, brief, counted
from cyxtrain.metrics.whole_set import as_numpy
from cyxtrain.tensors.fingerprint import fingerprint
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.world.agreement import agree_on, on_each, on_first
from cyxtrain.world.world import World

Shapes: TypeAlias = list[list[int]]
INDEX = "index.json"
FORMAT = "cyxtrain predictions 1"
SHARD_BYTES = 64 << 20
# If there are as many batches: many ranks then have equal shares.
_FEWEST_SHARDS = 64
# Of a shard, at most, if the number of batches is unknown.
_STREAM_BATCHES = 16
_SAME = "the folder output_dir (without a file system that all ranks share: distributed=False, and a folder for each)"


@names_checked
def open_predictions(folder: str | os.PathLike[str]) -> Predictions:
    """Open the predictions that `DistributedTrainer.predict(X, output_dir=folder)` has written.

    Args:
        folder: As given there; it may be a URL.

    Returns:
        `predictions[5]`, `predictions[10:20]`, `predictions[[3, 1]]`, `len(predictions)` and iteration read from the
        files the rows that you ask for; the others are not loaded. Rows have the structure of the model's output, with
        dictionaries for dataclasses, and slices the form that `predict` returns. From a store a whole shard is read,
        some 64 MB, and kept until a row of another one is asked for: read in order, or copy the folder to a disk.

    Raises:
        ConfigError: The folder has no predictions, or they are not complete.
        CheckpointError: A store does not answer.
    """
    found = Predictions(folder)
    if not found.is_complete:
        raise ConfigError(f"{folder}: predict has not finished. Call it again with output_dir={str(folder)!r}.")
    return found


class Predictions:
    """Rows of a model's output, in a folder; see `open_predictions`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = _place("open_predictions.folder", folder)
        index = read_index(self.folder)
        self.is_complete: bool = index["complete"]
        self._example = example_of(index["output"])
        self._is_numpy: bool = index["numpy"]
        self._pad_value: float | None = index["pad_value"]
        self._parts: list[_Part] = []
        for number, part in enumerate(index["parts"]):
            shards = [shard[number] for shard in index["shards"]]
            self._parts.append(_Part(self.folder, number, part["dtype"], part["rows_second"], shards))

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
        numbers = np.asarray(index)
        if numbers.dtype == bool and numbers.shape == (len(self),):
            numbers = np.flatnonzero(numbers)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise IndexError(f"give a row's number, a slice, a list of numbers or a bool per row, not {brief(index)}.")
        return self._output([rows[each] for each in numbers.tolist()])

    def _output(self, rows: Sequence[int], *, single: bool = False) -> Any:
        """Return rows by number, as one batch of output; if `single`, the one row without its dimension."""
        found: list[Any] = []
        for part in self._parts:
            joined = part.rows(rows, self._pad_value)
            if single:
                joined = joined[0]
            elif isinstance(joined, Tensor) and part.rows_second:
                joined = joined.transpose(0, 1)
            found.append(finished(joined, as_array=self._is_numpy))
        names = [name for name, _ in leaves(self._example)]
        return with_parts(self._example, dict(zip(names, found, strict=True)))


class _Part:
    """One tensor of the output; `shards` are the shapes of its runs of rows that are alike."""

    def __init__(self, folder: str, number: int, dtype: str, rows_second: bool, shards: list[Shapes]) -> None:
        self._folder = folder
        self._number = number
        self.dtype = dtype
        self.rows_second = rows_second
        self.shapes: Shapes = [*itertools.chain.from_iterable(shards)]
        self.longest = longest_of(self.shapes)
        self.ends = [*itertools.accumulate(shape[0] for shape in self.shapes)]
        # The shard of each run, and where the run begins in the shard's file.
        self._places: list[tuple[int, int]] = []
        for shard, shapes in enumerate(shards):
            first = 0
            for shape in shapes:
                self._places.append((shard, first))
                first += math.prod(shape)
        self._open_shard = -1
        self._open_values: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled with all its values.
        return {**vars(self), "_open_shard": -1, "_open_values": None}

    def rows(self, numbers: Sequence[int], pad_value: float | None) -> Tensor | list[Tensor]:
        """Return rows by number, as `joined_rows`."""
        shapes = [[0, *self.shapes[0][1:]]]
        flat = np.empty(0)
        if numbers:
            arrays = [self._row(number) for number in numbers]
            shapes = [list(array.shape) for array in arrays]
            flat = np.concatenate([array.reshape(-1) for array in arrays])
        values = torch.from_numpy(flat).to(getattr(torch, self.dtype))
        return joined_rows(values, shapes, None, pad_value, self.longest)

    def _row(self, row: int) -> Any:
        """Return a row, shape (1, ...), as a view of its file."""
        run = bisect.bisect_right(self.ends, row)
        count, *shape = self.shapes[run]
        size = math.prod(shape)
        shard, first = self._places[run]
        if self._open_shard != shard:
            self._open_values = _opened(file_of(self._folder, shard, self._number)).reshape(-1)
            self._open_shard = shard
        first += (row - self.ends[run] + count) * size
        return self._open_values[first : first + size].reshape(1, *shape)


def _opened(file: str) -> Any:
    """Return the array of a file: mapped, or from a store in memory."""
    url = url_of(file)
    if url:
        return np.load(io.BytesIO(read_remote(url, "file")))
    return np.load(file, mmap_mode="r")


def _place(argument: str, folder: Any) -> str:
    """Return the absolute path or the URL of a folder that a user gives."""
    found = path_or_url(argument, folder)
    return url_of(found) or str(Path(found).absolute())


def read_index(folder: str) -> dict[str, Any]:
    """Return the index of a folder; raise ConfigError if it has none."""
    index: Any = None
    # Not all ValueErrors: a ConfigError tells which library a store needs.
    with contextlib.suppress(OSError, json.JSONDecodeError, UnicodeDecodeError):
        index = json.loads(read_text_of(f"{folder}/{INDEX}"))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ConfigError(f"{folder} has no {INDEX} of predictions: predict(X, output_dir=...) writes it.")
    return index


def file_of(folder: str, shard: int, part: int | None = None) -> str:
    """Return the file of a part of a shard; without a part, the one that completes the shard."""
    if part is None:
        return f"{folder}/shard-{shard:06}.json"
    return f"{folder}/shard-{shard:06}-{part}.npy"


def kind_of(part: Any) -> str:
    """Return what the rows of an output have in common, even if they are padded to different lengths."""
    if not isinstance(part, Tensor):
        return type(part).__name__
    dtype = str(part.dtype).removeprefix("torch.")
    return f"{dtype} of {part.dim()} dimensions"


def longest_of(shapes: Shapes) -> list[int] | None:
    """Return the largest length in each dimension of rows whose shapes differ; None: they are alike."""
    if all(shape[1:] == shapes[0][1:] for shape in shapes):
        return None
    return [max(lengths) for lengths in zip(*shapes, strict=True)][1:]


def joined_rows(
    values: Tensor, shapes: Shapes, order: Tensor | None, pad_value: float | None, longest: list[int] | None
) -> Tensor | list[Tensor]:
    """Return the rows of several batches as one tensor; if their shapes differ, padded or as a list.

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
    if order is None:
        order = torch.arange(count, device="cpu")
    pieces = values.split([math.prod(shape) for shape in shapes])
    batches = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    if pad_value is None:
        several = [*itertools.chain.from_iterable(batches)]
        return [several[number] for number in order.argsort().tolist()]
    return _padded(batches, order, pad_value, longest)


def _padded(batches: Sequence[Tensor], order: Tensor, pad_value: float, longest: list[int]) -> Tensor:
    """Return the rows of one or more batches, each at its place, padded to one shape."""
    dtype = batches[0].dtype
    holds_fractions = dtype.is_floating_point or dtype.is_complex
    if not holds_fractions and not float(pad_value).is_integer():
        raise ConfigError(f"pad_value must be an integer for outputs of {dtype}, got {pad_value}.")
    padded = torch.full((len(order), *longest), pad_value, dtype=dtype, device="cpu")
    for places, batch in zip(order.split([*map(len, batches)]), batches, strict=True):
        corner = (places, *map(slice, batch.shape[1:]))
        padded[corner] = batch
    return padded


def finished(rows: Tensor | list[Tensor], *, as_array: bool) -> Any:
    """Return rows as NumPy arrays, or as they are."""
    if not as_array:
        return rows
    if isinstance(rows, Tensor):
        return as_numpy(rows)
    return [*map(as_numpy, rows)]


class ShardFolder:
    """The folder of a prediction, new or continued; all ranks that share the rows make one.

    `group` batches are a shard; `done` has the numbers of the complete shards. Raises ConfigError if the folder has
    anything else, or not all ranks see it.
    """

    def __init__(
        self, world: World, path: str | os.PathLike[str], model: nn.Module, rows: CheckedData, output: Any
    ) -> None:
        self.path = _place("predict.output_dir", path)
        self._world = world
        self._names = [name for name, _ in leaves(output)]
        self._rows = rows
        state: dict[str, Any] = {}
        on_first(world, lambda: state.update(self._begin(_facts(model, rows), output)))
        state = world.gather_json(state)[0]
        agree_on(world, lambda: (None, {_SAME: self._version_of_index()}))
        self.group: int = state["group"]
        self.done = frozenset[int](state["done"])
        self.is_complete = bool(state["complete"])

    def _version_of_index(self) -> object:
        """Return what tells when the index was written: ranks that do not share the folder see another one, or none."""
        if url_of(self.path):
            return str(list_files(self.path).get(INDEX))
        index = Path(self.path, INDEX)
        return index.stat().st_mtime_ns if index.exists() else None

    def _begin(self, facts: dict[str, Any], output: Any) -> dict[str, Any]:
        """Create the folder and its index, or check them; return what the other ranks must know."""
        names = sorted(name for name in _tried(self.path) if not name.startswith("."))
        if names and INDEX not in names:
            raise ConfigError(f"output_dir {self.path} has files ({brief(names)}) and no {INDEX}: give an empty one.")
        if not names:
            self._write_first_index(facts, output)
        index = read_index(self.path)
        self._check_facts(index["of"], facts)
        shards = [re.fullmatch(r"shard-(\d+)\.json", name) for name in names]
        done = [int(match[1]) for match in shards if match]
        return {"group": index["batches_per_shard"], "done": done, "complete": index["complete"]}

    def _write_first_index(self, facts: dict[str, Any], output: Any) -> None:
        index = {
            "format": FORMAT,
            "of": facts,
            "output": form_of(_plain(output)),
            "numpy": self._rows.source.is_numpy,
            "batches_per_shard": _group_size(self._rows, output),
            "complete": False,
            "pad_value": None,
            "parts": [],
            "shards": [],
        }
        _write_json(f"{self.path}/{INDEX}", index)

    def _check_facts(self, before: dict[str, Any], facts: dict[str, Any]) -> None:
        """Refuse to continue predictions of another model, of other data or with other settings."""
        # As JSON, which has no tuples: as the index has them.
        for what, value in json.loads(json.dumps(facts)).items():
            if value != before.get(what):
                raise ConfigError(
                    f"output_dir {self.path} has other predictions: {what} was {brief(before.get(what))}, and now is "
                    f"{brief(value)}. Choose another folder, or delete that one."
                )

    def write(self, shard: int, batches: list[dict[str, list[Tensor]]]) -> None:
        """Write the outputs of the batches of a shard."""
        record: dict[str, list[Any]] = {"kinds": [], "shapes": []}
        for part, name in enumerate(self._names):
            tensors = [*itertools.chain.from_iterable(batch[name] for batch in batches)]
            runs = itertools.groupby(tensors, lambda tensor: tensor.shape[1:])
            shapes = [[sum(map(len, run)), *shape] for shape, run in runs]
            record["kinds"].append(kind_of(tensors[0]))
            record["shapes"].append(shapes)
            # Rows of several shapes follow each other as flat numbers; the record has the shapes.
            if len(shapes) > 1:
                tensors = [tensor.reshape(-1) for tensor in tensors]
            joined = torch.cat(tensors)
            with replacing(file_of(self.path, shard, part), "predictions") as file:
                np.save(file, as_numpy(joined))
        # Last: it tells that the shard is complete.
        _write_json(file_of(self.path, shard), record)
        self.done |= {shard}

    def finish(self, pad_value: float | None, *, is_ended: bool) -> Predictions:
        """Write the index; return the predictions: the first shards, if a callback has ended the call."""
        count = 1 + max(self._world.gather_json(max(self.done, default=-1)))

        def write() -> None:
            records = self._records(count, may_miss=is_ended)
            kinds = [record["kinds"] for record in records]
            if any(kind != kinds[0] for kind in kinds):
                raise ConfigError(f"predict needs rows of one kind; the model's outputs differ: {brief(kinds)}.")
            parts: list[dict[str, Any]] = []
            if kinds:
                for name, kind in zip(self._names, kinds[0], strict=False):
                    is_second = name in self._rows.tried.rows_second
                    parts.append({"dtype": kind.split()[0], "rows_second": is_second})
            found = {"complete": not is_ended, "pad_value": pad_value, "parts": parts}
            shapes = [record["shapes"] for record in records]
            _write_json(f"{self.path}/{INDEX}", {**read_index(self.path), **found, "shards": shapes})

        on_first(self._world, write)
        opened: list[Predictions] = []
        # A store may fail for one rank.
        on_each(self._world, lambda: opened.append(Predictions(self.path)))
        return opened[0]

    def _records(self, count: int, *, may_miss: bool) -> list[dict[str, Any]]:
        """Return what the first shards contain; `may_miss`: only up to the first that is missing."""
        records: list[dict[str, Any]] = []
        for shard in range(count):
            file = file_of(self.path, shard)
            try:
                records.append(json.loads(read_text_of(file)))
            except FileNotFoundError:
                if not may_miss:
                    raise
                break
        return records


def _tried(path: str) -> list[str]:
    """Create a folder and try to write to it; return the names of the files in it."""
    if url_of(path):
        require_reachable(path, writes=True)
        return [*list_files(path)]
    folder = Path(path)
    try_folder(folder, INDEX, "predictions")
    # Of a call that was killed; a file that is still being written is locked.
    for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        remove_leftover(leftover)
    return [each.name for each in folder.iterdir()]


def _write_json(path: str, value: Any) -> None:
    with replacing(path, "predictions") as file:
        file.write(json.dumps(value).encode())


def _group_size(rows: CheckedData, output: Any) -> int:
    """Return how many batches a shard has, by the sizes of the dry run's output."""
    row_bytes = 0
    for name, part in leaves(output):
        rows_dimension = int(name in rows.tried.rows_second)
        row_bytes += part.nbytes // max(1, part.shape[rows_dimension])
    batches = rows.source.num_batches(rows.batch_size)
    most = _STREAM_BATCHES  # the length of a stream is unknown before it ends
    if batches is not None:
        most = -(-batches // _FEWEST_SHARDS)
    return max(1, min(most, SHARD_BYTES // max(1, row_bytes * rows.batch_size)))


def _facts(model: nn.Module, rows: CheckedData) -> dict[str, Any]:
    """Return what a folder's predictions are of; of a stream, the first batch stands for the others."""
    digest = xxhash.xxh3_64()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {fingerprint(tensor)}".encode())
    return {
        "the model": type(model).__name__,
        "the weights' hash": digest.hexdigest(),
        "the precision": str(rows.call.precision.dtype),
        "the batch size": rows.batch_size,
        "the number of batches": rows.source.num_batches(rows.batch_size),
        "the first batch": rows.source.summary(),
        **rows.source.facts("the given"),
    }


def _plain(output: Any) -> Any:
    """Return a model's output with dictionaries for dataclasses."""
    named = fields_of(output)
    if named is not None:
        return {str(name): _plain(part) for name, part in named.items()}
    if isinstance(output, (tuple, list)):
        return same_sequence(output, map(_plain, output))
    return output
