"""The count by which a model divides its loss (`num_items_in_batch`), as Hugging Face's models do.

A model that uses this argument returns the sum of its terms divided by it: the count of all ranks and micro-batches of
a step, needed before the first forward. A rule finds the count in the labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.collate import TARGET_NAMES
from cyxtrain.data.batches.structure import named_tensors

ARGUMENT = "num_items_in_batch"
# labels that losses ignore, the most common first
_IGNORED = (-100, 0, -1)


@dataclass(frozen=True)
class ItemRule:
    """A way to count the items that a loss is a mean over; ranks compare its name."""

    name: str
    count: Callable[[Batch], Tensor | int]  # on an accelerator a tensor there, so that the host does not wait

    def items(self, batch: Batch) -> Tensor | int:
        """Return the model's argument: the step's number if known, or this batch's; at least 1."""
        if batch.items is not None:
            return batch.items
        count = self.count(batch)
        if isinstance(count, Tensor):
            return count.clamp(min=1)
        return max(count, 1)


_ROWS = ItemRule("rows", lambda batch: batch.rows)


def names_items(model: nn.Module) -> bool:
    """Return whether forward has an argument of that name."""
    return ARGUMENT in _kinds(model)


def may_take_items(model: nn.Module) -> bool:
    """Return whether forward accepts the argument, by name or by **kwargs."""
    kinds = _kinds(model)
    return ARGUMENT in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


def _kinds(model: nn.Module) -> dict[str, object]:
    try:
        return {name: each.kind for name, each in inspect.signature(model.forward).parameters.items()}
    except ValueError:  # written in C
        return {}


def usual_rule(batch: Batch) -> ItemRule:
    """Return Hugging Face's rule: count labels that are not -100; rows if there are no labels."""
    first = next(_labels(batch), None)
    if first is None:
        return _ROWS
    name, _ = first
    return _of_labels(name, -100, 0)


def find_rule(batches: Sequence[Batch], counts: Sequence[int]) -> ItemRule | None:
    """Return the first rule that counts in each batch what the model counts, or None."""
    for rule in _rules(batches[0]):
        if [int(rule.count(batch)) for batch in batches] == list(counts):
            return rule
    return None


def rule_named(name: str, batch: Batch) -> ItemRule:
    """Return another rank's rule by name, for batches like this one."""
    return next(rule for rule in _rules(batch) if rule.name == name)


def _rules(batch: Batch) -> list[ItemRule]:
    rules = []
    for ignored in (*_IGNORED, None):
        for name, labels in _labels(batch):
            if labels.dim() > 1:
                rules.append(_of_labels(name, ignored, 1))
            rules.append(_of_labels(name, ignored, 0))
    return [*rules, _ROWS]


def _labels(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of possible labels, the most likely first."""
    inputs = named_tensors(batch.inputs, "X")
    usual = [f"X[{name!r}]" for name in TARGET_NAMES]
    targets = [each for each in inputs if each[0] in usual]
    others = [each for each in inputs if each[0] not in usual]
    for name, tensor in (*named_tensors(batch.targets, "y"), *targets, *others):
        if not tensor.is_floating_point() and not tensor.is_complex():
            yield name, tensor


def _of_labels(name: str, ignored: int | None, first: int) -> ItemRule:
    """Return the rule that counts labels from the place `first` on, except those that are ignored."""

    def count(batch: Batch) -> Tensor | int:
        labels = dict(_labels(batch))[name]
        if first:
            labels = labels[..., first:]
        if ignored is None:
            return labels.numel()
        found = (labels != ignored).sum()
        return int(found) if found.is_cpu else found

    rule = name
    if first:
        rule += "[..., 1:]"
    if ignored is not None:
        rule += f" != {ignored}"
    return ItemRule(rule, count)
