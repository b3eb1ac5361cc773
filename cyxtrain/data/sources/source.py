"""The interface of all data, as training, evaluation and prediction see it."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch, BatchShare
from cyxtrain.data.batches.collate import check_parts
from cyxtrain.data.batches.prefetch import Placement
from cyxtrain.data.batches.rows import Rows, column_code, weighted_by_class
from cyxtrain.data.batches.stored import few_of_stored
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.feed import Feed
from cyxtrain.errors import ConfigError
from cyxtrain.world.world import World

_Source = TypeVar("_Source", bound="Source")


class Source(ABC):
    """Rows of data: arrays, a dataset, a loader, or a stream of batches.

    Each rank makes its own; then the ranks exchange their `summary` and `reconcile`.
    """

    example: Rows  # all samples if they are in memory, otherwise the first ones
    is_whole = False  # whether `example` is all of them
    is_shared = True  # whether the ranks have the same samples, and divide them
    must_be_shared = False  # whether the fit will refuse samples of each rank's own, so that no warning is needed
    is_in_slices = True  # whether batch i of an evaluation belongs to slice i mod V, of V virtual ranks
    is_numpy = False  # whether predictions for them are NumPy arrays
    batch_size: int | None = None  # rows at once per rank, if the data decide it
    reads_once = False  # whether the rows can be read only once
    left_out: Sequence[str] = ()  # names of what is left out of the first batch, such as strings
    no_rows: ConfigError | None = None  # why its batches are opaque; None: their tensors have a row per sample
    column = column_code(None)  # code that makes a column of y, for errors
    target_name: str | None = None  # as `collate.target_name` has it of the batches; None: they are tuples
    columns: Mapping[str, Sequence[str]] = MappingProxyType({})  # of tables, by the name of each
    _weigh: Callable[[Rows], Rows] | None = None
    num_evaluated: int | None = None  # batches of a stream, if the latest evaluation has read it to its end
    _limit: int | None = None  # batches to evaluate; None: all

    @property
    def inputs(self) -> Any:
        """X of the example."""
        return self.example.inputs

    @property
    def targets(self) -> Any:
        """Y of the example, or None; of a y of several numbers per sample in an HDF5 file, the first rows."""
        return few_of_stored(self.example.targets)

    @abstractmethod
    def describe(self) -> str:
        """Return how much there is, and of what, for the header."""

    @abstractmethod
    def explain(self, world: World) -> str:
        """Return in which order rows come and which rank has which, for the header; "": as usual."""

    def summary(self) -> dict[str, Any]:
        """Return what the other ranks must know before anything is planned, as JSON values."""
        return {"kind": "rows by number"}

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that a DataLoader decides, by name: ranks that share the samples must have the same."""
        return {}

    def reconcile(self, summaries: Sequence[Mapping[str, Any]], rank: int, *, sharded: bool | None) -> None:
        """Adapt to the summaries of all ranks; the example then looks like the batches that will come.

        `sharded` is whether each rank has its own samples; None: unknown. Raises ConfigError if the data differ.
        """
        if self._weigh is not None and self.example.weights is None:
            self.example = self.example._replace(weights=torch.ones(num_rows(self.example.inputs), device="cpu"))

    def first(self, rows: int) -> Rows:
        """Return copies of up to this many samples to try a model on; the same on all ranks with the same data."""
        if self.no_rows:
            return self.example.mapped(Tensor.clone)
        return self.example.mapped(lambda tensor: tensor[:rows].clone())

    @abstractmethod
    def facts(self, name: str) -> dict[str, Any]:
        """Return facts that must be the same on every rank; `name`, such as "training", says which rows these are."""

    def digest(self) -> str:
        """Return a digest of all facts, by which a checkpoint recognizes the data of its run."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.facts("data")).encode())

    def not_finite(self, part: int, parts: int) -> tuple[str, int, list[str]]:
        """Return the first place with NaN or an infinity in a part of the rows; the number of such rows; columns."""
        return "", 0, []

    def weighted_by_class(self: _Source, weights: Mapping[Any, Any], ignored: int | None) -> _Source:
        """Return the same samples, weighted as by Keras's class_weight, except the class `ignored`."""
        source = copy.copy(self)
        source._weigh = lambda rows: weighted_by_class(rows, weights, ignored)
        return source

    def group_by_length(self, asked: Any) -> None:
        """Train on rows of similar length in each step; `asked`: True, lengths, or a function of a sample."""
        raise ConfigError(
            "group_by_length orders samples by number, and X gives batches one after the other: give a Dataset or "
            "arrays, or let X make such batches."
        )

    def shortened(self: _Source, batches: int, batch_size: int) -> _Source:
        """Return the first batches alone, to evaluate."""
        source = copy.copy(self)
        source._limit = batches
        return source

    def checked(self, rows: Rows) -> Rows:
        """Return a batch, weighted by class; raise ConfigError if it has other parts than the first batch."""
        if self._weigh is not None:
            rows = self._weigh(rows)
        check_parts(rows, self.example)
        return rows

    @abstractmethod
    def feed(self, config: DistributedTrainingConfig, world: World) -> Feed:
        """Return the feed of a fit."""

    @abstractmethod
    def whole_batches(self, batch_size: int, placement: Placement, share: BatchShare) -> Iterator[Batch]:
        """Yield a rank's share of the batches of an evaluation, with their numbers.

        Rows by number come in the same batches as in one process, so that the model gives the same bits.
        """

    @abstractmethod
    def num_batches(self, batch_size: int) -> int | None:
        """Return how many batches an evaluation has; None: unknown before they end."""
