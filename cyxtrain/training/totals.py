"""Sums of an epoch, in float64, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.training.loss import BatchLoss, Loss, Weighting

LOSS, WEIGHT, CORRECT, COUNTED = range(4)
_COLUMNS = 4
_FOLD_BATCHES = 256
"""Batches whose numbers are kept until they are added in one go: single additions would cost a step more."""

_Number = Tensor | float


class Totals:
    """The sums of a table of batches: one row for a running epoch, or one row per batch.

    Args:
        rows: Of the table.
        device: Where the model computes: nothing is fetched from there before it is asked for.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._sums = torch.zeros(rows, _COLUMNS, dtype=torch.float64, device=device)
        self._pending: list[tuple[int, tuple[_Number, ...]]] = []

    def add(self, row: int, loss: BatchLoss, correct: Tensor | None, counted: _Number) -> None:
        """Adds a batch to a row, without waiting for the device."""
        right = 0 if correct is None else correct
        numbers = (loss.value.detach(), loss.terms, loss.weight, right, counted)
        self._pending.append((row, numbers))
        if len(self._pending) >= _FOLD_BATCHES:
            self._fold()

    def _fold(self) -> None:
        if not self._pending:
            return
        rows, numbers = zip(*self._pending, strict=True)
        self._pending.clear()
        values, terms, *others = (self._column(column) for column in zip(*numbers, strict=True))
        where = torch.tensor(rows, device=self._sums.device)
        self._sums.index_add_(0, where, torch.stack([values * terms, *others], dim=1))

    def _column(self, numbers: Sequence[_Number]) -> Tensor:
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if not tensors:
            return torch.tensor(numbers, dtype=torch.float64, device=self._sums.device)
        if len(tensors) < len(numbers):
            tensors = [torch.as_tensor(number, dtype=torch.float64, device=self._sums.device) for number in numbers]
        return torch.stack(tensors).double()

    def go_on_from(self, table: Sequence[Sequence[float]]) -> None:
        """Begins with the sums of an earlier table, of the same shape; none: with zeros."""
        if table:
            earlier = torch.tensor(table, dtype=torch.float64, device=self._sums.device)
            self._sums.copy_(earlier.reshape(self._sums.shape))

    @property
    def table(self) -> Tensor:
        """The sums so far, shape (rows, 4), float64, on the CPU: this waits for the device."""
        self._fold()
        return self._sums.cpu()

    def over_ranks(self, group: Any) -> list[float]:
        """Returns the sums over all rows and ranks: the same on every rank.

        The table is added up over ranks element by element, then exactly over its rows: where each row was
        filled by one rank, the result does not depend on how many there are, not in one bit.
        """
        table = self.table.clone()
        dist.all_reduce(table, group=group)
        return exact_sums(table)

    def here(self) -> list[float]:
        """Returns the sums over this rank's rows."""
        return exact_sums(self.table)


def exact_sums(table: Tensor) -> list[float]:
    """Returns the sum of each column, rounded once; what is not finite stays so."""
    columns = table.T.tolist()
    # fsum raises where infinities meet, and training that diverges shall say so in numbers.
    return [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in columns]


def loss_and_accuracy(sums: list[float], weighting: Weighting) -> tuple[float, float]:
    """Returns (loss, accuracy); accuracy is NaN where no target was a class."""
    divisor = 1.0 if weighting is Weighting.NOTHING else sums[WEIGHT]
    loss = sums[LOSS] / divisor if divisor else math.nan
    return loss, sums[CORRECT] / sums[COUNTED] if sums[COUNTED] else math.nan


def count_correct(output: Any, target: Tensor | None, loss: Loss) -> tuple[Tensor | None, _Number]:
    """Returns (how many are right, of how many), where targets are classes; else (None, 0).

    Class numbers of shape (n, ...) go with scores of shape (n, classes, ...); binary targets with one output each.
    """
    if target is None or not isinstance(output, Tensor):
        return None, 0
    if loss.is_binary:
        return ((output > loss.threshold) == (target > 0.5)).sum(), target.numel()
    if target.is_floating_point() or target.is_complex() or output.dim() != target.dim() + 1 or output.shape[1] < 2:
        return None, 0
    right = output.argmax(1) == target
    if loss.ignored is not None:
        valid = target != loss.ignored
        return (right & valid).sum(), valid.sum()
    return right.sum(), target.numel()
