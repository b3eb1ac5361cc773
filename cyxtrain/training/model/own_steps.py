"""Steps of the user's own: `train_step`, `test_step` and `predict_step` in the place of the built-in ones.

A step takes a batch and returns its loss, as a model without a loss_fn does: what holds for such a model, such as
(sum, weight), scalars in the history, accumulation and ranks without rows, holds for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cyxtrain.config.settings import require, unknown_name
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.collate import as_given, batch_parts
from cyxtrain.data.batches.rows import Rows
from cyxtrain.errors import ConfigError, brief
from cyxtrain.metrics.find_accuracy import find_accuracy
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.sums import correct_of
from cyxtrain.metrics.weighting import BatchLoss, Weighting, is_scalar, loss_in_output
from cyxtrain.optim.optimizers import described_name, needs_closure, parameters_of
from cyxtrain.optim.precision import Precision
from cyxtrain.training.model.forward import ModelCall

StepLike = Callable[[Any, Any], Any] | None
"""A function of (trainer, batch)."""

TRAIN, TEST, PREDICT = ("train_step", "test_step", "predict_step")
_OTHER_NAMES = {"training_step": TRAIN, "validation_step": TEST}
"""Lightning's."""


class BuiltIn:
    """The built-in step: the model's forward, and the loss_fn if there is one.

    Args:
        model: Not wrapped.
        loss: Of the trainer.
        precision: Of forward; the loss is computed in full precision.
    """

    def __init__(self, model: nn.Module, loss: Loss, precision: Precision) -> None:
        self._model = model
        self._loss = loss
        self.precision = precision
        self._call: ModelCall | None = None

    def __call__(self, given: Any) -> dict[str, Any]:
        """Return "loss" and what else the built-in step measures of a batch, and the model's "output"."""
        loss, batch, is_first = self._loss, Batch(0, *batch_parts(given)), self._call is None
        output = self._call_for(batch, loss)(self._model, batch)
        with self.precision.suspended():
            if is_first:
                loss.check_shapes(output, batch.targets)
                result = output if loss.function is None else loss.function(output, batch.targets)
                loss.inspect_result(result, batch.rows)
            found = loss(output, batch)
        if is_first:
            _check_is_mean(loss, found)
            loss.accuracy = find_accuracy(loss, output, batch.answers, found.mean.detach(), asked=False)
        measured = {name: _as_returned(part) for name, part in found.parts.items()}
        if loss.accuracy is not None and "accuracy" not in measured:
            measured["accuracy"] = tuple(correct_of(output, batch.answers, loss))
        shown = loss.without_own(output)
        return {"loss": _as_returned(found), **measured, **({} if is_scalar(shown) else {"output": shown})}

    def predict(self, given: Any) -> Any:
        """Return the model's output for a batch's inputs."""
        batch = Batch(0, *batch_parts(given))
        return self._call_for(batch, None).predict(self._model, batch)

    def _call_for(self, batch: Batch, loss: Loss | None) -> ModelCall:
        if self._call is None:
            targets = None if loss is None else batch.targets
            self._call = ModelCall(self._model, self.precision, batch.inputs, targets, loss)
        return self._call


Update = Callable[[Any, str, bool], Tensor]
"""Updates the parameters of the optimizer of that name by a loss; returns the loss, detached."""


class RunningStep:
    """What a trainer's methods call while a step of the user's own runs.

    Attributes:
        built_in: The built-in step.
        update: What `optimize` does; None: nothing, in an evaluation.
        losses: Of the step, those that `optimize` was called with.
    """

    def __init__(self) -> None:
        self.built_in: BuiltIn | None = None
        self.update: Update | None = None
        self.losses: list[Tensor] = []

    def optimize(self, loss: Any, name: str | None, known: Sequence[str], *, retain_graph: bool) -> Tensor:
        """Call `update`; return the loss, detached."""
        if self.built_in is None:
            raise ConfigError("optimize is called by a train_step that fit runs: pass train_step=, or override it.")
        if self.update is None:
            value, weight = checked_loss(loss() if callable(loss) else loss)
            self.losses.append(value.detach() if weight is None else value.detach() / weight)
            return self.losses[-1]
        if name is None:
            require(len(known) == 1, f"optimize needs the name of one of the optimizers: {', '.join(known)}.")
            name = known[0]
        if name not in known:
            raise unknown_name("the trainer", str(name), [*known], "optimizer")
        self.losses.append(self.update(loss, name, retain_graph))
        return self.losses[-1]

    def required(self, name: str) -> BuiltIn:
        """Return it; raise ConfigError if no step runs."""
        if self.built_in is None:
            raise ConfigError(
                f"{name} is called by fit, evaluate and predict: for a single batch, call train_on_batch, "
                "test_on_batch or predict_on_batch."
            )
        return self.built_in


class OwnStep(NamedTuple):
    """A step of the user's own.

    Attributes:
        name: "train_step", "test_step" or "predict_step".
        function: Takes a batch.
        trainer: Whose step it is.
        running: Of that trainer.
    """

    name: str
    function: Callable[[Any], Any]
    trainer: Any
    running: RunningStep

    @property
    def owners(self) -> list[Any]:
        """The objects that the step may change."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return [self.trainer, function]


OwnSteps = Mapping[str, OwnStep]
"""By name; the built-in ones are not in it."""


class TrainerSteps:
    """The steps of a trainer, which a subclass may override."""

    def __init__(self, train_step: StepLike, test_step: StepLike, predict_step: StepLike) -> None:
        self._given_steps = {TRAIN: train_step, TEST: test_step, PREDICT: predict_step}
        for name, step in self._given_steps.items():
            is_step = step is None or callable(step)
            require(is_step, f"{name} must be a function of (trainer, batch), got {brief(step)}.")
        self._running_step = RunningStep()

    @property
    def _own_steps(self) -> OwnSteps:
        """The steps that the trainer was given, called with it first, or has by subclass."""
        found: dict[str, OwnStep] = {}
        for name, given in self._given_steps.items():
            method = getattr(self, name)
            if given is not None:
                found[name] = OwnStep(name, partial(given, self), self, self._running_step)
            elif getattr(method, "__func__", None) is not vars(TrainerSteps)[name]:
                found[name] = OwnStep(name, method, self, self._running_step)
        return found

    def train_step(self, batch: Any) -> Any:
        """Return the loss of a batch; `fit` then does backward and step. Override it for a step of your own.

        Args:
            batch: (x, y), (x, y, sample_weight) or (x,), as far as the data have them; a dictionary, if the data give
                such. On the device.

        Returns:
            A dictionary with "loss" (the mean over this rank's rows, or (sum, weight)), "output" (of the model, which
            metrics compare with y) and numbers for the history, such as "accuracy". A step of your own may return the
            loss alone.

        Raises:
            ConfigError: Called by other code than a step.
        """
        return self._running_step.required(TRAIN)(batch)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; an only one is called "optimizer"."""
        raise NotImplementedError

    def optimize(self, loss: Any, optimizer: str | None = None, *, retain_graph: bool = False) -> Tensor:
        """Update the parameters of one optimizer by the gradients of a loss, in a `train_step` of your own.

        The gradients of these parameters alone are computed, averaged over all ranks, checked for NaN, and clipped;
        the optimizer steps, and they are cleared. All ranks make the same calls. In an evaluation, nothing is updated.

        Args:
            loss: The mean over this rank's rows, (sum, weight), or a function that returns one of them, for optimizers
                that evaluate the loss several times: it is called with gradients cleared, and the optimizer sees loss
                and gradients over all ranks.
            optimizer: A name of `optimizers`; None: the only one.
            retain_graph: Keep the graph for another loss that shares it.

        Returns:
            The loss, detached: for (sum, weight) and functions, the mean over all ranks.

        Raises:
            ConfigError: The loss or the name is wrong, or no step runs.
            NonFiniteError: The loss or a gradient is not finite on any rank, and `on_nonfinite` is "raise".
        """
        known = [*self.optimizers] if self._running_step.update is not None else []
        return self._running_step.optimize(loss, optimizer, known, retain_graph=retain_graph)

    def test_step(self, batch: Any) -> Any:
        """Return the loss of a batch of `evaluate` or of the validation data, as `train_step`; without gradients.

        Args:
            batch: As in `train_step`.

        Raises:
            ConfigError: Called by other code than a step.
        """
        return self._running_step.required(TEST)(batch)

    def predict_step(self, batch: Any) -> Any:
        """Return the model's output for a batch of `predict`. Override it for a prediction of your own.

        Args:
            batch: (x,), or a dictionary, if the data give such; without targets.

        Raises:
            ConfigError: Called by other code than a step.
        """
        return self._running_step.required(PREDICT).predict(batch)


def check_names(trainer: type, model: nn.Module, steps: OwnSteps) -> None:
    """Refuse steps under other libraries' names or in other places, which nothing calls."""
    for other, name in _OTHER_NAMES.items():
        require(
            name in steps or not callable(getattr(trainer, other, None)),
            f"{trainer.__name__} has a {other}, and fit does not call it: rename it to {name}(self, batch).",
        )
    kind = type(model)
    wrong = [name for name in (TRAIN, "training_step") if callable(getattr(kind, name, None))]
    require(
        not wrong or TRAIN in steps,
        f"{kind.__name__} has a {''.join(wrong[:1])}, and fit does not call it: steps are the trainer's. Rename it to "
        "train_step(self, batch) and move it to a subclass of DistributedTrainer, where self.model is the model; or "
        "pass it as train_step=, a function of (trainer, batch).",
    )


def step_for(kind: str, steps: OwnSteps, model: nn.Module, loss: Loss) -> OwnStep | None:
    """Return the step of the user's own that trains, tests or predicts; None: the built-in one.

    Without a test_step the built-in one evaluates, if there is a loss_fn; otherwise the train_step, which knows the
    loss. Raises ConfigError if the model has no forward and there is no step.
    """
    found, has_forward = steps.get(kind), type(model).forward is not nn.Module.forward
    if found is None and kind == TEST and not (has_forward and loss.function is not None):
        found = steps.get(TRAIN)
    if found is None and not has_forward:
        raise ConfigError(
            f"{type(model).__name__} has no forward, and the trainer no {kind}: give it one, a function of (trainer, "
            "batch) or a method of a subclass of DistributedTrainer; or give a model with a forward."
        )
    return found


class StepCall(ModelCall):
    """Calls a step of the user's own with batches of one form, as the data give them.

    Args:
        step: What is called.
        built_in: What `super().train_step(batch)` runs, in the precision of the whole step.
        target_name: Of the data's batches, as `collate.target_name` has it.
        device: Where the trainer's other modules go, such as a teacher.
    """

    def __init__(self, step: OwnStep, built_in: BuiltIn, target_name: str | None, device: torch.device) -> None:
        self.precision = built_in.precision
        self.differentiates = False
        self.left_out, self.names_differ = [], ""
        self.owners = step.owners
        self.step = self._run
        self._own = step
        self._returns_loss = step.name != PREDICT
        self._built_in = built_in
        self._batch_name = target_name
        for held in vars(step.trainer).values():
            if isinstance(held, nn.Module):
                held.to(device)

    def describe_failure(self, shapes: str) -> str:
        """Return what failed, for an error of the dry run."""
        return f"{self._own.name} failed, tried on a batch of shape {shapes}"

    def describe_step(self) -> str:
        """Return the name of the function."""
        function = self._own.owners[1]
        return str(getattr(function, "__qualname__", type(function).__name__))

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return what the step returns; `model`: not wrapped, or what wraps the step."""
        call = model
        if isinstance(model, nn.Module):
            call = partial(self._tried, model) if torch.is_grad_enabled() else self._run
        given = as_given(Rows(batch.inputs, batch.targets, batch.weights), self._batch_name)
        if self.precision.is_full:
            return call(given)
        with self.precision.computing():
            result = call(given)
        return self.precision.widened(result)

    def predict(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return what the step returns for a batch's inputs alone."""
        return self(model, Batch(batch.number, batch.inputs, None))

    def missing(self, model: nn.Module, inputs: Any) -> list[str]:
        """Return []: the step knows what the model requires."""
        return []

    @property
    def running(self) -> RunningStep:
        """What the trainer's methods call."""
        return self._own.running

    def _run(self, given: Any) -> Any:
        own, running = self._own, self._own.running
        running.built_in, running.losses = self._built_in, []
        try:
            result = own.function(given)
        finally:
            running.built_in = None
        if running.losses and self._returns_loss:
            self.optimizes = True
            named = result if isinstance(result, Mapping) else {} if result is None else {"loss": result}
            result = {"loss": sum(running.losses), **named}
        if self._returns_loss and not _has_loss(result):
            raise ConfigError(
                f"{own.name} returned {_described(result)}, and no loss: return a tensor with one number, the mean "
                'over this rank\'s rows; (sum, weight); or a dictionary with such a "loss".'
            )
        return result

    def _tried(self, model: nn.Module, given: Any) -> Any:
        """Run the step in the dry run; refuse what `fit` does itself."""
        name, before = self._own.name, [parameter.grad for parameter in model.parameters()]

        def refuse(*_: Any) -> None:
            raise ConfigError(
                f"{name} called an optimizer's step(): return the loss, and fit does backward and step; or call "
                "self.optimize(loss)."
            )

        def update(loss: Any, name: str, retain_graph: bool) -> Tensor:
            self.alone = self.alone or what_needs_all_rows(len(self.running.losses) + 1, loss)
            return try_update(self._own.trainer.optimizers[name], loss, name, retain_graph=retain_graph)

        def check_gradients() -> None:
            if any(each.grad is not old for each, old in zip(model.parameters(), before, strict=True)):
                raise ConfigError(
                    f"{name} called backward(): return the loss, and fit does backward, averages the gradients over "
                    "the ranks, and steps. For gradients that the loss is made of, call torch.autograd.grad."
                )

        hook, self.running.update = register_optimizer_step_pre_hook(refuse), update
        with contextlib.ExitStack() as stack:
            stack.callback(check_gradients)  # also if the step then failed
            stack.callback(hook.remove)
            stack.callback(setattr, self.running, "update", None)
            return self._run(given)


def checked_loss(loss: Any) -> tuple[Tensor, Any]:
    """Return (value, None) of a mean over rows, or (sum, weight)."""
    value, weight = loss if type(loss) is tuple and len(loss) == 2 else (loss, None)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"optimize was called with {_described(loss)}: give a tensor with one number, the mean over this rank's "
            "rows; (sum, weight); or a function that returns one of them."
        )
    return value.reshape(()), weight


def what_needs_all_rows(calls: int, loss: Any) -> str:
    """Return what a step with several micro-batches cannot do, in words, or ""; `calls`: of optimize in this step."""
    if calls > 1:
        return "several calls of optimize"
    return "a function of the loss" if callable(loss) else "(sum, weight)" if isinstance(loss, tuple) else ""


def accumulation_excludes(what: str) -> str:
    """Return the error for a step with several micro-batches that has `what` needs all rows at once."""
    return (
        f"a step has several micro-batches, and the train_step has {what}, which needs all rows of its step at once: "
        "set accumulation_steps=1, with a smaller batch_size if memory is short."
    )


def try_update(optimizer: torch.optim.Optimizer, loss: Any, name: str, *, retain_graph: bool) -> Tensor:
    """Compute the gradients of a loss as an update would, without changing anything; return it, detached."""
    kind = type(optimizer).__name__
    if needs_closure(optimizer) and not callable(loss):
        raise ConfigError(
            f"{kind} evaluates the loss several times per step: give optimize a function that returns it, as in "
            "self.optimize(lambda: loss_fn(self.model(x), y))."
        )
    value, weight = checked_loss(loss() if callable(loss) else loss)
    parameters = [each for each in parameters_of(optimizer) if each.requires_grad]
    if torch.is_grad_enabled():
        found: Sequence[Tensor | None] = ()
        if value.requires_grad and parameters:
            found = torch.autograd.grad(value, parameters, retain_graph=retain_graph, allow_unused=True)
        if all(each is None for each in found):
            raise ConfigError(
                f"the loss of optimize does not depend on the parameters of the {described_name(name)} ({kind}): "
                "compute it from their output, without detach(), item() or no_grad()."
            )
    return value.detach() if weight is None else value.detach() / weight


def _has_loss(result: Any) -> bool:
    try:
        return loss_in_output(result)[0] is not None
    except ConfigError:
        return False


def _described(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a dictionary with {', '.join(map(str, result)) or 'nothing'}"
    return f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else brief(result)


def _as_returned(loss: BatchLoss) -> Any:
    """Return a loss as a mean over this rank's rows, or (sum, weight)."""
    counts_rows = not isinstance(loss.weight, Tensor) and not isinstance(loss.terms, Tensor)
    return loss.value if counts_rows and loss.terms == loss.weight else (loss.value * loss.terms, loss.weight)


def _check_is_mean(loss: Loss, found: BatchLoss) -> None:
    kinds = {kind for _, kind, _ in loss.terms(found)}
    several = bool(loss.weightings) and Weighting.TERMS in kinds
    if Weighting.NOTHING in kinds or several:
        what = "several losses, of which one is a weighted mean" if several else "a sum (reduction='sum')"
        raise ConfigError(
            f"loss_fn is {what}, and the built-in step returns one mean to a step of your own: compute the loss there, "
            "and return (sum, weight)."
        )
