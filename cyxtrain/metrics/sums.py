"""Sums of an epoch, in float64, and what they come to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.data.batches.structure import Tree
from cyxtrain.environment.accelerator import HostCopy, from_host, may_use_cuda_graphs, own_copy
from cyxtrain.metrics.loss import BatchLoss, Loss, Weighting
from cyxtrain.metrics.metric import Metrics, mean_of

LOSS, WEIGHT, CORRECT, COUNTED = range(4)
_COLUMNS = 4
"""Then, for each number of `Loss.shown`, two more: its sum and its weight."""
_FOLD_BATCHES = 16
"""Batches whose numbers are kept until they are added in one go: single additions would cost a step more. Of many,
what is kept lies between what models allocate and free, and breaks up the heap: 32 cost a convnet up to 12 MiB."""

_KEPT_ELEMENTS = 8192
"""Elements of an output that is kept until then: looking at it at once would take as long as the loss does."""

_Number = Tensor | float


class Correct(NamedTuple):
    """What a model has said to a batch whose targets are classes: counted, or to be counted.

    Attributes:
        correct: How many are right, of what has been looked at.
        counted: How many answers count.
        output: What is still to be looked at, or None.
        target: Beside it.
    """

    correct: _Number
    counted: _Number
    output: Tensor | None = None
    target: Tensor | None = None


class MetricSums:
    """The sums of a table of batches: one row for a running epoch, or one row per batch.

    Args:
        rows: Of the table.
        device: Where the model computes: nothing is fetched from there before it is asked for.
        loss: What it says of targets decides what counts.
        metrics: What else is measured; others of their kind are.
    """

    def __init__(self, rows: int, device: torch.device, loss: Loss, metrics: Metrics) -> None:
        self.metrics = metrics.copy()
        self._sums = torch.zeros(rows, _COLUMNS + 2 * len(loss.shown), dtype=torch.float64, device=device)
        self._loss = loss
        self._may_be_overwritten = may_use_cuda_graphs(device)
        self._pending: list[tuple[int, Tensor, tuple[_Number, ...], Correct]] = []
        self._copies: dict[str, HostCopy] | None = None
        self._latest: dict[str, float] = {}

    def add(self, row: int, loss: BatchLoss, answers: Correct) -> None:
        """Adds a batch to a row, without waiting for the device."""
        numbers: tuple[_Number, ...] = (loss.terms, loss.weight, answers.correct, answers.counted)
        for name in self._loss.shown:
            part = loss.parts[name]
            numbers += (part.value.detach().double() * part.terms, part.weight)
        value = loss.value.detach()
        if self._may_be_overwritten:
            value, numbers, answers = own_copy(value), _copied(numbers), Correct(*_copied(answers))
        self._pending.append((row, value, numbers, answers))
        if len(self._pending) >= _FOLD_BATCHES:
            self._fold()

    def _fold(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        rows, values, numbers, answers = zip(*pending, strict=True)
        table = self._table(numbers)
        table[:, LOSS].mul_(torch.stack(values))  # what was there is the terms
        for column in (LOSS, *range(_COLUMNS, table.shape[1], 2)):  # where nothing counts, it may be 0 / 0
            table[:, column].masked_fill_(table[:, column + 1] == 0, 0.0)
        if len(self._sums) == 1 and not self._sums.is_cpu:  # additions by row number come in any order there
            self._sums[0].add_(table.sum(0))
        else:
            self._sums.index_add_(0, from_host(rows, self._sums.device, torch.int64), table)
        kinds: dict[tuple[torch.Size, torch.Size], list[tuple[int, Tensor, Tensor]]] = {}
        for row, each in zip(rows, answers, strict=True):
            if each.output is not None and each.target is not None:
                kind = each.output.shape[1:], each.target.shape[1:]
                kinds.setdefault(kind, []).append((row, each.output, each.target))
        for kept in kinds.values():
            self._count(kept)

    def _count(self, kept: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Counts the answers of batches of one shape in one go."""
        rows, outputs, targets = zip(*kept, strict=True)
        right, valid = _compare(torch.cat(outputs), torch.cat(targets), self._loss)
        found = {CORRECT: right} if valid is None else {CORRECT: right, COUNTED: valid}
        if len(self._sums) == 1:  # a running epoch, where it is in the way of the steps; whole numbers have no order
            for column, each in found.items():
                self._sums[0, column].add_(each.sum())
            return
        numbers = from_host([rows, [len(output) for output in outputs]], right.device, torch.int64)
        where = torch.repeat_interleave(*numbers, output_size=len(right))
        for column, each in found.items():
            self._sums[:, column].index_add_(0, where, each.reshape(len(where), -1).sum(1, dtype=torch.float64))

    def _table(self, numbers: Sequence[Sequence[_Number]]) -> Tensor:
        """Returns numbers, a row for each batch, beside the sums."""
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

    def over_ranks(self, group: Any) -> dict[str, float]:
        """Returns loss, accuracy and metrics over all ranks, the same on each; all call it."""
        return _measured(self.sums_over_ranks(group), self._loss) | self.metrics.over_ranks()

    def here(self) -> dict[str, float]:
        """Returns loss, accuracy and metrics of what this rank has seen."""
        return _measured(exact_sums(self.table), self._loss) | self.metrics.here()

    def lazily(self) -> dict[str, Callable[[], float]]:
        """Returns what gives loss, accuracy (where there is one) and each metric of what this rank has seen."""
        measured = _measured(exact_sums(self.table), self._loss)
        found = {name: value for name, value in measured.items() if name != "accuracy" or not math.isnan(value)}
        return {name: functools.partial(float, value) for name, value in found.items()} | self.metrics.lazily()

    def cheap_here(self) -> dict[str, float]:
        """Returns what costs little of it: loss, accuracy and means.

        On an accelerator, which is not waited for, as it was when this was called before; nothing at first.
        """
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

    def sums_over_ranks(self, group: Any) -> list[float]:
        """Returns the sums over all rows and ranks: the same on every rank.

        The table is added up over ranks element by element, then exactly over its rows: where each row was
        filled by one rank, the result does not depend on how many there are, not in one bit.
        """
        table = self.table.clone()
        dist.all_reduce(table, group=group)
        return exact_sums(table)


def _copied(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns values of which no later step overwrites any."""
    return tuple(own_copy(value) if isinstance(value, Tensor) else value for value in values)


def exact_sums(table: Tensor) -> list[float]:
    """Returns the sum of each column, rounded once; what is not finite stays so."""
    columns = table.T.tolist()
    # fsum raises where infinities meet, and training that diverges shall say so in numbers.
    return [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in columns]


def _measured(sums: list[float], loss: Loss) -> dict[str, float]:
    """Returns the loss, accuracy (where targets are classes; NaN where none counted) and a loss's other numbers."""
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
    """Returns what is right in an output, where targets are classes; else nothing, of nothing."""
    pair = None if loss.accuracy is None else loss.accuracy.pair(output, target)
    if pair is None:
        return Correct(0, 0)
    scores, classes = pair
    if loss.is_binary:
        scores = scores.reshape(classes.shape)
    if scores.numel() <= _KEPT_ELEMENTS and len(scores) > 0:
        return Correct(0, classes.numel() if loss.ignored is None else 0, scores.detach(), classes)
    right, valid = _compare(scores, classes, loss)
    return Correct(right.sum(), classes.numel() if valid is None else valid.sum())


def _compare(output: Tensor, target: Tensor, loss: Loss) -> tuple[Tensor, Tensor | None]:
    """Returns (which are right, which count), of the targets' shape; None: all count."""
    if loss.is_binary:
        return (output > loss.threshold) == (target > 0.5), None
    right = output.argmax(1) == target
    if loss.ignored is None:
        return right, None
    valid = target != loss.ignored
    return right & valid, valid
