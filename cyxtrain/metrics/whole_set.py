"""Metrics that are functions of all samples of a validation."""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cyxtrain.config.settings import require, takes
from cyxtrain.data.batches.structure import leaves, with_parts
from cyxtrain.errors import ConfigError, brief

if TYPE_CHECKING:
    from cyxtrain.metrics.loss import Loss

_HuggingFace = collections.namedtuple("_HuggingFace", ("predictions", "label_ids"))
_Function: TypeAlias = Callable[..., Any]
# Errors of a function that more samples would not fix.
_MISTAKES = (TypeError, AttributeError, NameError, ImportError)


class WholeSet:
    """A metric of all outputs and targets of a validation, such as BLEU, mAP or seqeval's F1; also a decorator.

    `fit` computes it in each validation, not in training epochs; `evaluate` over its data. Rank 0 gathers all samples
    and calls the function once; every rank gets the result, or the error. The function is tried on two samples first.

    Args:
        function: Of (outputs, targets): NumPy arrays of all samples, in the order of the data and in the structure that
            `predict` returns; lists of arrays if rows differ in shape. A function of one argument gets Hugging Face's
            `predictions` and `label_ids`. It returns a number, or numbers by name, which replace its own.
        higher_is_better: For `keep_best` and early stopping; None: the function's attribute of this name, if any.
        preprocess: Function of a batch's (output, target) that returns what to gather instead of the output, such as
            its largest class, to save memory on rank 0.

    Raises:
        ConfigError: `function` is not a function.
    """

    def __init__(
        self, function: _Function, *, higher_is_better: bool | None = None, preprocess: _Function | None = None
    ) -> None:
        is_function = callable(function) and not isinstance(function, type)
        require(is_function, f"WholeSet.function must be a function, got {brief(function)}.")
        if higher_is_better is None:
            higher_is_better = getattr(function, "higher_is_better", None)
        self.higher_is_better = higher_is_better
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        self._preprocess = preprocess
        self._set = ""
        self._takes_one = takes(function, 1) and not takes(function, 2)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Call the function."""
        if self._takes_one:
            return self._function(_HuggingFace(outputs, targets))
        return self._function(outputs, targets)

    def _kept(self, output: Any, target: Any, loss: Loss) -> tuple[Any, Any]:
        """Return the output and the target to gather of a batch."""
        output = loss.without_own(output)
        if self._preprocess is not None:
            output = self._preprocess(output, target)
        elif self._takes_one:  # as Hugging Face's Trainer passes it
            parts = tuple(part for _, part in leaves(output))
            output = parts[0] if len(parts) == 1 else parts
        return output, target

    def _results(self, name: str, prefix: str, rows: tuple[Any, Any], of_set: str = "") -> dict[str, float]:
        """Return the numbers over all samples, by name in the history; `name`: of a single one, `prefix`: of others."""
        self._set = of_set
        result = self(*rows)
        found = {name: result}
        if isinstance(result, Mapping):
            found = {f"{prefix}{own}": each for own, each in result.items()}
        numbers = None
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # what float raises for other libraries' values
            numbers = {each: _as_float(value) for each, value in found.items()}
        if numbers is None or any(each == "loss" or each.startswith("val_") for each in numbers):
            raise ConfigError(
                f"the metric {name} must return a number, or numbers by name ('loss' and names that begin with 'val_' "
                f"are taken); it returned {brief(result)}."
            )
        return numbers

    def _names(self, name: str, results: Callable[[], dict[str, float]]) -> list[str]:
        """Try the function on a few samples; return the names of its numbers, or its own if they are too few."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return [*results()]
            except ConfigError:
                raise
            except _MISTAKES as error:
                raise ConfigError(
                    f"the metric {name} failed when it was tried on a few samples: {type(error).__name__}: {error}"
                ) from error
            except Exception:  # two samples may be too few for it
                return [name]


def _as_float(value: Any) -> float:
    """Return a number as a float; a string is not a number, even if it has only digits."""
    if isinstance(value, str):
        raise TypeError
    return float(value)


class CheckedWholeSet(NamedTuple):
    """A metric over a whole set that was tried on a few samples."""

    name: str
    kept: Callable[[Any, Any, Loss], tuple[Any, Any]]  # of a batch
    results: Callable[[tuple[Any, Any], str], dict[str, float]]  # of all samples, and the name of their set
    structure: Any  # of what is gathered, without values
    names: list[str]  # of the results
    larger_is_better: bool | None


def checked_whole_sets(
    given: Mapping[str, Any], outputs: Mapping[str, str], loss: Loss, output: Any, target: Any, rows: int
) -> list[CheckedWholeSet]:
    """Return a user's metrics over whole sets, tried on the output and the targets of some samples.

    `outputs` has the output's name of each metric that is of one output.
    """
    tried = []
    for name, metric in given.items():
        if not isinstance(metric, WholeSet):
            continue
        output_name = outputs.get(name, "")
        keep = functools.partial(_kept_of, metric, output_name)
        kept = keep(output, target, loss)
        parts = dict(leaves(kept))
        _check_rows(name, parts.values(), rows)
        found = with_parts(kept, {each: as_numpy(part.detach().cpu()) for each, part in parts.items()})
        empty = {each: torch.empty_like(part, device="meta") for each, part in parts.items()}
        prefix = f"{output_name}_" if output_name else ""
        results = functools.partial(metric._results, name, prefix)
        names = metric._names(name, functools.partial(results, found))
        tried.append(CheckedWholeSet(name, keep, results, with_parts(kept, empty), names, metric.higher_is_better))
    return tried


def _check_rows(name: str, parts: Iterable[Any], rows: int) -> None:
    for part in parts:
        what = type(part).__name__
        if isinstance(part, Tensor):
            if part.dim() and len(part) == rows:
                continue
            what = f"a tensor of shape {list(part.shape)}"
        raise ConfigError(
            f"the metric {name} needs outputs with one row per sample; for {rows} samples, {what} is among them. Pass "
            "preprocess=..., a function of (output, target) that returns what the metric needs."
        )


def _kept_of(metric: WholeSet, output_name: str, output: Any, target: Any, loss: Loss) -> tuple[Any, Any]:
    own, answer = loss.of_output(output_name, output, target)
    return metric._kept(own, answer, loss.outputs.get(output_name, loss))


def as_numpy(tensor: Tensor) -> Any:
    """Return a tensor of the CPU as a NumPy array; bfloat16, which NumPy does not have, as float32."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()
