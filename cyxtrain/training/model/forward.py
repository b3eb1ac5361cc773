"""How a model is called: its precision, and which arguments the parts of a batch become."""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.config.settings import takes
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.collate import TARGET_NAMES
from cyxtrain.data.batches.structure import OpaqueBatch, Tree, map_tree
from cyxtrain.errors import ConfigError
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.num_items import ARGUMENT, names_items, usual_rule
from cyxtrain.optim.precision import Precision


class _Way(enum.Enum):
    """How inputs become arguments."""

    WHOLE = "as one argument"
    EACH = "one after the other"
    NAMED = "by name"


class ModelCall:
    """Calls a model with batches of one form.

    A dictionary is passed by name if forward takes its keys, without those that it does not take, such as ids. A tuple
    or a list is passed positionally if forward takes that many arguments, otherwise as a single argument.

    Attributes:
        step: A step of the user's own that is called instead; None: there is none.
        owners: The objects that such a step may change.
        optimizes: Whether it updates the parameters itself, by `optimize`, as far as it has run.
        needs_all_rows: What in it excludes several micro-batches per step, in words, or "".
        differentiates: Whether the model makes derivatives in forward, and needs gradients outside training too.
        left_out: Names of inputs, such as ids, that forward does not take.
        names_differ: Which names forward takes and which the inputs have, for an error; "" where they have none.
    """

    step: Callable[[Any], Any] | None = None
    owners: Sequence[Any] = ()
    optimizes = False
    needs_all_rows = ""
    differentiates = False
    left_out: Sequence[str] = ()
    names_differ = ""

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        inputs: Tree,
        targets: Tree | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.precision = precision
        inputs = _several(inputs)
        self._way = _way_of(model, inputs)
        self.left_out = _not_taken(model, inputs) if isinstance(inputs, dict) and self._way is _Way.NAMED else []
        if isinstance(inputs, dict) and self._way is _Way.WHOLE:
            names, given = ", ".join(inspect.signature(model.forward).parameters), ", ".join(map(str, inputs))
            self.names_differ = (
                f" (forward takes {names}, and X has {given}, so X is passed whole: use forward's names to pass its "
                "parts)"
            )
        self._gives_targets = loss is not None and loss.function is None and targets is not None
        if self._gives_targets and self._way is _Way.WHOLE and not takes(model.forward, 2):
            raise ConfigError(
                "loss_fn is missing: without one the model is called with X and y, and returns its loss; the forward "
                f"of {type(model).__name__} does not take both. Give a loss_fn, such as 'cross_entropy', or no y."
            )
        self._loss = loss
        if loss is not None and loss.function is None and names_items(model):
            loss.items = usual_rule(Batch(0, inputs, targets))
        by_name = self._gives_targets and self._way is _Way.NAMED and not isinstance(targets, dict)
        self._target_name = _name_of_targets(model) if by_name else ""

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the output for a batch; a model that computes its own loss gets the targets too."""
        rule = None if self._loss is None else self._loss.items
        if rule is not None:
            return self.with_items(model, batch, rule.items(batch))
        return self.with_items(model, batch, None) if self._gives_targets else self.predict(model, batch)

    def with_items(self, model: Callable[..., Any], batch: Batch, items: Tensor | int | None) -> Any:
        """Return the output of a model that computes its own loss; `items`: `num_items_in_batch`, if it is passed."""
        targets = (batch.targets,) if self._gives_targets else ()
        named: dict[str, Any] = {} if items is None else {ARGUMENT: items}
        return self._compute(model, batch.inputs, *targets, **named)

    def predict(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the output for a batch's inputs alone."""
        if isinstance(batch.inputs, Tensor) and self.precision.is_full:
            return model(batch.inputs)
        return self._compute(model, batch.inputs)

    def describe_failure(self, shapes: str) -> str:
        """Return what failed, for an error of the dry run."""
        return f"the model cannot take X, tried on shape {shapes}{self.names_differ}"

    def missing(self, model: nn.Module, inputs: Tree) -> list[str]:
        """Return names of arguments that forward requires besides the inputs, such as the targets."""
        with contextlib.suppress(TypeError, ValueError):  # inputs that do not fit, or a forward written in C
            signature = inspect.signature(model.forward)
            arguments, named = self._arguments(inputs)
            given = signature.bind_partial(*arguments, **named).arguments
            needed = [p for p in signature.parameters.values() if p.default is p.empty and p.name not in given]
            return [p.name for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return []

    def without_graph(self, model: Callable[..., Any], batch: Batch, *, predicting: bool = False) -> Any:
        """Return the output for a batch outside training; `predicting`: for its inputs alone."""
        call = self.predict if predicting else self
        if not self.differentiates:
            return call(model, batch)
        with torch.enable_grad():
            output = call(model, batch)
        return map_tree(Tensor.detach, output)

    def _compute(self, model: Callable[..., Any], inputs: Tree, *targets: Tree | None, **others: int) -> Any:
        arguments, named = self._arguments(inputs, *targets)
        return self.precision.run(model, *arguments, **named, **others)

    def _arguments(self, inputs: Tree, *targets: Tree | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = _several(inputs)
        if self._way is _Way.WHOLE:
            return (given, *targets), {}
        if self._way is _Way.EACH:
            return (*given, *targets), {}
        named: dict[str, Any] = dict(given)
        for name in self.left_out:
            del named[name]
        for target in targets:
            named |= target if isinstance(target, dict) else {self._target_name: target}
        return (), named


def _several(inputs: Any) -> Any:
    """Return an opaque batch as several inputs: a tuple or a dictionary as it is, anything else as one."""
    if not isinstance(inputs, OpaqueBatch):
        return inputs
    return inputs.given if isinstance(inputs.given, (tuple, dict)) else (inputs.given,)


def _way_of(model: nn.Module, inputs: Any) -> _Way:
    if isinstance(inputs, Tensor):
        return _Way.WHOLE
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if isinstance(inputs, dict):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        needed = {p.name for p in parameters if p.default is p.empty and p.name in names} - {*TARGET_NAMES}
        by_name = inputs.keys() <= names or (needed <= inputs.keys() and bool(names & inputs.keys()))
        return _Way.NAMED if inspect.Parameter.VAR_KEYWORD in kinds or by_name else _Way.WHOLE
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return _Way.EACH if inspect.Parameter.VAR_POSITIONAL in kinds or len(places) >= len(inputs) else _Way.WHOLE


def _not_taken(model: nn.Module, inputs: dict[Any, Any]) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [] if takes_all else [name for name in inputs if name not in parameters]


def _name_of_targets(model: nn.Module) -> str:
    taken = inspect.signature(model.forward).parameters
    found = next((name for name in TARGET_NAMES if name in taken), None)
    if found is None:
        raise ConfigError(
            f"the model computes its own loss and takes X by name, and has no argument for y: call one of them "
            f"{', '.join(TARGET_NAMES)}, or give y as a dictionary with its name."
        )
    return found
