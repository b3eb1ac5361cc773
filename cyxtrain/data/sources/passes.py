"""Once through data that give batches one after the other."""

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
    """The data, gone through once, with generators of its own.

    Args:
        make: Begins.
        parts: Of the data: with generators of their own, or told the number of the pass.
        seed: Of the run.
        number: Of the pass.
        rank: Whose random numbers these are: 0 where all ranks have the same data.

    Attributes:
        taken: Batches that were taken; those without rows do not count.
        is_numpy: Whether the latest one was of NumPy arrays.
        left_out: As `Source.left_out`, of the first one.
    """

    def __init__(
        self, make: Callable[[], Iterator[Any]], parts: Sequence[Any], seed: int, number: int, rank: int
    ) -> None:
        self.number, self._seed = number, seed
        self.taken = 0
        self.is_numpy = False
        self.left_out: list[str] = []
        self._looked_at: list[Rows] = []
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

    def look(self) -> Rows | None:
        """Returns the first batch, which stays the next one; None: there is none."""
        first = self.take()
        if first is not None:
            self.taken -= 1
            self._looked_at.append(first)
        return first

    def take(self, own: Callable[[Tensor], Tensor] = torch.clone) -> Rows | None:
        """Returns the next batch, whose memory is its own; None: there is none any more.

        Args:
            own: Copies a tensor.
        """
        if self._looked_at:
            self.taken += 1
            return self._looked_at.pop()
        with generators_kept(others=self._others):
            self._states.bring_back()
            try:
                for given in self._batches:
                    rows = as_batch(given)
                    if num_rows(rows.inputs):
                        self.left_out = self.left_out if self.taken else left_out(given)
                        self.taken += 1
                        self.is_numpy = not holds_tensors(given)
                        return rows.mapped(own)  # who gives it may give it again, and a model may change it
                return None
            finally:
                self._states = GeneratorStates(others=self._others)
