"""Sums of an epoch in float64, and the loss, accuracy and metrics that follow from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cyxtrain.config.settings import require
from cyxtrain.data.batches.structure import Tree
from cyxtrain.environment.accelerator import HostCopy, from_host, may_use_cuda_graphs, own_copy
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.metric import Metrics, mean_of
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.world.world import World

LOSS, WEIGHT, CORRECT, COUNTED = range(4)
# then two more for each number of `Loss.shown`: its sum and its weight
_COLUMNS = 4
# Batches that are added at once: single additions would cost a step more. More would break up the heap: 32 cost a
# convnet up to 12 MiB.
_FOLD_BATCHES = 16

_Number = Tensor | float


class Correct(NamedTuple):
    """Numbers of correct predictions, and of predictions that are counted, in a batch."""

    correct: _Number
    counted: _Number


class MetricSums:
    """The sums of a table of batches: one row for a running epoch, or one row per batch."""

    def __init__(self, rows: int, device: torch.device, loss: Loss, metrics: Metrics) -> None:
        self.metrics = metrics.copy()
        self._sums = torch.zeros(rows, _COLUMNS + 2 * len(loss.shown), dtype=torch.float64, device=device)
        self._loss = loss
        self._may_be_overwritten = may_use_cuda_graphs(device)
        self._pending: list[tuple[int, Tensor, tuple[_Number, ...]]] = []
        self._copies: dict[str, HostCopy] | None = None
        self._latest: dict[str, float] = {}

    def add(self, row: int, loss: BatchLoss, answers: Correct) -> None:
        """Add a batch to a row, without waiting for the device."""
        numbers: tuple[_Number, ...] = (loss.terms, loss.weight, *answers)
        for name in self._loss.shown:
            part = loss.parts[name]
            numbers += (part.value.detach().double() * part.terms, part.weight)
        value = loss.value.detach().to(self._sums.device)
        if self._may_be_overwritten:
            value = own_copy(value)
            numbers = tuple(own_copy(each) if isinstance(each, Tensor) else each for each in numbers)
        self._pending.append((row, value, numbers))
        if len(self._pending) >= _FOLD_BATCHES:
            self._fold()

    def _fold(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        rows, values, numbers = zip(*pending, strict=True)
        table = self._table(numbers)
        table[:, LOSS].mul_(torch.stack(values))  # it held the terms
        for column in (LOSS, *range(_COLUMNS, table.shape[1], 2)):  # 0 / 0 if nothing counts
            table[:, column].masked_fill_(table[:, column + 1] == 0, 0.0)
        if len(self._sums) == 1 and not self._sums.is_cpu:  # index_add_ has no fixed order there
            self._sums[0].add_(table.sum(0))
        else:
            self._sums.index_add_(0, from_host(rows, self._sums.device, torch.int64), table)

    def _table(self, numbers: Sequence[Sequence[_Number]]) -> Tensor:
        """Return numbers, one row per batch, on the device of the sums."""
        if any(isinstance(number, Tensor) for row in numbers for number in row):
            return torch.stack([self._column(column) for column in zip(*numbers, strict=True)], dim=1)
        return from_host(numbers, self._sums.device, torch.float64)

    def _column(self, numbers: Sequence[_Number]) -> Tensor:
        device, dtype = self._sums.device, torch.float64
        if not any(isinstance(number, Tensor) for number in numbers):
            return from_host(numbers, device, dtype)
        each = [n if isinstance(n, Tensor) else torch.full((), n, dtype=dtype, device=device) for n in numbers]
        if all(number.device == device and number.dtype is each[0].dtype for number in each):
            return torch.stack(each).to(dtype)
        return torch.stack([number.to(device, dtype, non_blocking=number.is_cpu) for number in each])

    @property
    def shown(self) -> list[str]:
        """The names of the numbers that the table has besides loss and accuracy."""
        return [*self._loss.shown]

    def restore(self, row: Sequence[float], names: Sequence[str] | None, logged: list[dict[str, Any]]) -> None:
        """Start with an earlier row of numbers with these names; None: of the same.

        Numbers keep their names: those that are new here are moved from what was `logged` before, others to it.
        """
        names, shown = self.shown if names is None else names, self.shown
        require(
            len(row) == _COLUMNS + 2 * len(names) and (names == shown or not self._loss.weightings),
            f"it has the sums of other losses or numbers ({', '.join(names) or 'none'}) than this program "
            f"({', '.join(shown) or 'none'}): return the same, or resume from the end of an epoch.",
        )
        sums = {name: [*row[_COLUMNS + 2 * k : _COLUMNS + 2 * k + 2]] for k, name in enumerate(names)}
        logged += [{name: ["mean", None, own]} for name, own in sums.items() if name not in shown]
        for state in logged:
            for name in state.keys() & {*shown}:
                before, late = sums.get(name, (0.0, 0.0)), state.pop(name)[2]
                sums[name] = [one + other for one, other in zip(before, late, strict=True)]
        numbers = [*row[:_COLUMNS], *(each for name in shown for each in sums.get(name, (0.0, 0.0)))]
        self._sums[0] = torch.tensor(numbers, dtype=torch.float64, device="cpu")

    @property
    def table(self) -> Tensor:
        """The sums so far, shape (rows, 4 + ...), float64, on the CPU; waits for the device."""
        self._fold()
        return self._sums.cpu()

    def over_ranks(self, world: World) -> dict[str, float]:
        """Return loss, accuracy and metrics over the ranks of a world; collective."""
        # The table is added over ranks element by element, then exactly over its rows: if each row was filled by one
        # rank, the result has the same bits on any number of ranks.
        table = world.reduce(self.table.clone())
        return _measured(exact_sums(table), self._loss) | self.metrics.over_ranks(world)

    def lazy_values(self) -> dict[str, Callable[[], float]]:
        """Return functions that calculate loss, accuracy (if there is one) and each metric of this rank."""
        measured = _measured(exact_sums(self.table), self._loss)
        found = {name: value for name, value in measured.items() if name != "accuracy" or not math.isnan(value)}
        return {name: functools.partial(float, value) for name, value in found.items()} | self.metrics.lazy_values()

    def cheap_values(self) -> dict[str, float]:
        """Return this rank's loss, accuracy and means; of an accelerator, those at the call before, without waiting."""
        self._fold()
        tables = {"": self._sums, **self.metrics.cheap_sums()}
        if self._sums.is_cpu:
            return self._cheap(tables)
        copies, self._copies = self._copies, None
        if copies is not None and not all(copy.is_there() for copy in copies.values()):
            self._copies = copies
            return self._latest
        if copies is not None:
            self._latest = self._cheap({name: copy.read() for name, copy in copies.items()})
        self._copies = {name: HostCopy(table) for name, table in tables.items()}
        return self._latest

    def _cheap(self, tables: Mapping[str, Tensor]) -> dict[str, float]:
        own, *means = tables.items()
        return _measured(exact_sums(own[1]), self._loss) | {name: mean_of(sums) for name, sums in means}


def exact_sums(table: Tensor) -> list[float]:
    """Return the sum of each column, rounded once; NaN and infinities stay."""
    columns = table.T.tolist()
    # fsum raises on opposite infinities, and diverging training must show its numbers.
    return [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in columns]


def _measured(sums: list[float], loss: Loss) -> dict[str, float]:
    """Return the loss, the accuracy (if targets are classes; NaN if none counted) and a loss's other numbers."""
    total = sums[LOSS] if loss.weighting is Weighting.NOTHING else _quotient(sums[LOSS], sums[WEIGHT])
    shown = {}
    for column, name in enumerate(loss.shown):
        part, weight = sums[_COLUMNS + 2 * column : _COLUMNS + 2 * column + 2]
        shown[name] = part if loss.weightings.get(name) is Weighting.NOTHING else _quotient(part, weight)
    if loss.weightings:
        total = loss.combined(shown)
    accuracy = {} if loss.accuracy is None else {"accuracy": _quotient(sums[CORRECT], sums[COUNTED])}
    return {"loss": total, **accuracy, **shown}


def _quotient(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def correct_of(output: Any, target: Tree | None, loss: Loss) -> Correct:
    """Return the correct predictions in an output; none if targets are not classes."""
    found = predicted_classes(output, target, loss)
    if found is None:
        return Correct(0, 0)
    predicted, classes, _ = found
    right = predicted == classes
    if loss.is_binary or loss.ignored is None:
        return Correct(right.sum(), classes.numel())
    valid = classes != loss.ignored
    return Correct((right & valid).sum(), valid.sum())


def predicted_classes(output: Any, target: Tree | None, loss: Loss) -> tuple[Tensor, Tensor, int] | None:
    """Return the predicted classes, the right ones and their number; None if targets are not classes."""
    pair = None if loss.accuracy is None else loss.accuracy.pair(output, target)
    if pair is None:
        return None
    scores, classes = pair
    if loss.is_binary:
        return scores.reshape(classes.shape) > loss.threshold, classes > 0.5, 2
    return scores.argmax(1), classes, scores.shape[1]
