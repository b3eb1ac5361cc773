"""Check on a few rows whether a loss is a mean: otherwise ranks and micro-batches would be weighted wrongly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.structure import OpaqueBatch, Tree, map_tree, tensors
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
        self._is_opaque = isinstance(batch.inputs, OpaqueBatch)  # then no row can be tried alone
        # A loss of torch.nn needs no comparison: it is not worth the look for rows that differ.
        picked = batch if self._is_opaque else _picked(batch)
        self._batch = _part(batch, slice(0, COMPARED_ROWS)) if loss.is_known else picked
        is_full = call.precision.is_full and all(each.dtype.itemsize > 2 for each in model.parameters())
        self._tolerance = _TOLERANCE if is_full else _TOLERANCE_16_BITS

    def find_items(self) -> str:
        """Find out whether the model divides by num_items_in_batch, and what it counts; return a warning, or ""."""
        loss, named = self._loss, names_items(self._model)
        if loss.used is not None or self._is_opaque:  # a step of the user's own passes what it likes
            return ""
        if loss.function is not None or loss.weightings or not may_take_items(self._model):
            return ""
        if loss.weighting is not Weighting.SAMPLES or not self._reacts():
            return ""
        try:
            values = [(self._value(each, 1), self._value(each, None)) for each in (self._batch, *self._alone())]
        except Exception:  # forward does without the argument, or takes one row, never
            loss.use_num_items(usual_rule(self._batch))
            return ""
        counts = [total / mean if total and math.isfinite(mean) else 0.0 for total, mean in values]
        whole = all(abs(count - round(count)) <= 1e-3 + _COUNT_TOLERANCE * count for count in counts)
        rule = find_rule([self._batch, *self._alone()], [round(count) for count in counts]) if whole else None
        loss.use_num_items(rule or usual_rule(self._batch))
        if rule is not None or self._tolerance > _TOLERANCE:
            return ""
        assert loss.items is not None
        kind = "which is no count of labels or rows that we know" if whole else "which is no whole number"
        passes = "names" if named else "takes"
        return (
            f"the model {passes} {ARGUMENT}, and its loss with 1 is {counts[0]:g} times the loss without it, {kind}: "
            f"a part of it may not be divided by {ARGUMENT}. It is given the number of {loss.items.name}. Return (sum, "
            "weight) in the place of the loss to say what counts."
        )

    def find_weights(self) -> str:
        """Compare the loss of all rows with the mean of their single losses; return a warning, or ""."""
        loss = self._loss
        if loss.gathers or self._batch.rows < 2 or self._is_opaque:
            return ""
        if loss.gives_pairs and (divided := self._find_mean()):
            return divided
        if not loss.is_assumed_mean:
            return ""
        together, again = self._means(self._batch), self._means(self._batch)
        alone = [self._means(each) for each in self._alone()]
        for name, value in together.items():
            each = [means[name] for means in alone]
            size = self._tolerance * max(map(abs, (value, *filter(math.isfinite, each))), default=0.0)
            if not math.isfinite(value) or abs(value - again[name]) > size:
                continue  # no number, or chance decides
            mean = math.fsum(each) / len(each) if all(map(math.isfinite, each)) else math.nan
            if not abs(value - mean) <= size:
                return self._explain(name, value, mean, is_sum=abs(value - mean * len(each)) <= size * len(each))
        return ""

    def _find_mean(self) -> str:
        """Warn of (mean, weight) instead of (sum, weight): weights of rows add up, losses do not."""
        together, alone = self._pairs(self._batch), [self._pairs(each) for each in self._alone()]
        for name, (total, weight) in together.items():
            each = [pairs[name] for pairs in alone if pairs[name][1]]
            added, counted = math.fsum(one for one, _ in each), math.fsum(count for _, count in each)
            if not counted or abs(counted - weight) > self._tolerance * weight:
                continue
            means = (added / len(each), math.fsum(one * count for one, count in each) / counted)
            size = self._tolerance * abs(total)
            if min(abs(total - mean) for mean in means) <= size < abs(total - added):
                what = f"{name!r}, a loss," if name else "the loss"
                return (
                    f"{what} of {self._batch.rows} rows is ({total:.6g}, {weight:g}), and the sum of their losses "
                    f"one by one is {added:.6g}: it is (mean, weight) where fit expects (sum, weight), so fit divides "
                    "it by its weight once more: the loss in the history and the steps are too small. Return the sum: "
                    "(loss * n, n) for a mean over n, or (loss.sum(), n)."
                )
        return ""

    def _explain(self, name: str, value: float, mean: float, *, is_sum: bool) -> str:
        rows = self._batch.rows
        own = self._loss.function is None
        what = f"{name!r}, a loss," if name else "the loss"
        is_what = "the sum over rows" if is_sum else "no mean over rows"
        where, others = "from loss_fn", ""
        if own:
            where = 'in place of the loss (or as {"loss": (sum, weight)})'
        if own and self._loss.used is None:
            others = f", let forward divide the sum by an argument {ARGUMENT}"
            others += ", or give a loss_fn that does it from the outputs"
        return (
            f"{what} of {rows} rows is {value:.6g}, and the mean of their losses one by one is {mean:.6g}: it is "
            f"{is_what}, such as one over tokens. It is weighted by rows, so the result depends on the number of ranks "
            "and on accumulation_steps, and evaluate depends on its batch size. Return (sum, weight) "
            f"{where}{others}; for a loss that compares rows with each other, see cx.all_gather_with_grad."
        )

    def _reacts(self) -> bool:
        """Return whether the loss depends on num_items_in_batch."""
        try:
            one, two = (self._value(self._batch, items) for items in (1, 2))
        except Exception:  # **kwargs went where nobody knows the argument
            return False
        return math.isfinite(one) and abs(one - two) > self._tolerance * abs(one)

    def _value(self, batch: Batch, items: int | None) -> float:
        output = self._call.with_items(self._model, batch, items)
        return float(self._loss(output, batch).value)

    def _losses(self, batch: Batch, kind: Weighting) -> dict[str, BatchLoss]:
        """Return the losses of that kind by name; "" is an only loss, of any kind."""
        found = self._loss(self._call.without_graph(self._model, batch), batch)
        kinds = self._loss.weightings
        return {name: found.parts[name] for name in kinds if kinds[name] is kind} if kinds else {"": found}

    def _means(self, batch: Batch) -> dict[str, float]:
        return {name: float(part.mean) for name, part in self._losses(batch, Weighting.SAMPLES).items()}

    def _pairs(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return (sum, weight) of each loss that is a weighted mean."""
        parts = self._losses(batch, Weighting.TERMS).items()
        return {name: (float(part.value * part.terms), float(part.weight)) for name, part in parts}

    def _alone(self) -> Iterator[Batch]:
        return (_part(self._batch, slice(row, row + 1)) for row in range(self._batch.rows))


def _picked(batch: Batch) -> Batch:
    """Return a few rows with different counts of what may be padding: the most frequent value of a table."""
    tables = [each for each in (*tensors(batch.targets), *tensors(batch.inputs)) if each.dim() > 1 and each.numel()]
    if batch.rows <= COMPARED_ROWS or not tables:
        return _part(batch, slice(0, COMPARED_ROWS))
    flat = tables[0].reshape(batch.rows, -1)
    order = (flat == flat.mode().values.mode().values).sum(1).argsort(stable=True)
    return _part(batch, torch.cat([order[: COMPARED_ROWS // 2], order[-COMPARED_ROWS // 2 :]]))


def _part(batch: Batch, rows: slice | Tensor) -> Batch:
    def part(tree: Tree | None) -> Any:
        return map_tree(lambda tensor: tensor[rows].clone(), tree)  # a model may change its input

    return replace(batch, inputs=part(batch.inputs), targets=part(batch.targets), weights=part(batch.weights))


def warning_of(check: Callable[[], str]) -> str:
    """Return what a check warns of; "" if the model or the loss cannot be tried, such as on one row."""
    with contextlib.suppress(Exception):
        return check()
    return ""
