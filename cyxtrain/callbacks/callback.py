"""The base class of callbacks: Keras's hooks, called on every rank at the same points of a fit.

on_train_begin -> on_fit_start (the state of a resumed fit is restored)
               -> for each epoch: on_epoch_begin -> for each step: on_train_batch_begin, on_before_optimizer_step,
                  on_train_batch_end
               -> on_test_begin -> for each batch: on_test_batch_begin, on_test_batch_end -> on_test_end (validation)
               -> on_validation_end -> on_epoch_end -> ... -> on_train_end
evaluate:         on_test_begin -> ... -> on_test_end
predict:          on_predict_begin -> for each batch: on_predict_batch_begin, on_predict_batch_end -> on_predict_end

A validation within an epoch follows the on_train_batch_end of a step. on_checkpoint follows a step, an epoch or the
last step, on rank 0.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import nn

from cyxtrain.checkpoint.format.encoding import same_kinds
from cyxtrain.checkpoint.validation import restoring_from
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import names_checked, require_constructed, takes, unknown_name
from cyxtrain.errors import CheckpointError, ConfigError, brief, reason_of, warn, warn_together
from cyxtrain.progress.history import TrainingHistory

Logs = Mapping[str, float]


class Trainer(Protocol):
    """The part of the `DistributedTrainer` that callbacks may use; the trainer's docstrings describe it."""

    model: nn.Module
    stop_training: bool
    stop_evaluating: bool
    stop_predicting: bool

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]: ...
    @property
    def trained(self) -> nn.Module: ...
    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def config(self) -> DistributedTrainingConfig: ...
    @property
    def scheduler(self) -> Any: ...
    @property
    def schedulers(self) -> dict[str, Any]: ...
    @property
    def step_seconds(self) -> list[dict[str, float]]: ...
    @property
    def device_usage(self) -> dict[str, float]: ...
    @property
    def metrics(self) -> dict[str, Any]: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def history(self) -> TrainingHistory: ...

    def set_learning_rates(self, rates: Sequence[float]) -> None: ...
    def log(self, *arguments: Any, **named: Any) -> None: ...
    def evaluate(self, *arguments: Any, **named: Any) -> Any: ...
    def predict(self, *arguments: Any, **named: Any) -> Any: ...
    def save_checkpoint(self, path: str | os.PathLike[str]) -> None: ...
    def is_master(self) -> bool: ...
    def get_rank(self) -> int: ...
    def get_world_size(self) -> int: ...


class Callback:
    """Base class of callbacks: override the hooks that you need; names and arguments are Keras's.

    Every rank has its own callbacks and calls them at the same points. To stop the fit on all ranks, set
    `self.trainer.stop_training = True` on any rank: from `on_epoch_end` it stops after that epoch; from
    `on_train_batch_end` after the next step (on several accelerators: the one after it), and the epoch ends there.
    A collective, such as `trainer.evaluate`, must be called on all ranks. Put callbacks that save last: later
    ones have not seen the epoch yet.

    On an accelerator `on_train_batch_end` may run before the loss and gradients of the step are known to be finite; if
    they are not, the step was skipped (docs/exactness.md).

    `self.trainer.stop_evaluating` and `self.trainer.stop_predicting`, set on any rank during a batch, end an evaluation
    or a prediction after it, or after the batches that the other ranks compute at the same time.

    Epochs and batches count from 0, as in Keras; a second fit continues the count. Logs of an epoch hold "loss",
    "accuracy" (for class targets) and, with validation, "val_loss" and "val_accuracy", over all ranks and the same on
    each. Logs of a batch are means over this rank's part of the epoch so far, computed only when you read them.

    Attributes:
        trainer: The trainer that calls it.
        params: "epochs" (the last one, from 1), "steps" (per epoch), "samples_per_step" (over all ranks),
            "warmup_steps", "verbose", whether there is "validation", names of its "sets" and of "metrics" in the logs
            of an epoch, for which of them "larger_is_better", and from `on_train_begin` on a "data_hash" of some of the
            training data.
    """

    trainer: Trainer
    params: dict[str, Any]
    belongs_on_all_ranks = False
    """Whether every rank must have it, because it changes the model or calls collectives; otherwise `fit` raises."""
    stays_in_notebook = False
    """Whether it stays in the notebook while worker processes train (`num_processes`), to draw or to ask. Its hooks for
    training, epochs and validation are called as on rank 0; its hooks for batches are not, and the weights arrive at
    the end. Without workers it is an ordinary callback."""
    restored_with_best = False
    """Whether `fit(load_best=True)` restores its state, too, before `on_train_end`."""
    runs_last = False
    """Whether its hooks, except the hooks of batches, run after the other callbacks'; its `on_epoch_end` then sees the
    numbers that they have logged."""
    validates_own_weights = False
    """Whether validation uses weights that it puts into the model, from `on_test_begin` to `on_test_end`, or within a
    `with` block by `applied()`: what keeps the best weights then keeps these."""
    _validated: Callback | None = None  # the callback of this fit whose weights validation uses
    ends_on_nonfinite = False
    """Whether a non-finite loss or gradient stops the fit normally instead of raising."""
    stop_reason = ""
    """Why it stops the fit, for the line that rank 0 prints; "": its class name."""
    writes_to = ""
    """Name of the attribute with the path at which it writes a log. If it raises OSError then, training continues, with
    one warning."""
    _saved: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that are its state."""
    _is_constructed = True
    """Whether our constructor has run, if it has one."""

    def __init_subclass__(cls) -> None:
        """Let our own constructors refuse unknown arguments as `fit` does, with a suggestion."""
        if cls.__module__.startswith(f"{__package__}.") and "__init__" in vars(cls):
            cls._is_constructed = False
            cls.__init__ = _noting(names_checked(cls.__init__))  # type: ignore[method-assign]

    @property
    def model(self) -> nn.Module:
        """The model that is trained, not wrapped."""
        return self.trainer.model

    def set_trainer(self, trainer: Trainer) -> None:
        """Set the trainer; it is called before the other methods."""
        self.trainer = trainer

    def set_params(self, params: dict[str, Any]) -> None:
        """Set the parameters of a fit that is planned, and again before `on_train_begin`; may raise a ConfigError."""
        self.params = params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """A fit starts; if it resumes, `load_state_dict` follows, with model and optimizer restored."""

    def on_fit_start(self, resumed: bool) -> None:
        """The first epoch, or the rest of one, is about to start; `resumed`: from a checkpoint, which is restored."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint of `fit` is complete on the disk; called on rank 0 alone, soon after, in the training thread.

        The last one's call comes before `on_train_end`, and also if the fit is stopped. `keep_last` may remove the
        file when later ones are complete. Files that `save_checkpoint` or a callback writes are not reported.
        """

    def on_train_end(self, logs: Logs | None = None) -> None:
        """The fit is complete, not interrupted; logs hold the numbers of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch starts; not called if a fit resumes in the middle of it."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch is complete, with its validation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A step starts."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A step is done; logs are means over this rank's samples since the epoch began."""

    def on_before_optimizer_step(self, batch: int, logs: Logs | None = None) -> None:
        """Gradients are averaged over all ranks and finite, not yet clipped; the step has not been taken."""

    def on_exception(self, exception: BaseException) -> None:
        """An error or a second Ctrl-C ends the fit on this rank."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """A validation, or `evaluate`, starts."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch of the validation or `evaluate` starts, from 0; ranks may have different numbers of batches."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A batch of the validation or `evaluate` is done; logs are means over this rank's batches so far."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """A validation, or `evaluate`, is done; logs hold its metrics, or nothing if the fit stopped in it."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """`predict` starts."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch of `predict` starts, from 0; ranks may have different numbers of batches."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """A batch of `predict` is done; logs hold its "outputs", as the model returned them."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """`predict` is done."""

    def on_validation_end(self, epoch: int, logs: Logs | None = None) -> None:
        """A validation is complete, within an epoch or at its end; logs have "val_loss" and others.

        It is the last row of `trainer.history.validations`. `stop_training` stops the fit after this step.
        """

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Put the weights of this callback into the model within a `with` block, if `validates_own_weights`."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Close files: the fit has ended, in whatever way."""

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's state for checkpoints: tensors, numbers, strings, lists, tuples and dictionaries."""
        # Copies: a checkpoint is written while training continues.
        return {name: copy.copy(getattr(self, name)) for name in self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, when a fit resumes."""
        for name in self._saved:
            setattr(self, name, state[name])


class BatchLogs(Mapping[str, float]):
    """Logs whose values are computed when they are read; `look` returns a function for each."""

    def __init__(self, look: Callable[[], dict[str, Callable[[], float]]]) -> None:
        self._look = look
        self._numbers: dict[str, Callable[[], float]] | None = None
        self._found: dict[str, float] = {}

    @property
    def _each(self) -> dict[str, Callable[[], float]]:
        if self._numbers is None:
            self._numbers = self._look()
        return self._numbers

    def close(self) -> None:
        """Refuse later reads: they would return the values of a later step."""
        self._look = _refuse_late_reading
        if self._numbers is not None:
            self._numbers = dict.fromkeys(self._numbers, _refuse_late_reading)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __bool__(self) -> bool:
        return True  # without computing

    def __getitem__(self, name: str) -> float:
        number = self._each[name]
        if name not in self._found:
            self._found[name] = number()
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)


class Callbacks:
    """The callbacks of a fit on this rank, in their order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self.stop_reason = ""
        """Why the latest callback to set `stop_training` did so; "": none has."""
        self._unwritten: list[Callback] = []
        self._overriding = {hook: [each for each in self._callbacks if _overrides(each, hook)] for hook in _HOOKS}
        self._validated = [each for each in self._callbacks if each.validates_own_weights]
        if len(self._validated) > 1:
            names = " and ".join(type(each).__name__ for each in self._validated)
            raise ConfigError(f"validation uses one average, and {names} have one: set validates=False in the others.")

    def set_trainer(self, trainer: Trainer, params: dict[str, Any]) -> None:
        """Set the trainer and the parameters of each callback."""
        for callback in self._callbacks:
            callback.set_trainer(trainer)
            callback._validated = next(iter(self._validated), None)
            callback.set_params(dict(params))

    def call(self, hook: str, *arguments: Any, last: bool | None = None) -> None:
        """Call a hook, by its name, of each callback, or only of those whose `runs_last` is `last`.

        If a "test" or "predict" begins, withdraw earlier requests to end it.
        """
        kind = hook.removeprefix("on_").removesuffix("_begin")
        if kind in _FLAGS:
            self.withdraw_end(kind)
        # Sorting is stable: otherwise the user's order holds.
        for callback in sorted(self._callbacks, key=lambda each: each.runs_last):
            if last is None or callback.runs_last is last:
                self._run(callback, hook, *arguments)

    @property
    def may_log(self) -> bool:
        """Whether the user passed a callback of their own, which may log numbers."""
        kinds = {type(callback) for callback in self._callbacks}
        return any(kind is LambdaCallback or not kind.__module__.startswith("cyxtrain.") for kind in kinds)

    @property
    def on_all_ranks(self) -> list[str]:
        """The names of the callbacks that every rank must have."""
        return [name for name, callback in self._named() if callback.belongs_on_all_ranks]

    @property
    def end_on_nonfinite(self) -> bool:
        """Whether a callback stops the fit at a non-finite value."""
        return any(each.ends_on_nonfinite for each in self._callbacks)

    @property
    def before_optimizer_step(self) -> Callable[[int], None] | None:
        """A function that calls this hook of the callbacks that override it; None: none does."""
        if not self._overriding["on_before_optimizer_step"]:
            return None
        return self._on_before_optimizer_step

    def _on_before_optimizer_step(self, batch: int) -> None:
        for callback in self._overriding["on_before_optimizer_step"]:
            callback.on_before_optimizer_step(batch, {})

    def on_exception(self, exception: BaseException) -> None:
        """Call the hook of each callback; ignore errors in it."""
        for callback in self._callbacks:
            # The exception that ends the fit matters more than an error while it is handled.
            with contextlib.suppress(Exception):
                callback.on_exception(exception)

    def may_end(self, kind: str) -> bool:
        """Return whether a callback has hooks of the batches of a "test" or "predict", or asks to end it."""
        has_hooks = self._overriding[f"on_{kind}_batch_begin"] or self._overriding[f"on_{kind}_batch_end"]
        return bool(has_hooks) or self.wants_end(kind)

    def withdraw_end(self, kind: str) -> None:
        """Withdraw earlier requests of callbacks to end a "test" or "predict"."""
        if self._callbacks:
            setattr(self._callbacks[0].trainer, _FLAGS[kind], False)

    def wants_end(self, kind: str) -> bool:
        """Return whether a callback asks to end a "test" or "predict"."""
        if not self._callbacks:
            return False
        flag = _FLAGS[kind]
        first = self._callbacks[0]
        # Keras's way is to set it on the model: `self.model.stop_evaluating = True`.
        if vars(first.model).pop(flag, False):
            setattr(first.trainer, flag, True)
        return bool(getattr(first.trainer, flag))

    def on_batch_begin(self, kind: str, batch: int) -> None:
        """Call the hook of a batch of a "train", "test" or "predict", of the callbacks that override it."""
        for callback in self._overriding[f"on_{kind}_batch_begin"]:
            self._run(callback, f"on_{kind}_batch_begin", batch, {})

    def on_batch_end(self, kind: str, batch: int, look: Callable[[], dict[str, Callable[[], Any]]]) -> None:
        """Call the hook of a batch, of the callbacks that override it, with logs of `look`."""
        hook = f"on_{kind}_batch_end"
        callbacks = self._overriding[hook]
        if callbacks:
            with contextlib.closing(BatchLogs(look)) as logs:
                for callback in callbacks:
                    self._run(callback, hook, batch, logs)

    def close(self) -> None:
        """Close each callback."""
        with contextlib.ExitStack() as stack:  # a stack closes all of them, even if one raises
            for callback in self._callbacks:
                stack.callback(self._writing, callback, callback.close)

    def _run(self, callback: Callback, hook: str, *arguments: Any) -> None:
        """Call a hook; note a request to stop, also Keras's: `self.model.stop_training = True`."""
        had_asked = callback.trainer.stop_training
        self._writing(callback, getattr(callback, hook), *arguments)
        if vars(callback.model).pop("stop_training", False):
            callback.trainer.stop_training = True
        if callback.trainer.stop_training and not had_asked:
            self.stop_reason = callback.stop_reason or f"{type(callback).__name__} set stop_training"

    def _writing(self, callback: Callback, call: Callable[..., object], *arguments: Any) -> None:
        """Call a method; warn once instead of raising if a log cannot be written."""
        try:
            call(*arguments)
        except (OSError, CheckpointError) as error:  # the latter from files that are replaced as a whole
            if not callback.writes_to:
                raise
            if callback not in self._unwritten:
                self._unwritten.append(callback)
                path = os.fsdecode(getattr(callback, callback.writes_to))
                reason = reason_of(error.__cause__ or error).rstrip(".")
                warn(f"{type(callback).__name__} cannot write {path}: {reason}. Training continues.")

    def state_dict(self) -> dict[str, Any]:
        """Return the states by class name and, from the second of a class on, number."""
        states = {name: callback.state_dict() for name, callback in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Restore the states of the checkpoint named `source`; warn of states without a callback, and return them."""
        left = dict(states)
        for name, callback in self._named():
            if name not in left:
                continue
            with restoring_from(f"{source}, {name}"):
                state = left.pop(name)
                # A user's callback checks its own state.
                is_own = type(callback).__module__.startswith(f"{__package__}.")
                if is_own and not same_kinds(state, callback.state_dict()):
                    raise TypeError(f"its state is {brief(state)}")
                self._writing(callback, callback.load_state_dict, state)
        if left:
            warn_together(
                f"{source} has the state of {', '.join(left)}, but fit has no such callback: the run may continue "
                "differently."
            )
        return left

    def load_best(self, states: Mapping[str, Any], source: str) -> None:
        """Restore the states of the best checkpoint that belong to its weights."""
        for name, callback in self._named():
            if callback.restored_with_best and name in states:
                with restoring_from(f"{source}, {name}"):
                    callback.load_state_dict(states[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts: Counter[str] = Counter()
        for callback in self._callbacks:
            name = type(callback).__name__
            counts[name] += 1
            # Checkpoints keep the states of two callbacks of one class apart by this number.
            if counts[name] > 1:
                name = f"{name} {counts[name]}"
            yield name, callback


def checked_callbacks(callbacks: Any) -> list[Callback]:
    """Return the callbacks that a user passed: one, several, or None."""
    if callbacks is None:
        return []
    is_one = isinstance(callbacks, (Callback, type, str, Mapping)) or not isinstance(callbacks, Iterable)
    found = [callbacks] if is_one else list(callbacks)
    for callback in found:
        _require_callback(callback)
        # The user's class may derive from one of ours, whose constructor must have run.
        own = next(cls for cls in type(callback).__mro__ if cls.__module__.startswith(f"{__package__}."))
        require_constructed(callback._is_constructed, callback, own.__name__)
        _check_methods(callback)
    return found


def _require_callback(callback: object) -> None:
    if isinstance(callback, Callback):
        return
    if isinstance(callback, type):
        got = f"the class {callback.__name__}: pass an object, callbacks=[{callback.__name__}(...)]."
    else:
        got = (
            f"{brief(callback)} (a {type(callback).__name__}). cyxtrain.callbacks has EarlyStopping and others; "
            "a function goes in a LambdaCallback, and a class of yours derives from Callback."
        )
    raise ConfigError(f"callbacks must be instances of cyxtrain.callbacks.Callback, got {got}")


def _check_methods(callback: Callback) -> None:
    """Refuse unknown hooks, and methods with other parameters than a fit passes."""
    for name in dir(callback):
        if name.startswith("on_") and name not in _HOOKS:
            raise unknown_name(type(callback).__name__, name, list(_HOOKS), "hook named")
        if name in _CALLED:
            _check_parameters(callback, name)


def _check_parameters(callback: Callback, name: str) -> None:
    method = getattr(callback, name)
    function = getattr(method, "__func__", method)
    if function is getattr(Callback, name) or takes(method, len(_CALLED[name])):
        return
    has = f"takes {inspect.signature(function)}" if callable(method) else f"is {brief(method)}"
    passed = _CALLED[name]
    parameters = ["self", *passed] if inspect.ismethod(method) else passed
    raise ConfigError(
        f"{type(callback).__name__}.{name} {has}, and fit passes ({', '.join(passed)}): define "
        f"{name}({', '.join(parameters)}). The trainer is self.trainer."
    )


def _noting(construct: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of ours that notes in the callback that it has run."""

    @functools.wraps(construct)
    def call(callback: Callback, *arguments: Any, **named: Any) -> None:
        construct(callback, *arguments, **named)
        callback._is_constructed = True

    return call


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


def _refuse_late_reading() -> NoReturn:
    raise ConfigError("logs of a batch can be read only while its hook runs; keep a copy, dict(logs), for later.")


_CALLED = {
    name: [*inspect.signature(each).parameters][1:] for name, each in vars(Callback).items() if inspect.isfunction(each)
}
"""The parameters of the methods that a fit calls."""
_HOOKS = [name for name in _CALLED if name.startswith("on_")]
# The attribute of the trainer by which a callback ends an evaluation or a prediction.
_FLAGS = {"test": "stop_evaluating", "predict": "stop_predicting"}


class LambdaCallback(Callback):
    """A callback made of functions; Keras's arguments.

    Args:
        **hooks: A function for each hook, by the hook's name and with its arguments.

    Raises:
        ConfigError: There is no such hook, or a value is not a function.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise unknown_name("LambdaCallback", name, list(_HOOKS), "hook named")
            if not callable(function):
                raise ConfigError(f"LambdaCallback.{name} must be a function, got {function!r}.")
            setattr(self, name, function)
