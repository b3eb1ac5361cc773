"""One pass through data that give batches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cyxtrain.data.batches.collate import as_batch, left_out
from cyxtrain.data.batches.rows import Rows, holds_tensors
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.rng import GeneratorStates, generators_kept
from cyxtrain.data.row_rng import begin_pass, generators_of


class Pass:
    """A pass through the data, whose random generators are separate from training's.

    Args:
        make: Returns an iterator of batches.
        parts: Parts of the data that have generators, or a `set_epoch`.
        seed: Of the run.
        number: Of the pass.
        rank: The rank whose random numbers these are; 0 if all ranks have the same data.

    Attributes:
        num_read: Batches read so far; those without rows do not count.
        is_numpy: Whether the latest one consisted of NumPy arrays.
        left_out: As `Source.left_out`, of the first one.
    """

    def __init__(
        self, make: Callable[[], Iterator[Any]], parts: Sequence[Any], seed: int, number: int, rank: int
    ) -> None:
        self.number, self._seed = number, seed
        self.num_read = 0
        self.is_numpy = False
        self.left_out: list[str] = []
        self._peeked: Rows | None = None
        self._others = generators_of(parts)
        with generators_kept(others=self._others):
            begin_pass(parts, self._others, seed, number, rank)
            self._batches = make()
            self._states = GeneratorStates(others=self._others)

    def seed(self, rank: int) -> None:
        """Seed what the data draw from here on as a rank's own."""
        with generators_kept(others=self._others):
            begin_pass([], self._others, self._seed, self.number, rank)
            self._states = GeneratorStates(others=self._others)

    def peek(self) -> Rows | None:
        """Return the first batch, which stays the next one; None: there is none."""
        self._peeked = self.read()
        if self._peeked is not None:
            self.num_read -= 1
        return self._peeked

    def read(self, own: Callable[[Tensor], Tensor] = torch.clone) -> Rows | None:
        """Return a copy of the next batch, made by `own`; None: there is none left."""
        if self._peeked is not None:
            self.num_read += 1
            rows, self._peeked = self._peeked, None
            return rows
        with generators_kept(others=self._others):
            self._states.restore()
            try:
                for given in self._batches:
                    rows = as_batch(given)
                    if num_rows(rows.inputs):
                        self.left_out = self.left_out if self.num_read else left_out(given)
                        self.num_read += 1
                        self.is_numpy = not holds_tensors(given)
                        return rows.mapped(own)  # the data may give the same memory again, and a model may change it
                return None
            finally:
                self._states = GeneratorStates(others=self._others)
