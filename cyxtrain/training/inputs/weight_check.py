"""Check on a few samples whether a loss is a mean: ranks are weighted by samples if it is."""

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
from cyxtrain.metrics.num_items import ARGUMENT, ItemRule, find_rule, may_take_items, names_items, usual_rule
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.training.model.forward import ModelCall

COMPARED_ROWS = 8
"""Rows at most whose losses are compared."""
# Relative; of losses, with a model in 32 and in 16 bits, and of counts.
_TOLERANCE = 1e-4
_TOLERANCE_16_BITS = 0.03
_COUNT_TOLERANCE = 1e-5


class WeightCheck:
    """A comparison of the loss of a few samples with the losses of single samples, in evaluation mode."""

    def __init__(self, model: nn.Module, loss: Loss, call: ModelCall, batch: Batch) -> None:
        self._model = model
        self._loss = loss
        self._call = call
        self._together = batch
        self._single: list[Batch] = []
        if not isinstance(batch.inputs, OpaqueBatch):  # its samples cannot be tried alone
            self._together = _picked(batch)
            self._single = [_part(self._together, slice(row, row + 1)) for row in range(self._together.rows)]
        is_full = call.precision.is_full and all(each.dtype.itemsize > 2 for each in model.parameters())
        self._tolerance = _TOLERANCE if is_full else _TOLERANCE_16_BITS

    def problem(self) -> str:
        """Return a warning that the loss is weighted wrongly; "" if it is right or cannot be compared."""
        for find in (self.find_items, self._find_weights):
            with contextlib.suppress(Exception):  # a model may not take single samples
                found = find()
                if found:
                    return found
        return ""

    def find_items(self) -> str:
        """Find out what a model that divides by num_items_in_batch counts; return a warning, or ""."""
        if not self._may_divide_by_items():
            return ""
        # Raises if forward has **kwargs and passes them to something that does not know the argument.
        total = self._value(self._together, 1)
        half = self._value(self._together, 2)
        # A model that ignores the number, or does not divide by it, returns the same loss for 1 and 2.
        if not math.isfinite(total) or abs(total - half) <= self._tolerance * abs(total):
            return ""
        try:
            totals = [total, *(self._value(each, 1) for each in self._single)]
            means = [self._value(each, None) for each in (self._together, *self._single)]
        except Exception:  # forward requires the argument, or never takes a single sample
            self._loss.use_num_items(usual_rule(self._together))
            return ""
        return self._use_rule([_ratio(total, mean) for total, mean in zip(totals, means, strict=True)])

    def _use_rule(self, counts: Sequence[float]) -> str:
        """Let the loss count items by the rule that gives these counts; return a warning if none does, or ""."""
        found: ItemRule | None = None
        kind = "which is not a whole number"
        if all(abs(count - round(count)) <= 1e-3 + _COUNT_TOLERANCE * count for count in counts):
            found = find_rule([self._together, *self._single], [round(count) for count in counts])
            kind = "which is not the number of labels or samples"
        rule = found or usual_rule(self._together)
        self._loss.use_num_items(rule)
        if found is not None or self._tolerance > _TOLERANCE:
            return ""
        passes = "names" if names_items(self._model) else "takes"
        return (
            f"the model {passes} {ARGUMENT}, and its loss with 1 is {counts[0]:g} times the loss without it, {kind}: "
            f"a part of it may not be divided by {ARGUMENT}. It is given the number of {rule.name}. Return (sum, "
            "weight) in place of the loss to define what counts."
        )

    def _may_divide_by_items(self) -> bool:
        loss = self._loss
        if loss.used is not None or not self._single:  # a step of the user's own passes what it likes
            return False
        is_mean = loss.function is None and not loss.weightings and loss.weighting is Weighting.SAMPLES
        return is_mean and may_take_items(self._model)

    def _value(self, batch: Batch, items: int | None) -> float:
        output = self._call.with_items(self._model, batch, items)
        return float(self._loss(output, batch).value)

    def _find_weights(self) -> str:
        """Compare the losses of all samples with those of single samples; return a warning, or ""."""
        kinds = self._loss.weightings or {"": self._loss.weighting}
        if not self._may_compare_rows():
            return ""
        losses = self._losses()
        comparisons = {Weighting.WEIGHTS: self._compare_pairs, Weighting.SAMPLES: self._compare_means}
        if not self._loss.gives_pairs:
            del comparisons[Weighting.WEIGHTS]
        for kind, compare in comparisons.items():
            for name in (name for name, own in kinds.items() if own is kind):
                together, *single = (loss[name] for loss in losses)
                problem = compare(name, together, single)
                if problem:
                    return problem
        return ""

    def _may_compare_rows(self) -> bool:
        if self._loss.gathers or len(self._single) < 2:  # a loss that gathers rows compares them with each other
            return False
        return self._loss.gives_pairs or self._loss.is_assumed_mean

    def _losses(self) -> list[dict[str, BatchLoss]]:
        """Return the losses of all samples and of each, by name; by one forward if the output has samples."""
        batches = [self._together, *self._single]
        output = self._call.without_graph(self._model, self._together)
        rows = self._together.rows
        has_rows = all(isinstance(part, Tensor) and part.shape[:1] == (rows,) for _, part in leaves(output))
        if self._loss.function is not None and has_rows:
            outputs = [_rows_of(output, slice(row, row + 1)) for row in range(rows)]
        else:
            outputs = [self._call.without_graph(self._model, each) for each in self._single]
        pairs = zip([output, *outputs], batches, strict=True)
        return [_by_name(self._loss(own, batch)) for own, batch in pairs]

    def _compare_pairs(self, name: str, together: BatchLoss, single: Sequence[BatchLoss]) -> str:
        """Warn of (mean, weight) instead of (sum, weight): weights of samples add up, losses do not."""
        total, weight = _pair(together)
        pairs = [(one, count) for one, count in map(_pair, single) if count]
        added = math.fsum(one for one, _ in pairs)
        counted = math.fsum(count for _, count in pairs)
        if not counted or abs(counted - weight) > self._tolerance * weight:
            return ""
        means = (added / len(pairs), math.fsum(one * count for one, count in pairs) / counted)
        size = self._tolerance * abs(total)
        if not min(abs(total - mean) for mean in means) <= size < abs(total - added):
            return ""
        return (
            f"{_described(name)} of {len(single)} samples is ({total:.6g}, {weight:g}), and the sum of their losses "
            f"one by one is {added:.6g}: it is (mean, weight) where fit expects (sum, weight), so fit divides "
            "it by its weight once more: the loss in the history and the steps are too small. Return the sum: "
            "(loss * n, n) for a mean over n, or (loss.sum(), n)."
        )

    def _compare_means(self, name: str, together: BatchLoss, single: Sequence[BatchLoss]) -> str:
        """Warn of a loss that is not the mean of the losses of its samples, unless it depends on chance."""
        value = float(together.mean)
        values = [float(loss.mean) for loss in single]
        finite = [each for each in values if math.isfinite(each)]
        rows = len(values)
        mean = math.nan
        if len(finite) == rows:
            mean = math.fsum(values) / rows
        size = self._tolerance * max(map(abs, (value, *finite)))
        if not math.isfinite(value) or abs(value - mean) <= size:
            return ""
        # A loss that depends on chance differs from itself, and cannot be judged.
        again = self._loss(self._call.without_graph(self._model, self._together), self._together)
        if abs(value - float(_by_name(again)[name].mean)) > size:
            return ""
        kind = "not a mean over samples"
        if abs(value - mean * rows) <= size * rows:
            kind = "the sum over samples"
        remedy = "from loss_fn"
        if self._loss.function is None:
            remedy = 'in place of the loss (or as {"loss": (sum, weight)})'
            if self._loss.used is None:
                remedy += f", let forward divide the sum by an argument {ARGUMENT}"
                remedy += ", or give a loss_fn that does it from the outputs"
        return (
            f"{_described(name)} of {rows} samples is {value:.6g}, and the mean of their losses one by one is "
            f"{mean:.6g}: it is {kind}, such as one over tokens. It is weighted by samples, so the result depends on "
            "the number of ranks and on accumulation_steps, and evaluate depends on its batch size. Return (sum, "
            f"weight) {remedy}; for a loss that compares samples with each other, see cx.all_gather_with_grad."
        )


def _ratio(total: float, mean: float) -> float:
    """Return how many items a loss counts: its value with one item by its mean; 0 if unknown."""
    if not total or not math.isfinite(mean):
        return 0.0
    return total / mean


def _by_name(loss: BatchLoss) -> dict[str, BatchLoss]:
    return {"": loss, **loss.parts}


def _pair(loss: BatchLoss) -> tuple[float, float]:
    return float(loss.value * loss.sum_factor), float(loss.weight)


def _described(name: str) -> str:
    return f"{name!r}, a loss," if name else "the loss"


def _picked(batch: Batch) -> Batch:
    """Return a few samples with different counts of what may be padding: the most frequent value of a table."""
    tables = [each for each in (*tensors(batch.targets), *tensors(batch.inputs)) if each.dim() > 1 and each.numel()]
    if batch.rows <= COMPARED_ROWS or not tables:
        return _part(batch, slice(0, COMPARED_ROWS))
    flat = tables[0].reshape(batch.rows, -1)
    padding = flat.mode().values.mode().values
    order = (flat == padding).sum(1).argsort(stable=True)
    return _part(batch, torch.cat([order[: COMPARED_ROWS // 2], order[-COMPARED_ROWS // 2 :]]))


def _part(batch: Batch, rows: slice | Tensor) -> Batch:
    inputs = _rows_of(batch.inputs, rows)
    return replace(batch, inputs=inputs, targets=_rows_of(batch.targets, rows), weights=_rows_of(batch.weights, rows))


def _rows_of(tree: Any, rows: slice | Tensor) -> Any:
    return map_tree(lambda tensor: tensor[rows].clone(), tree)  # a model or a loss may change it
