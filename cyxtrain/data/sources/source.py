"""Where rows come from, as training, evaluation and prediction see it: what every kind of data must be able to say."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.collate import check_parts
from cyxtrain.data.batches.prefetch import Placement
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.class_weight import weighted
from cyxtrain.data.feed import Feed


class Source(ABC):
    """Rows of data: arrays, a data set, a loader, or what gives batches one after the other.

    It is made on each rank by itself; then the ranks show each other their `opening`, and `meet`.

    Attributes:
        example: Rows of its form: all of them where they lie in memory, else the first ones.
        is_whole: Whether `example` is all of them.
        is_numpy: Whether predictions for them are NumPy arrays.
        batch_size: Rows at once that it brings along, per rank; None: as the config says.
        reads_once: Whether its rows come but once.
        left_out: What of the first batch is no part of its rows, such as texts: their names.
    """

    example: Rows
    is_whole = False
    is_numpy = False
    batch_size: int | None = None
    reads_once = False
    left_out: Sequence[str] = ()

    @property
    def inputs(self) -> Any:
        """X of the example."""
        return self.example.inputs

    @property
    def targets(self) -> Any:
        """Y of the example, or None."""
        return self.example.targets

    @abstractmethod
    def describe(self) -> str:
        """Returns how much there is, and of what, for people."""

    @abstractmethod
    def explain(self) -> str:
        """Returns in which order its rows come and who has which, for people; "": as everybody would think."""

    def opening(self) -> dict[str, Any]:
        """Returns what the other ranks must know of it before anything is planned, as JSON values."""
        return {"kind": "rows by number"}

    def meet(self, openings: Sequence[Mapping[str, Any]], rank: int, *, sharded: bool | None) -> None:  # noqa: B027
        """Learns what the other ranks have.

        Args:
            openings: Of all ranks, by rank.
            rank: This one.
            sharded: Whether each rank has rows of its own; None: to be found out.

        Raises:
            ConfigError: They do not go together.
        """

    @abstractmethod
    def first(self, rows: int) -> Rows:
        """Returns up to so many rows to try a model on, the same on all ranks where they have the same data."""

    @abstractmethod
    def facts(self, name: str) -> dict[str, Any]:
        """Returns what must be the same on every rank, in words, by what it is called.

        Args:
            name: Of these rows, such as "training".
        """

    def digest(self) -> str:
        """Returns a digest of all facts: how a checkpoint knows the data that its run has seen."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.facts("data")).encode())

    def not_finite(self, part: int, parts: int) -> tuple[str, int]:
        """Returns the first place that holds NaN or infinities, in words, and how many rows do; data may be too large.

        Args:
            part: Which share of the rows to look through, from 0.
            parts: How many there are: each rank takes one.
        """
        return "", 0

    @abstractmethod
    def weighted_by_class(self, weights: Mapping[Any, Any], ignored: int | None) -> Source:
        """Returns the same rows, each counting as Keras's class_weight says.

        Args:
            weights: By class number.
            ignored: The class number that does not count.
        """

    @abstractmethod
    def shortened(self, batches: int, batch_size: int) -> Source:
        """Returns the first so many batches alone, to evaluate."""

    @abstractmethod
    def feed(self, config: DistributedTrainingConfig, rank: int, world_size: int) -> Feed:
        """Returns who is given which of them in each step of a fit."""

    @abstractmethod
    def whole_batches(self, batch_size: int, placement: Placement, rank: int, world_size: int) -> Iterator[Batch]:
        """Gives this rank's share of the batches of an evaluation.

        Where rows have numbers, the batches are the very ones of one process: so the model gives the very bits.
        """

    @abstractmethod
    def table_rows(self, batch_size: int) -> int:
        """Returns how many different numbers the batches of an evaluation have."""

    def in_order(self, batches: Sequence[Sequence[int]]) -> Tensor | None:
        """Returns where each row of a prediction goes, shape (rows,); None: it is where it belongs.

        Args:
            batches: Rows of each batch, by rank; the rows stand in that order.
        """
        return None


class FetchedSource(Source):
    """Rows that a user's code gives batch by batch; `example` has the first ones."""

    _weigh: Callable[[Rows], Rows] | None = None
    """Gives rows the weights of their classes."""
    _limit: int | None = None
    """Batches to evaluate; None: all."""

    def meet(self, openings: Sequence[Mapping[str, Any]], rank: int, *, sharded: bool | None) -> None:
        """As `Source`; the example looks like the batches that will come."""
        if self._weigh is not None and self.example.weights is None:
            self.example = self.example._replace(weights=torch.ones(num_rows(self.example.inputs), device="cpu"))

    def first(self, rows: int) -> Rows:
        """Returns rows of the example."""
        return self.example.mapped(lambda tensor: tensor[:rows].clone())

    def weighted_by_class(self, weights: Mapping[Any, Any], ignored: int | None) -> FetchedSource:
        """As `Source`: batch by batch."""
        source = copy.copy(self)
        source._weigh = lambda rows: weighted(rows, weights, ignored)
        return source

    def shortened(self, batches: int, batch_size: int) -> FetchedSource:
        """As `Source`."""
        source = copy.copy(self)
        source._limit = batches
        return source

    def weighed(self, rows: Rows) -> Rows:
        """Returns a batch with the weights of its classes.

        Raises:
            ConfigError: It does not have the parts of the first one.
        """
        found = rows if self._weigh is None else self._weigh(rows)
        check_parts(found, self.example)
        return found
