"""What accuracy is in a fit, found in the dry run from an output, its targets and their loss."""

from __future__ import annotations

import contextlib
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
    if loss.by_output:
        found, reason = None, "there are several losses, so give it by output name: metrics={'a': ['accuracy']}"
    else:
        found, reason = _found(loss, output, labels_in(target), value / (loss.factor or 1.0), asked=asked)
    if asked and found is None:
        raise ConfigError(
            f"metrics=['accuracy']: {reason}. Pass a function of (output, target) that returns a number per row; you "
            "may call it accuracy."
        )
    return found


def _found(loss: Loss, output: Any, target: Any, value: Tensor, *, asked: bool) -> tuple[Accuracy | None, str]:
    """Return what accuracy is, or None and the reason."""
    part = "" if isinstance(output, Tensor) else _LOGITS
    scores = part_of_output(output, part) if part else output
    if not isinstance(scores, Tensor):
        return None, "the model's output is neither a tensor nor has 'logits'"
    if not isinstance(target, Tensor):
        return None, "the data have no targets" if target is None else "there are several targets"
    if loss.is_binary:
        right = scores.numel() == target.numel()
        return Accuracy(part) if right else None, "output and target have different shapes"
    if target.is_floating_point() or target.is_complex() or scores.shape == target.shape:
        if asked and _is_one_hot(scores, target, loss):
            return Accuracy(part, is_one_hot=True), ""
        return None, "the targets are numbers, neither classes nor one-hot"
    if loss.is_known:
        return (
            Accuracy(part) if _fits(scores, target, 1) else None
        ), "the model does not return a score for each class"
    # (dimension of the classes, whether targets are shifted); of one target per row, the second dimension is the last
    layouts = [(1, False), (-1, False), (-1, True)] if target.dim() > 1 else [(1, False)]
    fitting = [(dim, shift) for dim, shift in layouts if _fits(scores, target, dim)]
    if not fitting:
        return None, f"scores of shape {list(scores.shape)} do not fit targets of shape {list(target.shape)}"
    if len(fitting) > 1:
        fitting = [form for form in fitting if _explains(value, loss, Accuracy("", *form), scores, target)]
        fitting = [form for form in fitting if _counts_all(loss, Accuracy("", *form), output, scores, target)]
    if len(fitting) != 1:
        return None, "the loss is no plain cross-entropy, and does not show which score is for which target"
    return Accuracy(part, *fitting[0]), ""


def _fits(scores: Tensor, target: Tensor, dim: int) -> bool:
    if scores.dim() != target.dim() + 1 or scores.shape[dim] < 2:
        return False
    return scores.movedim(dim, 1).shape[2:] == target.shape[1:] and len(scores) == len(target)


def _explains(value: Tensor, loss: Loss, form: Accuracy, scores: Tensor, target: Tensor) -> bool:
    """Return whether a loss is the cross-entropy of these scores and targets, or their sum."""
    pair = form.pair(scores.detach().float(), target)
    assert pair is not None
    ignored = NEVER_COUNTED if loss.ignored is None else loss.ignored
    found, close = float(value), torch.finfo(value.dtype).eps if value.dtype.itemsize == 2 else _ROUNDING
    try:
        sums = [functional.cross_entropy(*pair, ignore_index=ignored, reduction=each) for each in ("mean", "sum")]
    except (IndexError, RuntimeError):  # a target out of range
        return False
    return any(abs(float(each) - found) <= close * max(abs(found), _SMALL) for each in sums)


def _counts_all(loss: Loss, form: Accuracy, output: Any, scores: Tensor, target: Tensor) -> bool:
    """Return whether the loss is this cross-entropy for other classes too: it may ignore one."""
    if loss.function is None:
        return True
    steps = torch.arange(target.numel(), device=target.device)
    classes = torch.where(steps % 2 == 0, steps // 2, -1 - steps // 2) % scores.shape[form.classes]
    # 0, the last, 1, and so on, from the end, which a shift keeps.
    other = classes.flip(0).reshape(target.shape).to(target.dtype)
    with torch.no_grad(), contextlib.suppress(Exception):  # it may take several targets
        result = loss.function(output, other)
        value = result[0] if isinstance(result, tuple) else result.mean()
        return _explains(value, loss, form, scores, other)
    return True


def _is_one_hot(scores: Tensor, target: Tensor, loss: Loss) -> bool:
    if scores.shape != target.shape or target.dim() < 2 or target.shape[1] < 2 or target.is_complex():
        return False
    if isinstance(loss.function, nn.CrossEntropyLoss):
        return True  # probabilities
    ones = (target == 1).sum(1)
    return bool(((ones == 1) & ((target == 0).sum(1) == target.shape[1] - 1)).all())
