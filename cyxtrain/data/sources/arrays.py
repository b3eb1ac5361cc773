"""The user's arrays as rows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from typing_extensions import override

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, BatchShare, on_device
from cyxtrain.data.batches.prefetch import Placement, make_copier
from cyxtrain.data.batches.rows import (
    NAMES,
    SAMPLED_ROWS,
    Rows,
    as_rows,
    column_code,
    gather,
    given_arrays,
    holds_tensors,
    rows_not_finite,
    sampled_hash,
    weighted_by_class,
)
from cyxtrain.data.batches.stored import StoredTensor, loaded
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.batches.tables import columns_of
from cyxtrain.data.feed import RowFeed
from cyxtrain.data.order import EpochOrder, SeededOrder, lengths_of
from cyxtrain.data.sampler import Indices
from cyxtrain.data.sources.source import Source
from cyxtrain.environment.accelerator import to_device
from cyxtrain.errors import ConfigError, counted
from cyxtrain.world.world import World

_SCAN_ELEMENTS = 1 << 22


class ArraySource(Source):
    """Rows of NumPy arrays or tensors. Nothing is copied; memory maps and HDF5 datasets stay on disk."""

    is_whole = True
    drop_last = False
    shuffle: bool | None = None  # whether each epoch has a different order; None: config.shuffle

    def __init__(self, inputs: Any, targets: Any = None, weights: Any = None) -> None:
        self._first_row = 0  # in the arrays that the user gave
        self._lengths: Indices | None = None  # of rows, by which an epoch groups them
        self._rows: Indices | None = None  # the samples that were chosen of them; None: all from the first one on
        self.example = as_rows(inputs, targets, weights)
        self.is_numpy = not holds_tensors(inputs)
        self.column = column_code(targets)
        # As strings, which a checkpoint holds, too: names may be numbers, tuples or dates.
        named = [(name, [*map(str, columns_of(values))]) for name, values in given_arrays(inputs, targets, weights)]
        self.columns = {name: columns for name, columns in named if columns}
        if len(self) == 0:
            raise ConfigError("X has no samples: there is nothing to train on or to evaluate.")
        self.example.check_lengths()

    def __len__(self) -> int:
        return num_rows(self.example.inputs)

    @override
    def describe(self) -> str:
        return counted(len(self), "sample")

    def gather(self, indices: Indices, *, pinned: bool = False) -> Rows:
        """Return rows by number, in that order; with `pinned`, as `rows.gather`."""
        if not indices.flags.writeable:  # PyTorch warns of read-only arrays
            indices = indices.copy()
        chosen = torch.from_numpy(indices)
        on_device = functools.cache(functools.partial(to_device, chosen))  # once for all parts

        def gathered(tensor: Tensor) -> Tensor:
            if tensor.is_cpu:
                return gather(tensor, chosen, pinned=pinned)
            return gather(tensor, on_device(tensor.device), pinned=pinned)

        return self.example.mapped(gathered)

    def begin_pass(self, number: int) -> bool:
        """As `RowSource`."""
        return False

    def fetch(self, order: EpochOrder, places: range, epoch: int) -> Rows:
        """As `RowSource`."""
        return self.gather(order.rows(places))

    def fetcher(
        self, order: EpochOrder, pieces: Iterable[range], epoch: int, *, pinned: bool
    ) -> Callable[[Indices], Rows]:
        """As `RowSource`."""
        return functools.partial(self.gather, pinned=pinned)

    @override
    def explain(self, world: World) -> str:
        if self.shuffle is None:
            return ""
        return f", {SeededOrder(len(self), self.shuffle, 0).describe()}"

    @override
    def own_settings(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "shuffle": self.shuffle, "drop_last": self.drop_last}

    def part(self, first: int, end: int) -> ArraySource:
        """Return neighbouring samples as a source, a view."""
        part = copy.copy(self)
        part._first_row += first
        if part._rows is not None:
            part._rows = part._rows[first:end]
        if part._lengths is not None:
            part._lengths = part._lengths[first:end]
        part.example = self.example.mapped(lambda tensor: tensor[first:end])
        return part

    def chosen(self, is_chosen: npt.NDArray[np.bool_]) -> ArraySource:
        """Return some samples, in their order, as a source: a copy, except of rows in an HDF5 file."""
        part = copy.copy(self)
        rows = np.flatnonzero(is_chosen)
        part._rows = rows

        def picked(tensor: Tensor) -> Tensor:
            if isinstance(tensor, StoredTensor):
                return tensor.chosen(rows)
            return gather(tensor, torch.from_numpy(rows))

        part.example = self.example.mapped(picked)
        if part._lengths is not None:
            part._lengths = part._lengths[part._rows]
        return part

    @override
    def first(self, rows: int) -> Rows:
        return self.example.mapped(lambda tensor: tensor[:rows].clone(memory_format=torch.contiguous_format))

    @override
    def weighted_by_class(self, weights: Mapping[Any, Any], ignored: int | None) -> ArraySource:
        part = self.part(0, len(self))
        part.example = weighted_by_class(self.example, weights, ignored)
        return part

    @override
    def shortened(self, batches: int, batch_size: int) -> ArraySource:
        return self.part(0, min(len(self), batches * batch_size))

    @override
    def feed(self, config: DistributedTrainingConfig, world: World) -> RowFeed:
        shuffle = config.shuffle if self.shuffle is None else self.shuffle
        order = SeededOrder(len(self), shuffle, config.seed)
        order.lengths = self._lengths
        return RowFeed(self, order, config, world)

    @override
    def group_by_length(self, asked: Any) -> None:
        self._lengths = lengths_of(asked, len(self))

    @override
    def whole_batches(self, batch_size: int, placement: Placement, share: BatchShare) -> Iterator[Batch]:
        copier = make_copier(placement)

        def own(tensor: Tensor) -> Tensor:
            return copier.clone(loaded(tensor), memory_format=torch.contiguous_format)  # a model may change it

        def batches() -> Iterator[tuple[int, Rows]]:
            for number in share.of(self.num_batches(batch_size)):
                part = self.part(number * batch_size, (number + 1) * batch_size)
                yield number, part.example.mapped(own)

        return on_device(batches(), copier)

    @override
    def num_batches(self, batch_size: int) -> int:
        return -(-len(self) // batch_size)

    @override
    def facts(self, name: str) -> dict[str, Any]:
        """Return shapes, dtypes and a hash of up to 1,024 rows."""
        facts: dict[str, Any] = {}
        for what, tensor in self.example.named():
            label = f"{name} {what}"
            facts[f"{label}: shape"] = list(tensor.shape)
            facts[f"{label}: dtype"] = str(tensor.dtype).removeprefix("torch.")
            rows = SAMPLED_ROWS
            if what == NAMES[-1]:
                rows = len(tensor)  # all weights: a rare class may have its own
            facts[f"{label}: hash of its values"] = sampled_hash(tensor, rows)
        for what, numbers in (("which rows are", self._rows), ("the lengths of", self._lengths)):
            if numbers is not None:
                facts[f"{what} the {name} data: hash"] = xxhash.xxh3_64_hexdigest(numbers.tobytes())
        return facts

    @override
    def not_finite(self, part: int, parts: int) -> tuple[str, int, list[str]]:
        """Return the first place in X or y, such as "sample 7 of X holds nan"; the number of samples; columns."""
        first = len(self) * part // parts
        end = len(self) * (part + 1) // parts
        place = ""
        wrong: set[int] = set()
        columns: list[str] = []
        for name, tensor in self.example.named():
            # Rows in an HDF5 file are not read before they are used.
            if isinstance(tensor, StoredTensor) or not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            rows = max(1, _SCAN_ELEMENTS // tensor[0].numel())
            for start in range(first, end, rows):
                piece = tensor[start : min(start + rows, end)]
                # A sum is not finite if any element is not; it may overflow too, so look again.
                if bool(piece.sum().isfinite()):
                    continue
                found = rows_not_finite(piece)
                wrong.update(start + row for row in found)
                if found:
                    columns += self._columns_not_finite(name, piece)
                    place = place or self._describe_first(name, piece, start, found[0])
        return place, len(wrong), list(dict.fromkeys(columns))

    def _columns_not_finite(self, name: str, piece: Tensor) -> Iterator[str]:
        for number, column in enumerate(self.columns.get(name, ())):
            if not bool(piece[:, number].isfinite().all()):
                yield repr(column)

    def _describe_first(self, name: str, piece: Tensor, start: int, row: int) -> str:
        """Return the first value of a row that is not finite; `piece` begins at row `start` of this source."""
        values = piece[row].reshape(-1)
        bad = values[~values.isfinite()][0].item()
        number = self._first_row + start + row
        if self._rows is not None:
            number = int(self._rows[start + row])
        return f"sample {number} of {name} holds {bad}"
