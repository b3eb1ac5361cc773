"""Steps of the user's own: `train_step`, `test_step` and `predict_step` in place of the built-in ones.

A step takes a batch and returns its loss, like a model without a loss_fn, with all that such a model may do: return
(sum, weight) and scalars for the history, accumulate, and train on ranks without samples.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cyxtrain.config.settings import require, takes, unknown_name
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.collate import as_given, batch_parts
from cyxtrain.data.batches.rows import Rows
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError, brief, warn_together
from cyxtrain.metrics.find_accuracy import find_accuracy
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.sums import correct_of
from cyxtrain.metrics.weighting import BatchLoss, Weighting, batch_loss_of, is_scalar, loss_in_output
from cyxtrain.optim.optimizers import described_name, needs_closure, parameters_of
from cyxtrain.optim.precision import Precision
from cyxtrain.training.model.forward import ModelCall

StepLike = Callable[[Any, Any], Any] | None
"""A function of (trainer, batch)."""
SLICES_EXCLUDE_UPDATES = (
    "train_step calls self.optimize, which updates parameters before it returns: the slices that a rank computes "
    "after that would find other parameters than on a rank of their own. Return the loss instead, and fit updates "
    "once, after all slices"
)

# By trainer, the names that its steps have returned; kept here, as a dry run restores the trainer's attributes.
_RETURNED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
TRAIN = "train_step"
TEST = "test_step"
PREDICT = "predict_step"

Update = Callable[[Any, str, bool], Tensor]
"""Updates the parameters of the optimizer of that name by a loss; returns the loss, detached."""


class BuiltInStep:
    """The built-in step: the model's forward, and the loss_fn if there is one.

    Attributes:
        weight: The divisor of the latest loss, if it is not the number of samples.
        update: Called by a step's `optimize`; None in an evaluation, which updates nothing.
        losses: The losses of the running step's calls of `optimize`.
        pair: The (sum, weight) of the latest call of `optimize`, or None.
    """

    def __init__(self, model: nn.Module, loss: Loss, precision: Precision) -> None:
        self._model = model
        self._loss = loss
        self.precision = precision
        self._call: ModelCall | None = None
        self._is_first = True
        self.weight: Tensor | float | None = None
        self.update: Update | None = None
        self.losses: list[Tensor] = []
        self.pair: tuple[Any, Any] | None = None

    def __call__(self, given: Any) -> dict[str, Any]:
        """Return "loss" and other numbers that the built-in step measures, and the model's "output"."""
        loss = self._loss
        batch = Batch(0, *batch_parts(given))
        output = self._call_for(batch, loss)(self._model, batch)
        if self._is_first:
            found = self._first_loss(output, batch)
        else:
            with self.precision.suspended():
                found = loss(output, batch)
        measured: dict[str, Any] = {"loss": self._mean(found)}
        for name, part in found.parts.items():
            measured[name] = _as_returned(part)
        if loss.accuracy is not None and "accuracy" not in measured:
            measured["accuracy"] = tuple(correct_of(output, batch.labels, loss))
        shown = loss.without_own(output)
        if not is_scalar(shown):
            measured["output"] = shown
        return measured

    def _first_loss(self, output: Any, batch: Batch) -> BatchLoss:
        """Return the loss of the first batch; refuse a sum; find whether accuracy can be measured."""
        loss = self._loss
        with self.precision.suspended():
            loss.check_shapes(output, batch.targets)
            found = loss.first(output, batch)
        self._is_first = False
        kinds = [kind for _, kind, _ in loss.components(found)]
        require(
            Weighting.NOTHING not in kinds,
            "loss_fn is a sum (reduction='sum'), and the built-in step returns a mean to a step of your own: give "
            "a loss_fn that is a mean, or compute the loss in the step and return (sum, weight).",
        )
        loss.accuracy = find_accuracy(loss, output, batch.labels, found.mean.detach(), asked=False)
        return found

    def _mean(self, found: BatchLoss) -> Tensor:
        """Return the mean of a loss over all that counts, 0 if nothing does; keep its divisor."""
        if self._loss.has_weights and not self._loss.weightings:
            self.weight = found.weight
        return found.mean_or_zero

    def optimize(self, loss: Any, name: str | None, trainer: Any, *, retain_graph: bool) -> Tensor:
        """Call `update`; return the loss, detached."""
        if isinstance(loss, Tensor) and self.weight is not None:
            # A mean from the built-in step: means over ranks need its weight.
            loss = (loss * self.weight, self.weight)
        self.pair = None
        if not callable(loss):
            value, weight = checked_loss(loss)
            if weight is not None:
                self.pair = (value.detach(), weight)
        if self.update is None:
            detached = mean_of_loss(*checked_loss(_called(loss)))
        else:
            detached = self.update(loss, _known_optimizer(name, [*trainer.optimizers]), retain_graph)
        self.losses.append(detached)
        return detached

    def predict(self, given: Any) -> Any:
        """Return the model's output for a batch's inputs."""
        batch = Batch(0, *batch_parts(given))
        return self._call_for(batch, None).predict(self._model, batch)

    def _call_for(self, batch: Batch, loss: Loss | None) -> ModelCall:
        if self._call is None:
            targets = None if loss is None else batch.targets
            self._call = ModelCall(self._model, self.precision, batch.inputs, targets, loss)
        return self._call


def _known_optimizer(name: str | None, known: list[str]) -> str:
    """Return the name of an optimizer, by default of the only one; refuse an unknown name."""
    if name is None:
        require(len(known) == 1, f"optimize needs the name of one of the optimizers: {', '.join(known)}.")
        return known[0]
    if name not in known:
        raise unknown_name("the trainer", str(name), known, "optimizer")
    return name


class OwnStep(NamedTuple):
    """A step of the user's own: a function of a batch; `running` is the trainer's stack of built-in steps."""

    name: str
    function: Callable[[Any], Any]
    trainer: Any
    running: list[BuiltInStep]


OwnSteps = Mapping[str, OwnStep]
"""The user's own steps by name, without the built-in ones."""


class TrainerSteps:
    """The steps of a trainer, which a subclass may override."""

    def __init__(self, train_step: StepLike, test_step: StepLike, predict_step: StepLike) -> None:
        self._given_steps = {TRAIN: train_step, TEST: test_step, PREDICT: predict_step}
        for name, step in self._given_steps.items():
            is_step = step is None or (callable(step) and takes(step, 2))
            require(is_step, f"{name} must be a function of (trainer, batch), got {brief(step)}.")
        self._running_steps: list[BuiltInStep] = []

    @property
    def _own_steps(self) -> OwnSteps:
        """The steps that the trainer was given, called with it first, and those that its subclass overrides."""
        found: dict[str, OwnStep] = {}
        for name, given in self._given_steps.items():
            method = getattr(self, name)
            if given is not None:
                found[name] = OwnStep(name, partial(given, self), self, self._running_steps)
            elif getattr(method, "__func__", None) is not vars(TrainerSteps)[name]:
                found[name] = OwnStep(name, method, self, self._running_steps)
        return found

    def train_step(self, batch: Any) -> Any:
        """Return the loss of a batch; `fit` then does backward and step. Override it for a step of your own.

        Args:
            batch: (x, y), (x, y, sample_weight) or (x,), depending on the data; a dictionary, if the data give
                dictionaries; any other form that a DataLoader over a Dataset gives. On the device.

        Returns:
            A dictionary with "loss" (the mean over this rank's samples, or (sum, weight)), "output" (of the model,
            which metrics compare with y) and numbers for the history, such as "accuracy": a number, True or False, a
            tensor of no dimensions, (sum, weight), or None if this batch has none. A step of your own may return the
            loss alone.
        """
        return self._built_in(TRAIN)(batch)

    def optimize(self, loss: Any, optimizer: str | None = None, *, retain_graph: bool = False) -> Tensor:
        """Update the parameters of one optimizer by the gradients of a loss, in a `train_step` of your own.

        The gradients of these parameters alone are computed, averaged over all ranks, checked for NaN, and clipped;
        the optimizer steps, and they are cleared. All ranks make the same calls. In an evaluation, nothing is updated.

        Args:
            loss: The mean over this rank's samples, (sum, weight), or a function that returns one of them, for an
                optimizer that evaluates the loss several times: it is called with gradients cleared, and the optimizer
                sees loss and gradients over all ranks.
            optimizer: A name of `optimizers`; None: the only one.
            retain_graph: Keep the graph for another loss that shares it.

        Returns:
            The loss, detached: for (sum, weight) and functions, the mean over all ranks.

        Raises:
            ConfigError: The loss or the name is wrong, or no step runs.
            NonFiniteError: The loss or a gradient is not finite on any rank, and `on_nonfinite` is "raise".
        """
        require(bool(self._running_steps), "optimize is called within a train_step, by fit or train_on_batch.")
        return self._running_steps[-1].optimize(loss, optimizer, self, retain_graph=retain_graph)

    def test_step(self, batch: Any) -> Any:
        """Return the loss of a batch of `evaluate` or of validation data, like `train_step`; no gradients.

        Args:
            batch: As in `train_step`.
        """
        return self._built_in(TEST)(batch)

    def predict_step(self, batch: Any) -> Any:
        """Return the model's output for a batch of `predict`. Override it for a prediction of your own.

        Args:
            batch: (x,), or a dictionary, if the data give dictionaries; without targets.
        """
        return self._built_in(PREDICT).predict(batch)

    def _built_in(self, name: str) -> BuiltInStep:
        require(
            bool(self._running_steps),
            f"{name} is called by fit, evaluate and predict: for a single batch, call train_on_batch, test_on_batch or "
            "predict_on_batch.",
        )
        return self._running_steps[-1]


def check_names(trainer: type, model: nn.Module, steps: OwnSteps) -> None:
    """Refuse steps under Lightning's names, and steps of the model, which nothing calls."""
    others = [(trainer, "training_step", TRAIN), (trainer, "validation_step", TEST), (trainer, "compute_loss", TRAIN)]
    others += [(type(model), "training_step", TRAIN), (type(model), TRAIN, TRAIN)]
    for owner, other, name in others:
        require(
            name in steps or not callable(getattr(owner, other, None)),
            f"{owner.__name__} has a {other}, and fit does not call it: make it {name}(self, batch) of a subclass of "
            f"DistributedTrainer, where self.model is the model, or pass a function of (trainer, batch) as {name}=.",
        )


def step_for(kind: str, steps: OwnSteps, model: nn.Module, loss: Loss) -> OwnStep | None:
    """Return the step of the user's own that trains, tests or predicts; None: the built-in one.

    Without a test_step the built-in one evaluates, if there is a loss_fn; otherwise the train_step, which knows the
    loss. Raises ConfigError if the model has no forward and there is no step, or if the step takes no batch.
    """
    found = steps.get(kind)
    # PyTorch's default `forward` is a function that raises.
    has_forward = getattr(model.forward, "__func__", None) is not nn.Module.forward
    if found is None and kind == TEST and not (has_forward and loss.function is not None):
        found = steps.get(TRAIN)
    if found is None and not has_forward:
        raise ConfigError(
            f"{type(model).__name__} has no forward, and the trainer no {kind}: give it one, a function of (trainer, "
            "batch) or a method of a subclass of DistributedTrainer; or give a model with a forward."
        )
    if found is not None and not takes(found.function, 1):
        parameters = ", ".join(["self", *inspect.signature(found.function).parameters])
        raise ConfigError(
            f"{type(found.trainer).__name__}.{found.name} takes ({parameters}), and is called with a batch alone: make "
            f"it {found.name}(self, batch)."
        )
    return found


class StepCall(ModelCall):
    """A call of the user's own step, with batches as the data give them, in the same precision.

    `target_name`: as `collate` finds it. The trainer's other modules, such as a teacher, go to the device.
    """

    def __init__(self, step: OwnStep, built_in: BuiltInStep, target_name: str | None, device: torch.device) -> None:
        self.precision = built_in.precision
        function = step.function.func if isinstance(step.function, partial) else step.function
        self.owners = [step.trainer, function]
        self.step = self._run
        self._own = step
        self._returns_loss = step.name != PREDICT
        self.running = built_in  # called by the trainer's methods while the step runs
        self._batch_name = target_name
        for attribute in vars(step.trainer).values():
            if isinstance(attribute, nn.Module):
                attribute.to(device)

    def describe_failure(self, shapes: str) -> str:
        """Return what failed, for an error of the dry run."""
        return f"{self._own.name} failed, tried on a batch of shape {shapes}"

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the step's result; `model`: in training, a function that runs the step."""
        call: Callable[[Any], Any] = self._run
        if not isinstance(model, nn.Module):
            call = partial(self._watched, model)
        elif torch.is_grad_enabled():  # the dry run of training
            call = self._tried
        given = as_given(Rows(batch.inputs, batch.targets, batch.weights), self._batch_name)
        return self.precision.run(call, given)

    def predict(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the step's result for a batch's inputs alone."""
        return self(model, Batch(batch.number, batch.inputs, None))

    def run_apart(self, batch: Batch, update: Update) -> None:
        """Run a step within the running one, which keeps its numbers; `optimize` calls `update`."""
        before = vars(self.running).copy()
        self.running.update = update
        try:
            self(self._run, batch)
        finally:
            vars(self.running).update(before)

    def _run(self, given: Any) -> Any:
        """Run the step; return its result, with a loss also if the step has called `optimize` instead."""
        own = self._own
        built_in = self.running
        own.running.append(built_in)  # where train_step and optimize of the trainer find it
        built_in.weight = None
        built_in.losses = []
        try:
            result = own.function(given)
        finally:
            own.running.pop()
        if self._returns_loss:
            if built_in.losses:
                result = self._with_optimized_loss(result)
            if not _has_loss(result):
                raise ConfigError(
                    f"{own.name} returned {_described(result)}, and no loss: return a tensor with one number, the mean "
                    'over this rank\'s samples; (sum, weight); or a dictionary with such a "loss".'
                )
            if isinstance(result, Mapping):
                self._warn_of_left_out(result)
        return result if built_in.weight is None else _weighted(result, built_in.weight)

    def _with_optimized_loss(self, result: Any) -> dict[str, Any]:
        """Return the result of a step that has called `optimize`; its own "loss" takes precedence."""
        self.optimizes = True
        built_in = self.running
        named: dict[str, Any] = {}
        if isinstance(result, Mapping):
            named.update(result)
        elif result is not None:
            named["loss"] = result
        if "loss" not in named:
            built_in.weight = None  # the loss that `optimize` returned is the mean over all ranks
        if len(built_in.losses) == 1 and built_in.pair is not None:
            return {"loss": built_in.pair, **named}
        return {"loss": sum(built_in.losses), **named}

    def _warn_of_left_out(self, result: Mapping[str, Any]) -> None:
        """Warn once of each part of a step's dictionary that is not a number: the history does not have it."""
        known = _RETURNED.setdefault(self._own.trainer, {"loss", "output"})
        if result.keys() <= known:
            return
        for name, value in result.items():
            if name not in known and value is not None and not is_scalar(value, flags=True):
                warn_together(f"{self._own.name} returned {name!r}, {_left_out(value)}.")
        known.update(result)

    def _refuse(self, call: str) -> None:
        raise ConfigError(
            f"{self._own.name} called {call}: return the loss, and fit does backward, averages the gradients over the "
            "ranks, and steps; or call self.optimize(loss). If the loss is computed from gradients, call "
            "torch.autograd.grad."
        )

    def _watched(self, call: Callable[[Any], Any], given: Any) -> Any:
        """Run the step in training; refuse a backward that it did not call in the dry run."""
        before = self._gradients()
        result = call(given)
        if not self.running.losses and self._gradients() != before:
            self._refuse("backward()")
        return result

    def _gradients(self) -> list[int]:
        """Return the identity and the version of each gradient, one of which a backward changes."""
        found = [parameter.grad for parameter in self._own.trainer.model.parameters()]
        # A backward that adds to a gradient in place changes its version and not its identity.
        return [*map(id, found), *torch_compat.versions_of([each for each in found if each is not None])]

    def _tried(self, given: Any) -> Any:
        """Run the step in the dry run; refuse a backward and an optimizer's step, which `fit` does itself."""
        before = self._gradients()
        hook = register_optimizer_step_pre_hook(lambda *_: self._refuse("an optimizer's step()"))
        self.running.update = self._try_update
        try:
            return self._run(given)
        finally:
            self.running.update = None
            hook.remove()
            if self._gradients() != before:
                self._refuse("backward()")  # also if the step then failed

    def _try_update(self, loss: Any, name: str, retain_graph: bool) -> Tensor:
        """Compute the gradients of a loss as an update would, without changing anything; return it, detached."""
        if not self.needs_all_rows:
            self.needs_all_rows = what_needs_all_rows(len(self.running.losses) + 1, loss)
        optimizer = self._own.trainer.optimizers[name]
        kind = type(optimizer).__name__
        if needs_closure(optimizer) and not callable(loss):
            raise ConfigError(
                f"{kind} evaluates the loss several times per step: give optimize a function that returns it, as in "
                "self.optimize(lambda: loss_fn(self.model(x), y))."
            )
        value, weight = checked_loss(_called(loss))
        parameters = [each for each in parameters_of(optimizer) if each.requires_grad]
        if parameters and torch.is_grad_enabled():  # they may be frozen, for a callback to unfreeze
            found: Sequence[Tensor | None] = ()
            if value.requires_grad:
                found = torch.autograd.grad(value, parameters, retain_graph=retain_graph, allow_unused=True)
            if all(each is None for each in found):
                raise ConfigError(
                    f"the loss of optimize does not depend on the parameters of the {described_name(name)} ({kind}): "
                    "compute it from their output, without detach(), item() or no_grad()."
                )
        return mean_of_loss(value, weight)


def _weighted(result: Any, weight: Tensor | float) -> Any:
    """Return a result with a loss, a mean that was computed from the built-in step's, as (sum, weight)."""
    if isinstance(result, Tensor):
        return result * weight, weight
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        return {**result, "loss": (result["loss"] * weight, weight)}
    return result


def _called(loss: Any) -> Any:
    return loss() if callable(loss) else loss


def checked_loss(loss: Any) -> tuple[Tensor, Any]:
    """Return (value, None) of a mean over samples, or (sum, weight)."""
    value = loss
    weight = None
    if type(loss) is tuple and len(loss) == 2:
        value, weight = loss
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"optimize was called with {_described(loss)}: give a tensor with one number, the mean over this rank's "
            "samples; (sum, weight); or a function that returns one of them."
        )
    return value.reshape(()), weight


def what_needs_all_rows(calls: int, loss: Any) -> str:
    """Return what excludes several micro-batches in a step, or ""; `calls`: of `optimize` so far."""
    if calls > 1:
        return "several calls of optimize"
    if callable(loss):
        return "a function of the loss"
    if isinstance(loss, tuple):
        return "(sum, weight)"
    return ""


def accumulation_excludes(what: str) -> str:
    """Return the error for a step with several micro-batches; `what` needs all samples at once."""
    return (
        f"a step has several micro-batches, and the train_step has {what}, which needs all samples of its step at "
        "once: set accumulation_steps=1, with a smaller batch_size if memory is short."
    )


def mean_of_loss(value: Tensor, weight: Any) -> Tensor:
    """Return the mean of a loss as `checked_loss` returns it, detached; 0 if its weight is 0."""
    if weight is None:
        return value.detach()
    return batch_loss_of((value.detach(), weight), 1).mean_or_zero


def _has_loss(result: Any) -> bool:
    try:
        return loss_in_output(result)[0] is not None
    except ConfigError:
        return False


def _left_out(value: Any) -> str:
    """Describe a part of a step's dictionary that the history cannot have, with a remedy."""
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return (
            f"{kind} of shape {[*value.shape]}, which is left out: return a number of it, such as its mean, or what "
            'metrics take as "output"'
        )
    remedy = "the history has numbers, by name"
    if isinstance(value, Mapping):
        remedy = "return its numbers by name"
    return f"of type {type(value).__name__}, which is left out: {remedy}"


def _described(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a dictionary with {', '.join(map(str, result)) or 'nothing'}"
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}"
    return brief(result)


def _as_returned(loss: BatchLoss) -> Any:
    """Return a number for the history: a mean over this rank's samples, or (sum, weight)."""
    counts_rows = not isinstance(loss.weight, Tensor) and not isinstance(loss.sum_factor, Tensor)
    if counts_rows and loss.sum_factor == loss.weight:
        return loss.value
    return loss.value * loss.sum_factor, loss.weight
