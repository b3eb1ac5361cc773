"""The search for what accuracy is, in the dry run: from an output, its targets and their loss."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cyxtrain.errors import ConfigError
from cyxtrain.metrics.accuracy import NEVER_COUNTED, Accuracy, labels_in, part_of_output
from cyxtrain.metrics.loss import Loss

_LOGITS = "logits"
# Relative difference within which a loss counts as the cross-entropy; a new model's loss is within a hundredth of
# ln(classes) in every layout. In 16 bits, the step from 1 to the next number.
_ROUNDING = 1e-5
# Losses below this are compared as if they were this large.
_SMALL = 0.1


def find_accuracy(loss: Loss, output: Any, target: Any, value: Tensor, *, asked: bool) -> Accuracy | None:
    """Return what accuracy is, or None if targets are not classes."""
    found: Accuracy | str
    if loss.by_output:
        found = "there are several losses, so give it by output name: metrics={'a': ['accuracy']}"
    else:
        found = _accuracy_or_reason(loss, output, labels_in(target), value / (loss.factor or 1.0), asked=asked)
    if isinstance(found, Accuracy):
        return found
    if asked:
        raise ConfigError(
            f"metrics=['accuracy']: {found}. Pass a function of (output, target) that returns a number per sample; you "
            "may call it accuracy."
        )
    return None


def _accuracy_or_reason(loss: Loss, output: Any, target: Any, value: Tensor, *, asked: bool) -> Accuracy | str:
    """Return what accuracy is, or the reason why it cannot be found."""
    part = ""
    scores = output
    if not isinstance(output, Tensor):
        part = _LOGITS
        scores = part_of_output(output, part)
    if not isinstance(scores, Tensor):
        return "the model's output is neither a tensor nor has 'logits'"
    if target is None:
        return "the data have no targets"
    if not isinstance(target, Tensor):
        return "there are several targets"
    if loss.is_binary:
        if scores.numel() != target.numel():
            return "output and target have different shapes"
        return Accuracy(part)
    if not _may_be_classes(target, scores):
        if asked and _is_one_hot(scores, target, loss):
            return Accuracy(part, is_one_hot=True)
        return "the targets are numbers, neither classes nor one-hot"
    found = _layout_or_reason(loss, output, scores, target, value)
    if isinstance(found, Accuracy):
        return replace(found, part=part)
    return found


def _layout_or_reason(loss: Loss, output: Any, scores: Tensor, target: Tensor, value: Tensor) -> Accuracy | str:
    """Return which score is for which class number, or the reason why it cannot be found."""
    if loss.is_known:
        if not _fits(scores, target, 1):
            return "the model does not return a score for each class"
        return Accuracy()
    layouts = [Accuracy()]
    if target.dim() > 1:  # otherwise the second dimension of the scores is the last
        layouts += [Accuracy(classes=-1), Accuracy(classes=-1, is_shifted=True)]
    fitting = [layout for layout in layouts if _fits(scores, target, layout.classes)]
    if not fitting:
        return f"scores of shape {list(scores.shape)} do not fit targets of shape {list(target.shape)}"
    if len(fitting) > 1:
        fitting = [
            layout
            for layout in fitting
            if _explains(value, loss, layout, scores, target) and _counts_all(loss, layout, output, scores, target)
        ]
    if len(fitting) != 1:
        return "the loss is not a plain cross-entropy, and does not show which score is for which target"
    return fitting[0]


def _may_be_classes(target: Tensor, scores: Tensor) -> bool:
    return not target.is_floating_point() and not target.is_complex() and scores.shape != target.shape


def _fits(scores: Tensor, target: Tensor, dim: int) -> bool:
    if scores.dim() != target.dim() + 1 or scores.shape[dim] < 2:
        return False
    return scores.movedim(dim, 1).shape[2:] == target.shape[1:] and len(scores) == len(target)


def _explains(value: Tensor, loss: Loss, layout: Accuracy, scores: Tensor, target: Tensor) -> bool:
    """Return whether a loss is the mean or the sum of the cross-entropy of these scores and targets."""
    pair = layout.pair(scores.detach().float(), target)
    assert pair is not None
    ignored = NEVER_COUNTED if loss.ignored is None else loss.ignored
    try:
        expected = [functional.cross_entropy(*pair, ignore_index=ignored, reduction=each) for each in ("mean", "sum")]
    except (IndexError, RuntimeError):  # a target out of range
        return False
    rounding = _ROUNDING
    if value.dtype.itemsize == 2:
        rounding = torch.finfo(value.dtype).eps
    found = float(value)
    return any(abs(float(each) - found) <= rounding * max(abs(found), _SMALL) for each in expected)


def _counts_all(loss: Loss, layout: Accuracy, output: Any, scores: Tensor, target: Tensor) -> bool:
    """Return whether the loss is this cross-entropy for other classes too: it may ignore one."""
    if loss.function is None:
        return True
    steps = torch.arange(target.numel(), device=target.device)
    classes = torch.where(steps % 2 == 0, steps // 2, -1 - steps // 2) % scores.shape[layout.classes]
    # 0, the last, 1, and so on, from the end, which a shift keeps.
    other = classes.flip(0).reshape(target.shape).to(target.dtype)
    with torch.no_grad(), contextlib.suppress(Exception):  # it may take several targets
        result = loss.function(output, other)
        value = result[0] if isinstance(result, tuple) else result.mean()
        return _explains(value, loss, layout, scores, other)
    return True


def _is_one_hot(scores: Tensor, target: Tensor, loss: Loss) -> bool:
    if scores.shape != target.shape or target.dim() < 2 or target.shape[1] < 2 or target.is_complex():
        return False
    if isinstance(loss.function, nn.CrossEntropyLoss):
        return True  # probabilities
    ones = (target == 1).sum(1)
    zeros = (target == 0).sum(1)
    return bool(((ones == 1) & (zeros == target.shape[1] - 1)).all())
