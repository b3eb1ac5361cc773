"""What accuracy is: which scores and which classes of a batch are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cyxtrain.data.batches.collate import TARGET_NAMES

# the class number that PyTorch's and Hugging Face's losses ignore by default
NEVER_COUNTED = -100


@dataclass(frozen=True)
class Accuracy:
    """How to find the scores and the right classes in a batch."""

    part: str = ""  # name of the output's part with the scores; "": the output itself
    classes: int = 1  # dimension of the classes in the scores
    is_shifted: bool = False  # whether each score is for the next target, as in causal language models
    is_one_hot: bool = False  # whether targets have the shape of the scores, and the largest is right

    def pair(self, output: Any, target: Any) -> tuple[Tensor, Tensor] | None:
        """Return scores, shape (n, classes, ...), and classes, shape (n, ...); None if one is not a tensor."""
        scores = part_of_output(output, self.part) if self.part else output
        target = labels_in(target)
        if not isinstance(scores, Tensor) or not isinstance(target, Tensor):
            return None
        if self.is_shifted:
            scores = scores[:, :-1]
            target = target[:, 1:]
        if self.classes != 1:
            scores = scores.movedim(self.classes, 1)
        if self.is_one_hot:
            target = target.argmax(1)
        return scores, target


def part_of_output(output: Any, name: str) -> Any:
    """Return a part of a model's output by name, such as "logits", or None."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def labels_in(target: Any) -> Any:
    """Return the target among several that has a target's name, such as "labels"; otherwise all."""
    if isinstance(target, Mapping):
        for name in TARGET_NAMES:
            if name in target:
                return target[name]
    return target


def ignored_class(function: Any, labels: Any, *, is_known: bool, are_all: bool) -> int | None:
    """Return the class number that does not count (the loss's, or -100); None if no target has it.

    `is_known`: the loss is from torch.nn, where some losses ignore no class; `are_all`: no other samples exist.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    if is_known and not isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return None
    number = getattr(function, "ignore_index", NEVER_COUNTED)
    if not isinstance(number, int):
        number = NEVER_COUNTED
    if are_all and not bool(labels.eq(number).any()):
        return None
    return number
