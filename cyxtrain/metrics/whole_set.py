"""Metrics that are functions of all rows of a validation."""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
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
# Errors of a function that more rows would not mend.
_MISTAKES = (TypeError, AttributeError, NameError, ImportError)


class WholeSet:
    """A metric of all outputs and targets of a validation, such as BLEU, mAP or seqeval's F1; also a decorator.

    `fit` computes it in each validation, not in training epochs; `evaluate` over its data. Rank 0 gathers all rows and
    calls the function once; every rank gets the result, or the error. The function is tried on two rows first.

    Args:
        function: Of (outputs, targets): NumPy arrays of all rows, in the order of the data and in the structure that
            `predict` returns; lists of arrays if rows differ in shape. A function of one argument gets Hugging Face's
            `predictions` and `label_ids`. It returns a number, or numbers by name, which replace its own.
        higher_is_better: For `keep_best` and early stopping; None: the function's attribute of this name, if any.
        preprocess: Function of a batch's (output, target) that returns what to gather instead of the output, such as
            its largest class, to save memory on rank 0.

    Raises:
        ConfigError: The function is none.
    """

    def __init__(
        self, function: _Function, *, higher_is_better: bool | None = None, preprocess: _Function | None = None
    ) -> None:
        is_function = callable(function) and not isinstance(function, type)
        require(is_function, f"WholeSet.function must be a function, got {brief(function)}.")
        own = getattr(function, "higher_is_better", None)
        self.higher_is_better = own if higher_is_better is None else higher_is_better
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        self._preprocess = preprocess
        self._set = ""
        self._takes_one = takes(function, 1) and not takes(function, 2)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Call the function."""
        return self._function(_HuggingFace(outputs, targets)) if self._takes_one else self._function(outputs, targets)

    def _kept(self, output: Any, target: Any, loss: Loss) -> tuple[Any, Any]:
        """Return what is gathered of a batch."""
        output = loss.without_own(output)
        if self._preprocess is not None:
            output = self._preprocess(output, target)
        elif self._takes_one:  # as Hugging Face's Trainer passes it
            parts = tuple(part for _, part in leaves(output))
            output = parts[0] if len(parts) == 1 else parts
        return output, target

    def _results(self, name: str, prefix: str, rows: tuple[Any, Any], of_set: str = "") -> dict[str, float]:
        """Return the numbers over all rows, by name in the history; `name`: of a single number, `prefix`: of others."""
        self._set = of_set
        result = self(*rows)
        has_names = isinstance(result, Mapping)
        found = {f"{prefix}{own}": each for own, each in result.items()} if has_names else {name: result}
        numbers = None
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # what float raises for other libraries' values
            numbers = {each: float("" if isinstance(value, str) else value) for each, value in found.items()}
        if numbers is None or any(each == "loss" or each.startswith("val_") for each in numbers):
            raise ConfigError(
                f"the metric {name} must return a number, or numbers by name ('loss' and names that begin with 'val_' "
                f"are taken); it returned {brief(result)}."
            )
        return numbers

    def _names(self, name: str, results: Callable[[], dict[str, float]]) -> list[str]:
        """Try the function on a few rows; return the names of its numbers, or its own if these are too few rows."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return [*results()]
            except (ConfigError, *_MISTAKES) as error:
                what = f"the metric {name} failed when it was tried on a few rows: {type(error).__name__}: {error}"
                raise error if isinstance(error, ConfigError) else ConfigError(what) from error
            except Exception:
                return [name]


class TriedSet(NamedTuple):
    """A metric over a whole set that was tried on a few rows."""

    name: str
    kept: Callable[[Any, Any, Loss], tuple[Any, Any]]  # of a batch
    results: Callable[[tuple[Any, Any], str], dict[str, float]]  # of all rows, and the name of their set
    structure: Any  # of what is gathered, without values
    names: list[str]  # of the results
    larger_is_better: bool | None


def tried_sets(
    given: Mapping[str, Any], outputs: Mapping[str, str], loss: Loss, output: Any, target: Any, rows: int
) -> list[TriedSet]:
    """Return the metrics over whole sets among a user's, tried on the output and the targets of some rows.

    `outputs`: of those that are of one of several outputs, its name.
    """
    tried = []
    for name, metric in [(name, each) for name, each in given.items() if isinstance(each, WholeSet)]:
        whose = outputs.get(name, "")
        keep = functools.partial(_kept_of, metric, whose)
        kept = keep(output, target, loss)
        parts = dict(leaves(kept))
        for part in parts.values():
            if not isinstance(part, Tensor) or not part.dim() or len(part) != rows:
                what = f"a tensor of shape {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                raise ConfigError(
                    f"the metric {name} needs outputs with one row per input row; for {rows} rows, {what} is among "
                    "them. Pass preprocess=..., a function of (output, target) that returns what the metric needs."
                )
        found = with_parts(kept, {each: as_numpy(part.detach().cpu()) for each, part in parts.items()})
        empty = {each: torch.empty_like(part, device="meta") for each, part in parts.items()}
        results = functools.partial(metric._results, name, f"{whose}_" if whose else "")
        names = metric._names(name, functools.partial(results, found))
        tried.append(TriedSet(name, keep, results, with_parts(kept, empty), names, metric.higher_is_better))
    return tried


def _kept_of(metric: WholeSet, name: str, output: Any, target: Any, loss: Loss) -> tuple[Any, Any]:
    return metric._kept(*loss.of_output(name, output, target), loss.outputs.get(name, loss))


def as_numpy(tensor: Tensor) -> Any:
    """Return a tensor of the CPU as a NumPy array; bfloat16, which NumPy does not have, as float32."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
