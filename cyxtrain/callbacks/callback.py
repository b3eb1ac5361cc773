"""What a user hangs into a fit: Keras's hooks, called on every rank at the same points.

on_train_begin -> for each epoch: on_epoch_begin -> for each step: on_train_batch_begin, on_before_optimizer_step,
                  on_train_batch_end
               -> on_test_begin -> for each batch: on_test_batch_begin, on_test_batch_end -> on_test_end (validation)
               -> on_epoch_end -> ... -> on_train_end
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from cyxtrain.checkpoint.format.validation import same_kinds, taking_over
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import unknown_name
from cyxtrain.errors import ConfigError, brief, warn
from cyxtrain.progress.history import TrainingHistory
from cyxtrain.world import runtime

Logs = Mapping[str, float]


class Trainer(Protocol):
    """What a callback may use of the `DistributedTrainer` that calls it; its docstrings tell what each is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stop_training: bool

    @property
    def trained(self) -> nn.Module: ...  # noqa: D102
    @property
    def epoch(self) -> int: ...  # noqa: D102
    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def config(self) -> DistributedTrainingConfig: ...  # noqa: D102
    @property
    def scheduler(self) -> LRScheduler | None: ...  # noqa: D102
    @property
    def step_seconds(self) -> list[dict[str, float]]: ...  # noqa: D102
    @property
    def device_usage(self) -> dict[str, float]: ...  # noqa: D102
    @property
    def metadata(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def history(self) -> TrainingHistory: ...  # noqa: D102

    def set_learning_rates(self, rates: Sequence[float]) -> None: ...  # noqa: D102
    def evaluate(  # noqa: D102
        self,
        X: Any,  # noqa: N803
        y: Any = None,
        *,
        batch_size: int | None = None,
        distributed: bool = True,
        sample_weight: Any = None,
    ) -> Any: ...
    def predict(self, X: Any, *, batch_size: int | None = None, distributed: bool = True) -> Any: ...  # noqa: D102, N803
    def save_checkpoint(self, path: str | os.PathLike[str]) -> None: ...  # noqa: D102
    def is_master(self) -> bool: ...  # noqa: D102
    def get_rank(self) -> int: ...  # noqa: D102
    def get_world_size(self) -> int: ...  # noqa: D102


class Callback:
    """Hooks of a fit, under Keras's names and with its arguments; a subclass overrides those that it wants.

    Every rank has its own and calls it at the same points. `self.trainer.stop_training = True`, on any rank, ends the
    fit on all of them: from `on_epoch_end` after that epoch; from `on_train_batch_end` after the step that follows
    (with several ranks on accelerators: the second one), with which the ranks hear of it, and the epoch is closed as if
    it were over. Whatever else one decides on one rank alone is its own affair: a collective that it calls, such as
    `trainer.evaluate`, must be called on all. One that saves goes last: what comes after it has not seen the epoch yet.

    On an accelerator `on_train_batch_end` may run before anybody knows that a loss or a gradient of the step was not
    finite, and that it was not taken (docs/exactness.md).

    Epochs and batches count from 0, as Keras's do; epochs of a second fit go on counting. Logs of an epoch have "loss",
    "accuracy" and, with validation, "val_loss" and "val_accuracy" (accuracy for class targets), over all ranks and the
    same on each. Logs of a batch are the means of this rank's part of the epoch so far; nothing is computed unless they
    are read.

    Attributes:
        trainer: Which calls it.
        params: "epochs" (the last one, counted from 1), "steps" (of an epoch), "samples_per_step" (over all ranks),
            "warmup_steps", "verbose", whether there is "validation", the names of "metrics" in the logs of an epoch,
            and for which of them "larger_is_better".
    """

    trainer: Trainer
    params: dict[str, Any]
    belongs_on_all_ranks = False
    """Whether every rank must have one, because it changes the model or makes a call of all ranks: else it is refused
    before anything starts."""
    stays_in_notebook = False
    """Whether it stays where `fit` was called while worker processes train (`num_processes`), to draw or to ask: there
    it is told of training, epochs and validation as rank 0 is, not of batches, and the weights come at the end. Without
    workers it is called as any other."""
    ends_on_nonfinite = False
    """Whether a loss or a gradient that is not finite ends the fit in good order, instead of raising."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained, not wrapped."""
        return self.trainer.model

    def set_trainer(self, trainer: Trainer) -> None:
        """Meets the trainer, before anything else is called."""
        self.trainer = trainer

    def set_params(self, params: dict[str, Any]) -> None:
        """Is told what will happen; may refuse it with a ConfigError, before anything starts."""
        self.params = params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """A fit begins, or goes on: then model and optimizer become again what they were; `load_state_dict` is next."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """It is complete; not where it is interrupted, or its time is over. Logs are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch begins; not where it goes on after a checkpoint in its middle."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch is complete, with its validation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A step begins."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A step is done."""

    def on_before_optimizer_step(self, batch: int, logs: Logs | None = None) -> None:
        """Gradients are those of all ranks, and finite; they have not been clipped, and the step has not been taken."""

    def on_exception(self, exception: BaseException) -> None:
        """An error ends the fit on this rank, or Ctrl-C a second time."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Validation begins."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch of the validation begins; of this rank's, from 0, which may have others more or fewer of."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """It is done; logs are the means of what this rank has validated so far."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Validation is over; logs have its "loss", "accuracy" and metrics, or nothing where the fit stops in it."""

    def close(self) -> None:
        """The fit is left, however it ended: files are closed here."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it: tensors, numbers, text, lists, tuples and dictionaries. Rank 0's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, where a fit goes on."""


class BatchLogs(Mapping[str, float]):
    """Logs that are computed when somebody reads them, each by itself.

    Args:
        look: Gives what computes each.
    """

    def __init__(self, look: Callable[[], dict[str, Callable[[], float]]]) -> None:
        self._look = look
        self._numbers: dict[str, Callable[[], float]] | None = None
        self._found: dict[str, float] = {}
        self._is_over = False

    @property
    def _each(self) -> dict[str, Callable[[], float]]:
        if self._numbers is None:
            if self._is_over:
                _refuse_late_reading()
            self._numbers = self._look()
        return self._numbers

    def close(self) -> None:
        """From now on there is nothing to compute: the epoch goes on."""
        self._is_over = True

    def __repr__(self) -> str:
        return repr(dict(self))

    def __bool__(self) -> bool:
        return True  # without counting

    def __getitem__(self, name: str) -> float:
        """Returns a number."""
        number = self._each[name]
        if name not in self._found:
            if self._is_over:
                _refuse_late_reading()
            self._found[name] = number()
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        """Gives the names."""
        return iter(self._each)

    def __len__(self) -> int:
        """Returns how many there are."""
        return len(self._each)


class Callbacks:
    """The callbacks of a fit on this rank, in the order in which they were given.

    Args:
        callbacks: Each one a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self._batch_begin = [each for each in self._callbacks if _overrides(each, "on_train_batch_begin")]
        self._before_step = [each for each in self._callbacks if _overrides(each, "on_before_optimizer_step")]
        self._batch_end = [each for each in self._callbacks if _overrides(each, "on_train_batch_end")]
        self._test_begin = [each for each in self._callbacks if _overrides(each, "on_test_batch_begin")]
        self._test_end = [each for each in self._callbacks if _overrides(each, "on_test_batch_end")]

    def meet(self, trainer: Trainer, params: dict[str, Any]) -> None:
        """Introduces them to a trainer."""
        for callback in self._callbacks:
            callback.set_trainer(trainer)
            callback.set_params(dict(params))

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook, by its name, of each."""
        for callback in self._callbacks:
            getattr(callback, hook)(*arguments)
            self._heed_keras(callback)

    def on_train_batch_begin(self, batch: int) -> None:
        """Calls the hook of those that have one: a step costs the others nothing."""
        for callback in self._batch_begin:
            callback.on_train_batch_begin(batch, {})

    @property
    def on_all_ranks(self) -> list[str]:
        """Names of those that every rank must have."""
        return [name for name, callback in self._named() if callback.belongs_on_all_ranks]

    @property
    def end_on_nonfinite(self) -> bool:
        """Whether any ends the fit where a number is not finite."""
        return any(each.ends_on_nonfinite for each in self._callbacks)

    @property
    def before_optimizer_step(self) -> Callable[[int], None] | None:
        """What calls the hook of those that have one; None: none has."""
        return self.on_before_optimizer_step if self._before_step else None

    def on_before_optimizer_step(self, batch: int) -> None:
        """Calls the hook of those that have one."""
        for callback in self._before_step:
            callback.on_before_optimizer_step(batch, {})

    def on_exception(self, exception: BaseException) -> None:
        """Calls the hook of each; what goes wrong in it is not more than what went wrong before."""
        for callback in self._callbacks:
            with contextlib.suppress(Exception):
                callback.on_exception(exception)

    def on_train_batch_end(self, batch: int, look: Callable[[], dict[str, Callable[[], float]]]) -> None:
        """Calls the hook of those that have one, with logs that `look` gives."""
        if self._batch_end:
            with contextlib.closing(BatchLogs(look)) as logs:
                for callback in self._batch_end:
                    callback.on_train_batch_end(batch, logs)
                    self._heed_keras(callback)

    def on_test_batch_begin(self, batch: int) -> None:
        """Calls the hook of those that have one."""
        for callback in self._test_begin:
            callback.on_test_batch_begin(batch, {})

    def on_test_batch_end(self, batch: int, look: Callable[[], dict[str, Callable[[], float]]]) -> None:
        """Calls the hook of those that have one, with logs that `look` gives."""
        if self._test_end:
            with contextlib.closing(BatchLogs(look)) as logs:
                for callback in self._test_end:
                    callback.on_test_batch_end(batch, logs)

    def close(self) -> None:
        """Lets each close its files."""
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                stack.callback(callback.close)

    @staticmethod
    def _heed_keras(callback: Callback) -> None:
        """Does what `self.model.stop_training = True` asks for, as Keras writes it."""
        if vars(callback.model).pop("stop_training", False):
            callback.trainer.stop_training = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each that has one, by its class and, from the second of a class on, its number."""
        states = {name: callback.state_dict() for name, callback in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any], source: str) -> None:
        """Takes over the states in a checkpoint; says which are nobody's.

        Args:
            states: What `state_dict` gave.
            source: The checkpoint, for messages.
        """
        left = dict(states)
        for name, callback in self._named():
            if name in left:
                with taking_over(f"{source}, {name}"):
                    state = left.pop(name)
                    is_own = type(callback).__module__.startswith(f"{__package__}.")
                    if is_own and not same_kinds(state, callback.state_dict()):
                        raise TypeError(f"its state is {brief(state)}")
                    callback.load_state_dict(state)
        if left and runtime.is_master():
            warn(
                f"{source} has the state of {', '.join(left)}, and fit was given no such callback: without it the run "
                "may go on differently."
            )

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts: Counter[str] = Counter()
        for callback in self._callbacks:
            kind = type(callback).__name__
            counts[kind] += 1
            yield kind if counts[kind] == 1 else f"{kind} {counts[kind]}", callback


def checked_callbacks(callbacks: Any) -> list[Callback]:
    """Returns what a user gave as callbacks: one, several, or None.

    Raises:
        ConfigError: Something else is among them.
    """
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    for callback in found:
        if not isinstance(callback, Callback):
            what = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise ConfigError(
                f"callbacks must be instances of cyxtrain.callbacks.Callback, got {what}. Derive yours from it: hooks "
                "and their arguments are Keras's."
            )
        for name in dir(callback):
            if name.startswith("on_") and name not in _HOOKS:
                raise unknown_name(type(callback).__name__, name, list(_HOOKS), "hook that anybody calls:")
    return found


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


def _refuse_late_reading() -> NoReturn:
    raise ConfigError("logs of a batch are read while its hook runs; keep a copy, dict(logs), of what is needed later.")


_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
