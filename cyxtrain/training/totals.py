"""Sums of an epoch, in float64, and what they come to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.training.loss import BatchLoss, Loss, Weighting

LOSS, WEIGHT, CORRECT, COUNTED = range(4)
_COLUMNS = 4


class Totals:
    """The sums of a table of batches: one row for a running epoch, or one row per batch.

    Args:
        rows: Of the table.
        device: Where the model computes: nothing is fetched from there before it is asked for.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._on_device = torch.zeros(rows, _COLUMNS, dtype=torch.float64, device=device)
        self._here = np.zeros((rows, _COLUMNS))

    def add(self, row: int, loss: BatchLoss, correct: Tensor | None, counted: Tensor | int) -> None:
        """Adds a batch to a row, without waiting for the device."""
        self._on_device[row, LOSS].add_(loss.value.detach(), alpha=loss.terms)
        self._add(row, WEIGHT, loss.weight)
        if correct is not None:
            self._add(row, CORRECT, correct)
            self._add(row, COUNTED, counted)

    def _add(self, row: int, column: int, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            self._on_device[row, column].add_(value)
        else:
            self._here[row, column] += value  # plain numbers cost no operation of the device

    @property
    def table(self) -> Tensor:
        """The sums so far, shape (rows, 4), float64, on the CPU: this waits for the device."""
        return self._on_device.cpu() + torch.from_numpy(self._here)

    def over_ranks(self, group: Any) -> list[float]:
        """Returns the sums over all rows and ranks: the same on every rank.

        The table is added up over ranks element by element, then exactly over its rows: where each row was
        filled by one rank, the result does not depend on how many there are, not in one bit.
        """
        table = self.table
        dist.all_reduce(table, group=group)
        return exact_sums(table)

    def here(self) -> list[float]:
        """Returns the sums over this rank's rows."""
        return exact_sums(self.table)


def exact_sums(table: Tensor) -> list[float]:
    """Returns the sum of each column, rounded once."""
    return [math.fsum(column) for column in table.T.tolist()]


def loss_and_accuracy(sums: list[float], weighting: Weighting) -> tuple[float, float]:
    """Returns (loss, accuracy); accuracy is NaN where no target was a class."""
    divisor = 1.0 if weighting is Weighting.NOTHING else sums[WEIGHT]
    loss = sums[LOSS] / divisor if divisor else math.nan
    return loss, sums[CORRECT] / sums[COUNTED] if sums[COUNTED] else math.nan


def count_correct(output: Any, target: Tensor | None, loss: Loss) -> tuple[Tensor | None, Tensor | int]:
    """Returns (how many are right, of how many), where targets are classes; else (None, 0).

    Class numbers of shape (n, ...) go with scores of shape (n, classes, ...); binary targets with one output each.
    """
    if target is None or not isinstance(output, Tensor):
        return None, 0
    if loss.is_binary:
        return ((output > loss.threshold) == (target > 0.5)).sum(), target.numel()
    if target.is_floating_point() or target.is_complex() or output.dim() != target.dim() + 1:
        return None, 0
    right = output.argmax(1) == target
    ignored = getattr(loss.function, "ignore_index", None)
    if loss.weighting is Weighting.TERMS and ignored is not None:
        valid = target != ignored
        return (right & valid).sum(), valid.sum()
    return right.sum(), target.numel()
