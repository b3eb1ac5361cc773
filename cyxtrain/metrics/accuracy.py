"""What accuracy is, of a model's outputs and their targets: counted batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cyxtrain.data.batches.collate import TARGET_NAMES

NEVER_COUNTED = -100
"""The class number that PyTorch's and Hugging Face's losses ignore where nothing else is set."""


@dataclass(frozen=True)
class Accuracy:
    """How the scores of classes, and the right ones, are found in a batch.

    Attributes:
        part: Name of the output's part that has the scores; "": the output is the scores.
        classes: Dimension of the scores that the classes are in.
        is_shifted: Whether the score at each place is for the target at the next one, as in causal language models.
        is_one_hot: Whether targets are one-hot, or probabilities, of the scores' shape: the largest is right.
    """

    part: str = ""
    classes: int = 1
    is_shifted: bool = False
    is_one_hot: bool = False

    def pair(self, output: Any, target: Any) -> tuple[Tensor, Tensor] | None:
        """Returns scores, shape (n, classes, ...), and the right classes, shape (n, ...); None: it has none."""
        scores = part_of_output(output, self.part) if self.part else output
        target = labels_in(target)
        if not isinstance(scores, Tensor) or not isinstance(target, Tensor):
            return None
        if self.is_shifted:
            scores, target = scores[:, :-1], target[:, 1:]
        if self.classes != 1:
            scores = scores.movedim(self.classes, 1)
        return scores, target.argmax(1) if self.is_one_hot else target


def part_of_output(output: Any, name: str) -> Any:
    """Returns a part of a model's output by name, such as "logits", or None."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def labels_in(target: Any) -> Any:
    """Returns the one target among several that has a target's name, such as "labels"; else what was given."""
    named = next((name for name in TARGET_NAMES if name in target), None) if isinstance(target, Mapping) else None
    return target if named is None else target[named]


def ignored_class(function: Any, labels: Any, *, is_known: bool, are_all: bool) -> int | None:
    """Returns the class number that does not count: that of the loss, or -100; None: no target has it.

    Args:
        function: The loss.
        labels: Targets of all rows, or of some.
        is_known: Whether it is one of torch.nn, of which not all ignore a class.
        are_all: Whether there are no other rows.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    if is_known and not isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return None
    number = getattr(function, "ignore_index", NEVER_COUNTED)
    number = number if isinstance(number, int) else NEVER_COUNTED
    return number if not are_all or bool(labels.eq(number).any()) else None


def weight_of_classes(function: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> Tensor:
    """Returns what a loss's classes weigh together in a batch, 0-dim; a class that does not count weighs nothing."""
    valid = target != function.ignore_index
    if function.weight is None:
        return valid.sum()
    if target.is_cpu:
        return function.weight[target[valid]].sum()
    # How many a mask lets through, an accelerator would have to be asked.
    of_each = function.weight.take(target.masked_fill(~valid, 0))
    return of_each.masked_fill_(~valid, 0.0).sum()
