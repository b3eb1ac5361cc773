"""Metrics by name, functions and torchmetrics objects, as a user passes them, turned into `Metrics`.

Metrics by name are calculated as scikit-learn calculates them, by default with the macro average over classes.
torchmetrics calculates all but means: its top-k accuracy takes 12 times as long per batch as ours, and importing it
takes a second.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cyxtrain.config.settings import unknown_name
from cyxtrain.data.batches.structure import parts_by_name
from cyxtrain.environment.accelerator import remedy_for_devices
from cyxtrain.errors import ConfigError, brief
from cyxtrain.metrics.accuracy import Accuracy
from cyxtrain.metrics.find_accuracy import find_accuracy
from cyxtrain.metrics.logged import check_free
from cyxtrain.metrics.loss import Loss, naming_output
from cyxtrain.metrics.metric import LibraryMetric, MeanMetric, Metric, Metrics
from cyxtrain.metrics.sums import correct_of
from cyxtrain.metrics.weighting import batch_loss_of
from cyxtrain.metrics.whole_set import WholeSet
from cyxtrain.world.world import World

_TOP = re.compile(r"top_([1-9]\d*)$")
ACCURACY = "accuracy"
_BUILT_IN = ("loss", ACCURACY, "acc")

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _Task(NamedTuple):
    """What a model predicts: "binary", "multiclass", "multilabel" or "regression"."""

    kind: str
    num_classes: int
    loss: Loss
    prepare: Prepare  # makes of (output, target) what torchmetrics expects
    num_outputs: int = 1  # numbers per sample, in a regression


_AVERAGED = {"f1": "F1Score", "precision": "Precision", "recall": "Recall", "specificity": "Specificity"}
_AVERAGED |= {"jaccard": "JaccardIndex"}
_RANKED = {"auc": "AUROC", "average_precision": "AveragePrecision"}
_OF_CLASSES = {**_AVERAGED, **_RANKED, "cohen_kappa": "CohenKappa", "matthews": "MatthewsCorrCoef"}
_OF_CLASSES |= {"calibration_error": "CalibrationError"}
_BY_AVERAGE = {f"{name}_{average}": (name, average) for average in ("macro", "micro", "weighted") for name in _AVERAGED}
_BY_AVERAGE |= {f"{name}_weighted": (name, "weighted") for name in _RANKED}
_BY_AVERAGE |= {f"{name}_per_class": (name, "none") for name in (*_AVERAGED, *_RANKED)}
_OF_NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mae": lambda output, target: (output - target).abs(),
    "mse": lambda output, target: (output - target).square(),
    # As in scikit-learn, a target of 0 divides by the smallest number.
    "mape": lambda output, target: (output - target).abs() / target.abs().clamp_min(torch.finfo(target.dtype).eps),
    "msle": lambda output, target: (output.log1p() - target.log1p()).square(),
}
_FROM_LIBRARY = {"rmse": "MeanSquaredError", "r2": "R2Score", "explained_variance": "ExplainedVariance"}
_CORRELATIONS = ("pearson", "spearman")
_KNOWN = [ACCURACY, "top_5", *_OF_CLASSES, *_BY_AVERAGE, *_OF_NUMBERS, *_FROM_LIBRARY, *_CORRELATIONS]


class NamedMetrics(dict[str, Any]):
    """A user's metrics by name in the history; `outputs` has the output's name of each that is of one output."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, str] = {}

    def add(self, name: str, metric: Any, output: str | None = None) -> None:
        """Add a metric; raise ConfigError if its name is not free."""
        if name.startswith("val_") or name == "loss":
            raise ConfigError(f"the metric {name!r} needs another name: the history uses this one.")
        check_free(name, f"the metric {name!r}")
        if name in self:
            raise ConfigError(f"metrics has two named {name!r}: name them, as in metrics={{'mine': ...}}.")
        self[name] = metric
        if output is not None:
            self.outputs[name] = output


def metrics_by_name(metrics: Any, outputs: Collection[str] = ()) -> NamedMetrics:
    """Return a user's metrics (None, one, several, or a dictionary) by name.

    In a dictionary, keys that are among `outputs`, and keys of lists and dictionaries, name outputs of the model.
    """
    found = NamedMetrics()
    if metrics is None:
        return found
    if isinstance(metrics, NamedMetrics):
        return metrics
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        metrics = [metrics]
    for given in metrics:
        if isinstance(given, Mapping):
            _add_by_name(found, given, outputs)
            continue
        for name, metric in _named(given):
            is_function = not isinstance(metric, str) and not _is_library(metric)
            _add(found, _free_name(name, found) if is_function else name, metric)
    return found


def _add_by_name(found: NamedMetrics, given: Mapping[Any, Any], outputs: Collection[str]) -> None:
    for key, each in given.items():
        name = str(key)
        if name in outputs or isinstance(each, (list, tuple, Mapping)):
            for own, metric in metrics_by_name(each).items():
                found.add(f"{name}_{own}", metric, output=name)
        else:
            _add(found, name, each)


def _add(found: NamedMetrics, name: str, metric: Any) -> None:
    """Add a metric; the loss is there anyway, and accuracy has one name."""
    _check_kind(metric)
    # First the type: torchmetrics' objects compare as equal to anything.
    if not isinstance(metric, str) or metric not in _BUILT_IN:
        found.add(name, metric)
    elif metric != "loss":
        found.add(ACCURACY, ACCURACY)


def _check_kind(metric: Any) -> None:
    if isinstance(metric, str):
        if metric not in _KNOWN and metric not in _BUILT_IN and not _TOP.match(metric):
            raise unknown_name("cyxtrain", metric, _KNOWN, "metric")
        return
    if callable(metric) and not isinstance(metric, type):
        return
    what = brief(metric)
    if isinstance(metric, type):
        what = f"the class {metric.__name__}: pass an instance"
    raise ConfigError(f"metrics takes names, functions of (output, target) and torchmetrics objects, got {what}.")


def _free_name(name: str, found: Mapping[str, Any]) -> str:
    """Return a function's name in the history: with a prefix or a number if the name is taken."""
    if name == "loss" or name.startswith("val_"):
        name = f"metric_{name}"
    free = name
    number = 1
    while free in found:
        number += 1
        free = f"{name}_{number}"
    return free


def _named(metric: Any) -> list[tuple[str, Any]]:
    """Return the name and the metric; of a MetricCollection, each of its metrics."""
    if isinstance(metric, str):
        return [(metric, metric)]
    if not _is_library(metric):
        return [(getattr(metric, "__name__", type(metric).__name__), metric)]
    items = getattr(metric, "items", None)
    if callable(items):
        return list(items())
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower()
    return [(name.strip("_"), metric)]


def make_metrics(given: NamedMetrics, loss: Loss, output: Any, target: Any, rows: int) -> Metrics:
    """Return metrics that passed a dry run on the outputs and targets of some samples, and are reset."""
    made = []
    with warnings.catch_warnings():  # torchmetrics warns of metrics that keep all samples
        warnings.simplefilter("ignore")
        for name, each in given.items():
            part = given.outputs.get(name, "")
            with naming_output(part):
                if part:
                    _inspect_output(loss, part, output, target, asked=_is_accuracy(each))
                # Whole sets are tried elsewhere, and accuracy is measured in any case.
                if isinstance(each, WholeSet) or (name == ACCURACY and _is_accuracy(each)):
                    continue
                made.append(_made(name, each, loss, part, output, target))
    if output is not None:
        for metric in made:
            _try(metric, output, target, rows)
    return Metrics(made).copy()  # without the samples of the dry run


def _try(metric: Metric, output: Any, target: Any, rows: int) -> None:
    """Calculate a metric of some samples; raise ConfigError, with a remedy, if it cannot."""
    try:
        with warnings.catch_warnings():  # in a few samples some classes are missing
            warnings.simplefilter("ignore")
            metric.add(*metric.select(output, target), rows)
            metric.over_ranks(World())
    except ConfigError:
        raise
    except Exception as error:
        remedy = remedy_for_devices(error) or ". Pass a function of (output, target), or of all: cx.metrics.WholeSet."
        with contextlib.suppress(Exception):  # does it work with its arguments exchanged?
            assert isinstance(metric, MeanMetric)
            own, answer = metric.select(output, target)
            metric.add(answer, own, rows)
            remedy = ". It takes them in the other order: a metric is a function of (output, target)."
        what = f"the metric {metric.name} cannot take the model's output and y"
        raise ConfigError(f"{what}: {error}{remedy}") from error


def _is_accuracy(metric: Any) -> bool:
    return isinstance(metric, str) and metric == ACCURACY


def _inspect_output(loss: Loss, name: str, output: Any, target: Any, *, asked: bool) -> None:
    """Find what accuracy is for one of several outputs; one without a loss is taken for a cross-entropy's."""
    is_new = name not in loss.outputs
    own = loss.outputs.setdefault(name, Loss("cross_entropy"))
    if own.accuracy is not None:
        return
    part, answer = loss.of_output(name, output, target)
    if is_new:
        own.inspect(answer, are_all=False)
        own.check_shapes(part, answer)
    value = torch.zeros((), device="cpu")
    if not own.is_known:
        value = batch_loss_of(own.function(part, answer), 1).mean
    own.accuracy = find_accuracy(own, part, answer, value, asked=asked)


def _task_of(loss: Loss, output: Any, target: Any) -> _Task | None:
    """Return what the model predicts, by output and target; None if one of them is several."""
    form = loss.accuracy
    if form is None or form.is_one_hot:
        form = Accuracy()
    pair = form.pair(output, target)
    if pair is None:
        return None
    output, target = pair
    if loss.is_binary:
        as_binary = functools.partial(_as_binary, isinstance(loss.function, nn.BCEWithLogitsLoss))
        if output.dim() > 1 and output.shape[1] > 1:
            return _Task("multilabel", output.shape[1], loss, as_binary)
        return _Task("binary", 2, loss, as_binary)
    if not target.is_floating_point() and output.dim() == target.dim() + 1 and output.shape[1] >= 2:
        as_classes = functools.partial(_as_classes, isinstance(loss.function, nn.NLLLoss), form)
        return _Task("multiclass", output.shape[1], loss, as_classes)
    return _Task("regression", 0, loss, _as_doubles, math.prod(output.shape[1:]))


def _made(name: str, metric: Any, loss: Loss, part: str, output: Any, target: Any) -> Metric:
    """Return a metric, of one of several outputs unless `part` is empty."""
    own = loss.outputs.get(part, loss)
    if _is_library(metric):
        made: Metric = LibraryMetric(name, metric)
    elif not isinstance(metric, str):
        made = MeanMetric(name, metric)
    elif metric == ACCURACY:
        made = MeanMetric(name, lambda output, target: correct_of(output, target, own), True)
    else:
        made = _by_name(name, metric, _task_of(own, *loss.of_output(part, output, target)), [*parts_by_name(output)])
    made.select = lambda output, target: loss.of_output(part, output, target)
    return made


def _by_name(name: str, metric: str, task: _Task | None, outputs: Sequence[str]) -> Metric:
    if task is None:
        raise ConfigError(
            f"the metric {metric!r} compares one output with one y: give it by the output's name, as in "
            f"metrics={{{next(iter(outputs), 'a')!r}: [{metric!r}]}}, or pass a function of (output, target)."
        )
    top = _TOP.match(metric)
    base, average = _BY_AVERAGE.get(metric, (metric, ""))
    is_for_classes = top is not None or base in _OF_CLASSES
    if is_for_classes and (task.kind == "regression" or (top is not None and task.kind != "multiclass")):
        raise ConfigError(f"the metric {metric!r} is for classes, and the targets are not among several classes.")
    if not is_for_classes and task.kind != "regression":
        raise ConfigError(f"the metric {metric!r} is for numbers, and the targets are classes.")
    if top is not None:
        return _of_top(name, int(top[1]), task)
    if is_for_classes:
        return _of_classes(name, base, average, task)
    return _of_numbers(name, metric, task)


def _of_numbers(name: str, metric: str, task: _Task) -> Metric:
    if metric in _OF_NUMBERS:
        difference = _OF_NUMBERS[metric]
        return MeanMetric(name, lambda output, target: difference(*_as_rows(output, target)), False)
    from torchmetrics import regression  # takes a second

    settings: dict[str, Any] = {}
    if task.num_outputs > 1 and metric in ("rmse", *_CORRELATIONS):
        settings["num_outputs"] = task.num_outputs
    if metric in _CORRELATIONS:  # both from all samples: sums of squares would be less exact
        of_ranks = metric == "spearman"
        metric_class = _computing(regression.SpearmanCorrCoef, functools.partial(_correlation, of_ranks=of_ranks))
        return LibraryMetric(name, metric_class(**settings), task.prepare)
    if metric == "rmse":
        settings["squared"] = False
    library = getattr(regression, _FROM_LIBRARY[metric])
    metric_class = _computing(library, lambda library, sums: library.compute(sums).mean())
    return LibraryMetric(name, metric_class(**settings), task.prepare)


def _of_top(name: str, k: int, task: _Task) -> Metric:
    if k > task.num_classes:
        raise ConfigError(f"the metric 'top_{k}' needs at least {k} classes, and the model has {task.num_classes}.")

    def is_among_the_best(output: Any, target: Any) -> tuple[Tensor, Tensor]:
        scores, classes = task.prepare(output, target)
        found = (scores.topk(k, dim=1).indices == classes.unsqueeze(1)).any(1)
        counts = torch.ones_like(found)
        if task.loss.ignored is not None:
            counts = classes != task.loss.ignored
        return (found & counts).sum(), counts.sum()

    return MeanMetric(name, is_among_the_best, larger_is_better=True)


def _of_classes(name: str, base: str, average: str, task: _Task) -> Metric:
    from torchmetrics import classification  # takes a second

    kind = _OF_CLASSES[base]
    if task.kind == "binary" and not average:
        metric_class = getattr(classification, f"Binary{kind}")
        if base == "auc":
            metric_class = _computing(metric_class, _auc_of_both)
        elif base == "matthews":
            metric_class = _computing(metric_class, _matthews)
        return LibraryMetric(name, metric_class(), task.prepare)
    settings: dict[str, Any] = {}
    if base in _AVERAGED:
        settings["average"] = average or "macro"
    if task.kind == "multilabel":
        metric_class = getattr(classification, f"Multilabel{kind}", None)
        settings["num_labels"] = task.num_classes
    else:
        metric_class = getattr(classification, f"Multiclass{kind}")
        settings |= {"num_classes": task.num_classes, "ignore_index": task.loss.ignored}
    if metric_class is None:
        raise ConfigError(f"the metric {base!r} is for one class per sample, and the targets are several labels.")
    if base in _RANKED:
        metric_class = _computing(metric_class, functools.partial(_mean_of_ranked, average=average))
        settings["average"] = "none"
    elif base == "matthews":
        metric_class = _computing(metric_class, _matthews)
    prepare = task.prepare
    if task.kind == "binary":
        prepare = functools.partial(_as_two_classes, prepare)
    return LibraryMetric(name, metric_class(**settings), prepare)


def _computing(library: Any, compute: Callable[[Any, Any], Tensor]) -> Any:
    """Return a subclass of a metric's class, with `compute(library, metric)`."""
    changed = {"compute": lambda metric: compute(library, metric), "__module__": library.__module__}
    return type(library.__name__, (library,), changed)


def _mean_of_ranked(library: Any, metric: Any, average: str) -> Tensor:
    """Return the mean over the classes that some samples are of, and other samples are not; "none": all scores."""
    answers = _joined(metric.target)
    if metric.ignore_index is not None:
        answers = answers[answers != metric.ignore_index]
    if not len(answers):
        shape = [metric.num_classes] if average == "none" else []
        return answers.new_full(shape, math.nan, dtype=torch.float64)
    scores: Tensor = library.compute(metric)
    counts = answers.sum(0) if answers.dim() > 1 else torch.bincount(answers, minlength=len(scores))
    known = (counts > 0) & (counts < len(answers))
    if average == "none":
        return scores.masked_fill(~known, math.nan)
    weights = counts if average else torch.ones_like(counts)
    return torch.div((scores * weights)[known].sum(), weights[known].sum())


def _auc_of_both(library: Any, metric: Any) -> Tensor:
    """Return the area under the curve; NaN, as in scikit-learn, if all samples are of one class."""
    answers = _joined(metric.target)
    found: Tensor = library.compute(metric)
    if (answers == answers[0]).all():
        return torch.full_like(found, math.nan)
    return found


def _matthews(_: Any, metric: Any) -> Tensor:
    """Return Matthews' coefficient as in scikit-learn: 0 if all samples are of one class, or predicted to be."""
    counts = metric.confmat.double()
    if counts.dim() > 2:  # of each label
        counts = counts.sum(0)
    total = counts.sum()
    own = counts.sum(1)
    predicted = counts.sum(0)
    spread = (total.square() - own @ own) * (total.square() - predicted @ predicted)
    covariance = counts.trace() * total - own @ predicted
    return torch.where(spread > 0, covariance / spread.sqrt(), 0.0)


def _correlation(_: Any, metric: Any, *, of_ranks: bool) -> Tensor:
    """Return Pearson's correlation of all samples, or of their ranks, which is Spearman's; the mean over outputs."""
    sides = [_joined(each).reshape(-1, metric.num_outputs) for each in (metric.preds, metric.target)]
    if of_ranks:
        sides = [torch.stack([*map(_ranks, side.T)], dim=1) for side in sides]
    x, y = (side - side.mean(0) for side in sides)
    return torch.mean((x * y).sum(0) / (x.square().sum(0) * y.square().sum(0)).sqrt())


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each value; equal ones have the mean of theirs."""
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    found: Tensor = (counts.cumsum(0) - (counts.double() - 1) / 2)[places]
    return found


def _joined(rows: Any) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.cat(list(rows))


def _as_classes(is_log: bool, form: Accuracy, output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return probabilities and classes: torchmetrics mistakes logits between 0 and 1 for probabilities."""
    pair = form.pair(output, target)
    assert pair is not None
    scores, classes = pair
    scores = scores.double()
    probabilities = scores.exp() if is_log else scores.softmax(1)
    return probabilities, classes


def _as_binary(are_logits: bool, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels: of rows, or of each of several labels, in the second dimension."""
    shape = output.shape if output.dim() > 1 and output.shape[1] > 1 else (-1,)
    scores = output.double().reshape(shape)
    if are_logits:
        scores = scores.sigmoid()
    return scores, (target.reshape(shape) > 0.5).long()


def _as_two_classes(binary: Prepare, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    scores, classes = binary(output, target)
    return torch.stack([1 - scores, scores], dim=1), classes


def _as_doubles(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    shape = (len(output), -1) if output.numel() > len(output) else (-1,)
    return output.double().reshape(shape), target.double().reshape(shape)


def _as_rows(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float64, (n, 1) and (n,) in one shape: they would be broadcast to (n, n)."""
    if output.dim() != target.dim():
        output = output.reshape(len(output), -1)
        target = target.reshape(len(target), -1)
    return output.double(), target.double()


def _is_library(metric: Any) -> bool:
    """Return whether a metric is from torchmetrics, without importing it."""
    return any(base.__module__.startswith("torchmetrics.") for base in type(metric).__mro__)
