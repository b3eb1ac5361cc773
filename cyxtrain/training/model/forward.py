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

    A dictionary is passed by name if forward takes its keys; keys that it does not take, such as ids, are left out. A
    tuple or a list is passed positionally if forward takes that many arguments, otherwise as a single argument.

    Attributes:
        step: The user's own step, called instead of the model, or None.
        owners: The objects that such a step may change.
        optimizes: Whether the step updates the parameters itself, by `optimize`; known once it has run.
        needs_all_rows: The part of the step that excludes several micro-batches, for an error, or "".
        differentiates: Whether the model computes derivatives in forward, and so needs a graph outside training too.
        left_out: Names of inputs, such as ids, that forward does not take.
        names_differ: For an error: the names that forward takes, and the keys of a dictionary that is passed whole.
    """

    step: Callable[[Any], Any] | None = None
    owners: Sequence[Any] = ()
    optimizes = False
    needs_all_rows = ""
    differentiates = False
    left_out: Sequence[str] = ()
    names_differ = ""
    _target_name = ""

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        inputs: Tree,
        targets: Tree | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.precision = precision
        self._loss = loss
        inputs = _several(inputs)
        self._way = _way_of(model, inputs)
        if isinstance(inputs, dict):
            self._compare_names(model, inputs)
        self._gives_targets = False
        if loss is not None and loss.function is None:  # the model computes its loss
            self._gives_targets = targets is not None
            if names_items(model):
                loss.items = usual_rule(Batch(0, inputs, targets))
        if self._gives_targets:
            self._check_targets(model, targets)

    def _compare_names(self, model: nn.Module, inputs: dict[Any, Any]) -> None:
        """Note which inputs forward does not take, or why they are passed as a single argument."""
        if self._way is _Way.NAMED:
            self.left_out = _not_taken(model, inputs)
        else:
            names = ", ".join(inspect.signature(model.forward).parameters)
            given = ", ".join(map(str, inputs))
            self.names_differ = (
                f" (forward takes {names}, and X has {given}, so X is passed whole: use forward's names to pass its "
                "parts)"
            )

    def _check_targets(self, model: nn.Module, targets: Tree | None) -> None:
        """Find how a model that computes its own loss takes the targets; refuse one that does not take them."""
        if self._way is _Way.WHOLE and not takes(model.forward, 2):
            raise ConfigError(
                "loss_fn is missing: without one the model is called with X and y, and returns its loss; the forward "
                f"of {type(model).__name__} does not take both. Give a loss_fn, such as 'cross_entropy', or no y."
            )
        if self._way is _Way.NAMED and not isinstance(targets, dict):
            self._target_name = _name_of_targets(model)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the output for a batch; a model that computes its own loss gets the targets too."""
        if self._loss is not None and self._loss.items is not None:
            return self.with_items(model, batch, self._loss.items.items(batch))
        if self._gives_targets:
            return self.with_items(model, batch, None)
        return self.predict(model, batch)

    def with_items(self, model: Callable[..., Any], batch: Batch, items: Tensor | int | None) -> Any:
        """Return the output of a model that computes its own loss; `items`: `num_items_in_batch`."""
        named: dict[str, Any] = {}
        if items is not None:
            named[ARGUMENT] = items
        if self._gives_targets:
            return self._compute(model, batch.inputs, batch.targets, **named)
        return self._compute(model, batch.inputs, **named)

    def predict(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the output for a batch's inputs alone."""
        if isinstance(batch.inputs, Tensor) and self.precision.is_full:
            return model(batch.inputs)  # the common case, without building arguments
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
            if isinstance(target, dict):
                named |= target
            else:
                named[self._target_name] = target
        return (), named


def _several(inputs: Any) -> Any:
    """Return the inputs of an opaque batch as a tuple or a dictionary; other inputs as given."""
    if not isinstance(inputs, OpaqueBatch):
        return inputs
    return inputs.given if isinstance(inputs.given, (tuple, dict)) else (inputs.given,)


def _way_of(model: nn.Module, inputs: Any) -> _Way:
    """Return how inputs become arguments of the model's forward."""
    if isinstance(inputs, Tensor):
        return _Way.WHOLE
    parameters = [*inspect.signature(model.forward).parameters.values()]
    if isinstance(inputs, dict):
        return _Way.NAMED if _takes_names(parameters, inputs) else _Way.WHOLE
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return _Way.EACH if takes_any or len(places) >= len(inputs) else _Way.WHOLE


def _takes_names(parameters: Sequence[inspect.Parameter], inputs: dict[Any, Any]) -> bool:
    """Return whether a forward takes all inputs by name, or some with all that it requires."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return True
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = {p.name for p in named}
    if inputs.keys() <= names:
        return True
    # Targets come with the inputs, or after them.
    required = {p.name for p in named if p.default is p.empty} - {*TARGET_NAMES}
    return required <= inputs.keys() and not names.isdisjoint(inputs)


def _not_taken(model: nn.Module, inputs: dict[Any, Any]) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in inputs if name not in parameters]


def _name_of_targets(model: nn.Module) -> str:
    """Return the argument of a forward that takes the targets."""
    taken = inspect.signature(model.forward).parameters
    for name in TARGET_NAMES:
        if name in taken:
            return name
    raise ConfigError(
        f"the model computes its own loss and takes X by name, and has no argument for y: call one of them "
        f"{', '.join(TARGET_NAMES)}, or give y as a dictionary with its name."
    )
