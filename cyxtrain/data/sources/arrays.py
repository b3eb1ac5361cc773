"""The user's arrays as rows: what a batch is gathered from, and what is wrong with them before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, placed, share_of_batches
from cyxtrain.data.batches.prefetch import Placement, make_copier
from cyxtrain.data.batches.rows import (
    NAMES,
    SAMPLED_ROWS,
    Rows,
    as_rows,
    copy,
    gather,
    holds_tensors,
    rows_not_finite,
    sampled_hash,
)
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.class_weight import weighted
from cyxtrain.data.feed import ArrayFeed
from cyxtrain.data.iterator import DistributedBatchIterator
from cyxtrain.data.sampler import DistributedSampler, Indices
from cyxtrain.data.sources.source import Source
from cyxtrain.environment.accelerator import to_device
from cyxtrain.errors import ConfigError, counted

_SCAN_ELEMENTS = 1 << 22


class ArraySource(Source):
    """Rows of NumPy arrays or tensors, with or without targets. Nothing is copied, memory maps stay on disk.

    Args:
        inputs: X, shape (n, ...); or a dictionary, a tuple or a list of such.
        targets: y, shape (n, ...), or None; or several, as X.
        weights: How much each row counts, shape (n,), or None: all alike.

    Raises:
        ConfigError: Not arrays, no rows, or parts of different length.
    """

    is_whole = True
    shuffle: bool | None = None
    """Whether each epoch has another order; None: as the config says."""

    def __init__(self, inputs: Any, targets: Any = None, weights: Any = None) -> None:
        self._first_row = 0  # in the arrays that the user gave
        self.is_numpy = not holds_tensors(inputs)
        self.example = as_rows(inputs, targets, weights)
        if len(self) == 0:
            raise ConfigError("X has no rows: there is nothing to train on or to evaluate.")
        self.example.check_lengths()

    def __len__(self) -> int:
        return num_rows(self.example.inputs)

    def describe(self) -> str:
        """Returns how many rows there are."""
        return counted(len(self), "row")

    def gather(self, indices: Indices, *, pinned: bool = False) -> Rows:
        """Returns rows by number, in that order.

        Args:
            indices: Their numbers, shape (rows,).
            pinned: As `rows.gather`.
        """
        chosen = torch.from_numpy(indices.copy() if not indices.flags.writeable else indices)
        elsewhere: dict[torch.device, Tensor] = {}

        def chosen_on(device: torch.device) -> Tensor:
            if device not in elsewhere:  # once for all parts
                elsewhere[device] = to_device(chosen, device)
            return elsewhere[device]

        return self.example.mapped(
            lambda tensor: gather(tensor, chosen if tensor.is_cpu else chosen_on(tensor.device), pinned=pinned)
        )

    def slice(self, first: int, end: int, own: Callable[[Tensor], Tensor] = copy) -> Rows:
        """Returns neighbouring rows, as copies: a model may change its input in place.

        Args:
            first: The first row.
            end: The row after the last.
            own: Makes the copies.
        """
        return self.example.mapped(lambda tensor: own(tensor[first:end]))

    def explain(self) -> str:
        """As `Source`: what a DataLoader says of the order."""
        if self.shuffle is None:
            return ""
        return ", in a new order in each epoch" if self.shuffle else ", in their own order"

    def part(self, first: int, end: int) -> ArraySource:
        """Returns neighbouring rows as a source of their own; a view."""
        part = object.__new__(ArraySource)
        part._first_row = self._first_row + first
        part.batch_size, part.shuffle = self.batch_size, self.shuffle
        part.is_numpy = self.is_numpy
        part.example = self.example.mapped(lambda tensor: tensor[first:end])
        return part

    def first(self, rows: int) -> Rows:
        """Returns the first rows, as copies."""
        return self.slice(0, rows)

    def weighted_by_class(self, weights: Mapping[Any, Any], ignored: int | None) -> ArraySource:
        """As `Source`."""
        part = self.part(0, len(self))
        part.example = weighted(self.example, weights, ignored)
        return part

    def shortened(self, batches: int, batch_size: int) -> ArraySource:
        """As `Source`."""
        return self.part(0, min(len(self), batches * batch_size))

    def feed(self, config: DistributedTrainingConfig, rank: int, world_size: int) -> ArrayFeed:
        """As `Source`."""
        shuffle = config.shuffle if self.shuffle is None else self.shuffle
        sampler = DistributedSampler(len(self), shuffle, config.seed, rank=rank, world_size=world_size, pad=False)
        per_rank = config.batch_size * config.accumulation_steps
        iterator = DistributedBatchIterator(sampler, per_rank, effective_batch_size=config.effective_batch_size)
        return ArrayFeed(self.gather, iterator, config)

    def whole_batches(self, batch_size: int, placement: Placement, rank: int, world_size: int) -> Iterator[Batch]:
        """As `Source`: neighbouring batches."""
        first, end = share_of_batches(len(self), batch_size, rank, world_size)
        mover = make_copier(placement)
        own = functools.partial(mover.own, memory_format=torch.contiguous_format)
        starts = ((number, number * batch_size) for number in range(first, end))
        return placed(((number, self.slice(start, start + batch_size, own)) for number, start in starts), mover)

    def table_rows(self, batch_size: int) -> int:
        """Returns how many batches there are."""
        return -(-len(self) // batch_size)

    def facts(self, name: str) -> dict[str, Any]:
        """Returns what must be the same on every rank: shapes, dtypes and a hash of up to 1,024 rows."""
        facts: dict[str, Any] = {}
        for what, tensor in self.example.named():
            label = f"{name} {what}"
            facts[f"{label}: shape"] = list(tensor.shape)
            facts[f"{label}: dtype"] = str(tensor.dtype).removeprefix("torch.")
            # Of weights all count: a rare class may have its own.
            rows = len(tensor) if what == NAMES[-1] else SAMPLED_ROWS
            facts[f"{label}: hash of its values"] = sampled_hash(tensor, rows)
        return facts

    def not_finite(self, part: int, parts: int) -> tuple[str, int]:
        """Returns what holds NaN or infinities: the first of X, else of y, such as "row 7 of X holds nan"; how many.

        Args:
            part: Which share of the rows to look through, from 0.
            parts: How many there are: each rank takes one.
        """
        first, end = len(self) * part // parts, len(self) * (part + 1) // parts
        text, wrong = "", set[int]()
        for name, tensor in self.example.named():
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            rows = max(1, _SCAN_ELEMENTS // tensor[0].numel())
            for start in range(first, end, rows):
                piece = tensor[start : min(start + rows, end)]
                # A sum is not finite where any element is not; it may overflow too, so look again.
                found = [] if bool(piece.sum().isfinite()) else rows_not_finite(piece)
                wrong.update(start + row for row in found)
                if found and not text:
                    values = piece[found[0]].reshape(-1)
                    bad = values[~values.isfinite()][0].item()
                    text = f"row {self._first_row + start + found[0]} of {name} holds {bad}"
        return text, len(wrong)
