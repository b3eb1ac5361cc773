"""Metrics by name, functions and torchmetrics objects, as a user passes them, turned into `Metrics`.

Metrics by name are calculated as scikit-learn calculates them, with the macro average over classes. torchmetrics
calculates all but means: its top-k accuracy takes 12 times as long per batch as ours, and importing it takes a second.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cyxtrain.config.settings import unknown_name
from cyxtrain.environment.accelerator import remedy_for_devices
from cyxtrain.errors import ConfigError, brief
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.metric import LibraryMetric, MeanMetric, Metric, Metrics

_TOP = re.compile(r"top_([1-9]\d*)$")
ACCURACY = "accuracy"
_BUILT_IN = ("loss", ACCURACY, "acc")

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _Task(NamedTuple):
    """What a model predicts: "binary", "multiclass" or "regression"."""

    kind: str
    num_classes: int
    loss: Loss
    prepare: Prepare  # makes of (output, target) what torchmetrics expects
    num_outputs: int = 1  # numbers per row, in a regression


_OF_CLASSES = {
    "f1": "F1Score",
    "precision": "Precision",
    "recall": "Recall",
    "auc": "AUROC",
    "average_precision": "AveragePrecision",
    "cohen_kappa": "CohenKappa",
    "matthews": "MatthewsCorrCoef",
}
_AVERAGED = ("F1Score", "Precision", "Recall")
_RANKED = ("AUROC", "AveragePrecision")
_OF_NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mae": lambda output, target: (output - target).abs(),
    "mse": lambda output, target: (output - target).square(),
}
_FROM_LIBRARY = {"rmse": ("MeanSquaredError", {"squared": False}), "r2": ("R2Score", {})}
_KNOWN = ["accuracy", *_OF_CLASSES, *_OF_NUMBERS, *_FROM_LIBRARY, "top_5"]


def metrics_by_name(metrics: Any) -> dict[str, Any]:
    """Return a user's metrics (None, one, several, or a dictionary) by name."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        given = [(str(name), each) for name, each in metrics.items()]
    else:
        several = [metrics] if isinstance(metrics, str) or not isinstance(metrics, Sequence) else list(metrics)
        given = [pair for each in several for pair in _named(each)]
    found: dict[str, Any] = {}
    for name, each in given:
        if isinstance(each, type) or not (isinstance(each, str) or callable(each)):
            what = f"the class {each.__name__}: pass an instance" if isinstance(each, type) else brief(each)
            raise ConfigError(
                f"metrics takes names, functions of (output, target) and torchmetrics objects, got {what}."
            )
        if isinstance(each, str) and each not in _KNOWN and each not in _BUILT_IN and not _TOP.match(each):
            raise unknown_name("cyxtrain", each, _KNOWN, "metric")
        if isinstance(each, str) and each in _BUILT_IN:  # torchmetrics' objects compare as equal to anything
            if each == "loss":
                continue
            name, each = ACCURACY, ACCURACY
        elif not isinstance(metrics, Mapping) and not isinstance(each, str) and not _is_library(each):
            name = _free_name(name, found)
        if name.startswith("val_") or name == "loss":
            raise ConfigError(f"the metric {name!r} needs another name: the history uses this one.")
        if name in found:
            raise ConfigError(f"metrics has two named {name!r}: name them, as in metrics={{'mine': ...}}.")
        found[name] = each
    return found


def _free_name(name: str, found: Mapping[str, Any]) -> str:
    """Return a function's name in the history: with a prefix or a number if the name is taken."""
    first = f"metric_{name}" if name == "loss" or name.startswith("val_") else name
    names = itertools.chain([first], (f"{first}_{number}" for number in itertools.count(2)))
    return next(each for each in names if each not in found)


def _named(metric: Any) -> list[tuple[str, Any]]:
    if isinstance(metric, str):
        return [(metric, metric)]
    if isinstance(metric, Mapping):
        return [(str(name), each) for name, each in metric.items()]
    if _is_library(metric):
        parts = getattr(metric, "items", None)  # a MetricCollection
        return list(parts()) if callable(parts) else [(_snake(type(metric).__name__), metric)]
    return [(getattr(metric, "__name__", type(metric).__name__), metric)]


def make_metrics(given: Mapping[str, Any], loss: Loss, output: Any, target: Any, rows: int) -> Metrics:
    """Return metrics that passed a dry run on the outputs and targets of some rows, and are reset."""
    given = {name: each for name, each in given.items() if name != ACCURACY or not isinstance(each, str)}
    if not given:
        return Metrics()
    task = _task_of(loss, output, target)
    made = [_made(name, each, task) for name, each in given.items()]
    for metric in made if output is not None else ():
        try:
            with warnings.catch_warnings():  # in a few rows some classes are missing
                warnings.simplefilter("ignore")
                metric.add(output, target, rows)
                metric.local_value()
        except ConfigError:
            raise
        except Exception as error:
            what = f"the metric {metric.name} cannot take the model's output and y"
            raise ConfigError(f"{what}: {error}{remedy_for_devices(error)}") from error
    return Metrics(made).copy()


def _task_of(loss: Loss, output: Any, target: Any) -> _Task | None:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    if loss.is_binary:
        return _Task("binary", 2, loss, _as_binary(loss)) if output.numel() == len(output) else None
    if not target.is_floating_point() and output.dim() == target.dim() + 1 and output.shape[1] >= 2:
        return _Task("multiclass", output.shape[1], loss, _as_classes(loss))
    return _Task("regression", 0, loss, _as_doubles, math.prod(output.shape[1:]))


def _made(name: str, metric: Any, task: _Task | None) -> Metric:
    if _is_library(metric):
        return LibraryMetric(name, metric)
    if not isinstance(metric, str):
        return MeanMetric(name, metric)
    if task is None:
        raise ConfigError(
            f"the metric {metric!r} needs a model with one output and one y: pass a function of (output, target)."
        )
    top = _TOP.match(metric)
    if top is not None or metric in _OF_CLASSES:
        if task.kind == "regression" or (top is not None and task.kind == "binary"):
            raise ConfigError(f"the metric {metric!r} is for classes, and the targets are not among several classes.")
        return _of_top(name, int(top[1]), task) if top is not None else _of_classes(name, _OF_CLASSES[metric], task)
    if task.kind != "regression":
        raise ConfigError(f"the metric {metric!r} is for numbers, and the targets are classes.")
    if metric in _OF_NUMBERS:
        difference = _OF_NUMBERS[metric]
        return MeanMetric(name, lambda output, target: difference(output.double(), target.double()), False)
    kind, given = _FROM_LIBRARY[metric]
    settings: dict[str, Any] = dict(given)
    if task.num_outputs > 1:
        settings |= {"multioutput": "uniform_average"} if metric == "r2" else {"num_outputs": task.num_outputs}
    from torchmetrics import regression  # takes a second

    metric_class = _averaging(getattr(regression, kind), lambda found, _: found.mean())
    return LibraryMetric(name, metric_class(**settings), task.prepare, joins=True)


def _of_top(name: str, k: int, task: _Task) -> Metric:
    if k > task.num_classes:
        raise ConfigError(f"the metric 'top_{k}' needs at least {k} classes, and the model has {task.num_classes}.")

    def is_among_the_best(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found = (output.topk(k, dim=1).indices == target.unsqueeze(1)).any(1)
        counts = torch.ones_like(found) if task.loss.ignored is None else target != task.loss.ignored
        return (found & counts).sum(), counts.sum()

    return MeanMetric(name, is_among_the_best, larger_is_better=True)


def _of_classes(name: str, kind: str, task: _Task) -> Metric:
    from torchmetrics import classification  # takes a second

    if task.kind == "binary":
        return LibraryMetric(name, getattr(classification, f"Binary{kind}")(), task.prepare, joins=True)
    settings: dict[str, Any] = {"num_classes": task.num_classes, "ignore_index": task.loss.ignored}
    metric_class = getattr(classification, f"Multiclass{kind}")
    if kind in _RANKED:
        metric_class = _averaging(metric_class, _mean_of_ranked)
        settings["average"] = "none"
    elif kind in _AVERAGED:
        settings["average"] = "macro"
    return LibraryMetric(name, metric_class(**settings), task.prepare, joins=True)


def _averaging(metric_class: Any, mean: Callable[[Tensor, Any], Tensor]) -> Any:
    """Return a subclass whose values are averaged to one."""

    def compute(metric: Any) -> Tensor:
        return mean(metric_class.compute(metric), metric)

    return type(metric_class.__name__, (metric_class,), {"compute": compute, "__module__": metric_class.__module__})


def _mean_of_ranked(scores: Tensor, metric: Any) -> Tensor:
    """Return the mean over the classes that have rows, and of which other classes have rows."""
    answers = torch.cat(list(metric.target)) if isinstance(metric.target, list) else metric.target
    answers = answers[answers != metric.ignore_index] if metric.ignore_index is not None else answers
    counts = torch.bincount(answers.reshape(-1), minlength=len(scores))
    known = (counts > 0) & (counts < counts.sum())
    return scores[known].mean()


def _as_classes(loss: Loss) -> Prepare:
    # torchmetrics takes scores between 0 and 1 for probabilities, also if they are logits.
    is_log = isinstance(loss.function, nn.NLLLoss)

    def prepare(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output.double().exp() if is_log else output.double().softmax(1)), target

    return prepare


def _as_binary(loss: Loss) -> Prepare:
    are_logits = isinstance(loss.function, nn.BCEWithLogitsLoss)

    def prepare(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        wide = output.double().reshape(-1)
        return (wide.sigmoid() if are_logits else wide), (target.reshape(-1) > 0.5).long()

    return prepare


def _as_doubles(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.double(), target.double()


def _is_library(metric: Any) -> bool:
    """Return whether a metric is from torchmetrics, without importing it."""
    return any(base.__module__.startswith("torchmetrics.") for base in type(metric).__mro__)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
