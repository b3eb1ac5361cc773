"""Check on a few rows whether a loss is a mean: otherwise ranks and micro-batches would be weighted wrongly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.structure import OpaqueBatch, leaves, map_tree, tensors
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.num_items import ARGUMENT, find_rule, may_take_items, names_items, usual_rule
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.training.model.forward import ModelCall

COMPARED_ROWS = 8
"""Rows at most whose losses are compared."""
_TOLERANCE = 1e-4
_TOLERANCE_16_BITS = 0.03
_COUNT_TOLERANCE = 1e-5


class WeightCheck:
    """Compares losses of a few rows, in evaluation mode; the loss learns what the model counts."""

    def __init__(self, model: nn.Module, loss: Loss, call: ModelCall, batch: Batch) -> None:
        self._model = model
        self._loss = loss
        self._call = call
        self._together, self._single = batch, list[Batch]()
        if not isinstance(batch.inputs, OpaqueBatch):  # of which no row can be tried alone
            self._together = _picked(batch)
            self._single = [_part(self._together, slice(row, row + 1)) for row in range(self._together.rows)]
        is_full = call.precision.is_full and all(each.dtype.itemsize > 2 for each in model.parameters())
        self._tolerance = _TOLERANCE if is_full else _TOLERANCE_16_BITS

    def problem(self) -> str:
        """Return a warning of how the loss is weighted; "" if it is right, or the model cannot be tried on one row."""
        for find in (self.find_items, self._find_weights):
            with contextlib.suppress(Exception):
                if found := find():
                    return found
        return ""

    def find_items(self) -> str:
        """Find out whether the model divides by num_items_in_batch, and what it counts; return a warning, or ""."""
        loss, batches = self._loss, [self._together, *self._single]
        if loss.used is not None or not self._single:  # a step of the user's own passes what it likes
            return ""
        is_mean = loss.function is None and not loss.weightings and loss.weighting is Weighting.SAMPLES
        if not is_mean or not may_take_items(self._model):
            return ""
        # An error means that **kwargs went where nobody knows the argument.
        total, half = self._value(self._together, 1), self._value(self._together, 2)
        if not math.isfinite(total) or abs(total - half) <= self._tolerance * abs(total):
            return ""
        try:
            totals = [total, *(self._value(each, 1) for each in self._single)]
            means = [self._value(each, None) for each in batches]
        except Exception:  # forward does without the argument, or takes one row, never
            loss.use_num_items(usual_rule(self._together))
            return ""
        pairs = zip(totals, means, strict=True)
        counts = [total / mean if total and math.isfinite(mean) else 0.0 for total, mean in pairs]
        whole = all(abs(count - round(count)) <= 1e-3 + _COUNT_TOLERANCE * count for count in counts)
        found = find_rule(batches, [round(count) for count in counts]) if whole else None
        rule = found or usual_rule(self._together)
        loss.use_num_items(rule)
        if found is not None or self._tolerance > _TOLERANCE:
            return ""
        kind = "which is no count of labels or rows that we know" if whole else "which is no whole number"
        passes = "names" if names_items(self._model) else "takes"
        return (
            f"the model {passes} {ARGUMENT}, and its loss with 1 is {counts[0]:g} times the loss without it, {kind}: "
            f"a part of it may not be divided by {ARGUMENT}. It is given the number of {rule.name}. Return (sum, "
            "weight) in the place of the loss to say what counts."
        )

    def _value(self, batch: Batch, items: int | None) -> float:
        output = self._call.with_items(self._model, batch, items)
        return float(self._loss(output, batch).value)

    def _find_weights(self) -> str:
        """Compare the losses of all rows with those of single rows; return a warning, or ""."""
        loss, kinds = self._loss, self._loss.weightings or {"": self._loss.weighting}
        if loss.gathers or len(self._single) < 2 or not (loss.gives_pairs or loss.is_assumed_mean):
            return ""
        together, *single = (_by_name(each) for each in self._losses())
        if loss.gives_pairs:
            for name in (name for name, kind in kinds.items() if kind is Weighting.WEIGHTS):
                if problem := self._compare_pairs(name, together[name], [each[name] for each in single]):
                    return problem
        for name in (name for name, kind in kinds.items() if kind is Weighting.SAMPLES):
            problem = self._compare_means(name, float(together[name].mean), [float(each[name].mean) for each in single])
            if problem:
                return problem
        return ""

    def _losses(self) -> list[BatchLoss]:
        """Return the loss of all rows, and of each; a loss_fn takes one forward if its output has a row for each."""
        batches, output = [self._together, *self._single], self._call.without_graph(self._model, self._together)
        rows = self._together.rows
        has_rows = all(isinstance(part, Tensor) and part.shape[:1] == (rows,) for _, part in leaves(output))
        if self._loss.function is not None and has_rows:
            outputs = [_rows_of(output, slice(row, row + 1)) for row in range(rows)]
        else:
            outputs = [self._call.without_graph(self._model, each) for each in self._single]
        return [self._loss(own, batch) for own, batch in zip([output, *outputs], batches, strict=True)]

    def _compare_pairs(self, name: str, together: BatchLoss, single: Sequence[BatchLoss]) -> str:
        """Warn of (mean, weight) instead of (sum, weight): weights of rows add up, losses do not."""
        total, weight = _pair(together)
        pairs = [pair for pair in map(_pair, single) if pair[1]]
        added = math.fsum(one for one, _ in pairs)
        counted = math.fsum(count for _, count in pairs)
        if not counted or abs(counted - weight) > self._tolerance * weight:
            return ""
        means = (added / len(pairs), math.fsum(one * count for one, count in pairs) / counted)
        size = self._tolerance * abs(total)
        if not min(abs(total - mean) for mean in means) <= size < abs(total - added):
            return ""
        return (
            f"{_described(name)} of {len(single)} rows is ({total:.6g}, {weight:g}), and the sum of their losses "
            f"one by one is {added:.6g}: it is (mean, weight) where fit expects (sum, weight), so fit divides "
            "it by its weight once more: the loss in the history and the steps are too small. Return the sum: "
            "(loss * n, n) for a mean over n, or (loss.sum(), n)."
        )

    def _compare_means(self, name: str, value: float, single: Sequence[float]) -> str:
        """Warn of a loss that is not the mean of the losses of its rows, unless it depends on chance."""
        size = self._tolerance * max(map(abs, (value, *filter(math.isfinite, single))), default=0.0)
        mean = math.fsum(single) / len(single) if all(map(math.isfinite, single)) else math.nan
        if not math.isfinite(value) or abs(value - mean) <= size:
            return ""
        again = self._loss(self._call.without_graph(self._model, self._together), self._together)
        if abs(value - float(_by_name(again)[name].mean)) > size:
            return ""
        rows = len(single)
        own = self._loss.function is None
        is_what = "the sum over rows" if abs(value - mean * rows) <= size * rows else "no mean over rows"
        where, others = "from loss_fn", ""
        if own:
            where = 'in place of the loss (or as {"loss": (sum, weight)})'
        if own and self._loss.used is None:
            others = f", let forward divide the sum by an argument {ARGUMENT}"
            others += ", or give a loss_fn that does it from the outputs"
        return (
            f"{_described(name)} of {rows} rows is {value:.6g}, and the mean of their losses one by one is "
            f"{mean:.6g}: it is {is_what}, such as one over tokens. It is weighted by rows, so the result depends on "
            "the number of ranks and on accumulation_steps, and evaluate depends on its batch size. Return (sum, "
            f"weight) {where}{others}; for a loss that compares rows with each other, see cx.all_gather_with_grad."
        )


def _by_name(loss: BatchLoss) -> dict[str, BatchLoss]:
    return {"": loss, **loss.parts}


def _pair(loss: BatchLoss) -> tuple[float, float]:
    return float(loss.value * loss.sum_factor), float(loss.weight)


def _described(name: str) -> str:
    return f"{name!r}, a loss," if name else "the loss"


def _picked(batch: Batch) -> Batch:
    """Return a few rows with different counts of what may be padding: the most frequent value of a table."""
    tables = [each for each in (*tensors(batch.targets), *tensors(batch.inputs)) if each.dim() > 1 and each.numel()]
    if batch.rows <= COMPARED_ROWS or not tables:
        return _part(batch, slice(0, COMPARED_ROWS))
    flat = tables[0].reshape(batch.rows, -1)
    order = (flat == flat.mode().values.mode().values).sum(1).argsort(stable=True)
    return _part(batch, torch.cat([order[: COMPARED_ROWS // 2], order[-COMPARED_ROWS // 2 :]]))


def _part(batch: Batch, rows: slice | Tensor) -> Batch:
    parts = {name: _rows_of(getattr(batch, name), rows) for name in ("inputs", "targets", "weights")}
    return replace(batch, **parts)


def _rows_of(tree: Any, rows: slice | Tensor) -> Any:
    return map_tree(lambda tensor: tensor[rows].clone(), tree)  # a model or a loss may change it
