"""Run a trainer's call in worker processes: all cores from one cell of a notebook.

fit(num_processes=4) -> without a launcher: workers, kept between calls -> `worker_calls.py` in each
<- weights, optimizer, history, callbacks: the notebook's own objects, changed in place
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from cyxtrain.callbacks.callback import Callback, checked_callbacks
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import accelerator, process_env
from cyxtrain.errors import ConfigError
from cyxtrain.notebook.failures import Failed, raised
from cyxtrain.notebook.pool import JobAnswers, Pool
from cyxtrain.notebook.relay import BEGUN, SHOW
from cyxtrain.notebook.sharing import read, shared_file, write
from cyxtrain.notebook.state_transfer import Changes, merge, parts_of
from cyxtrain.notebook.worker_cache import is_on_gpu, workers
from cyxtrain.notebook.worker_calls import FIT, CallResult, run_call, settings_here
from cyxtrain.optim.optimizers import described_name
from cyxtrain.progress.display import Display, make_display
from cyxtrain.training import delegation
from cyxtrain.training.delegation import TrainerParts
from cyxtrain.training.inputs.arguments import parse_fit
from cyxtrain.training.trainer import DistributedTrainer
from cyxtrain.workers.machine import ranks_by_cores
from cyxtrain.world import runtime


def register() -> None:
    """Let trainers run their calls in worker processes."""
    delegation.register(run_in_workers)


def run_in_workers(
    trainer: DistributedTrainer, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """Run a trainer's call in worker processes; return None if it is to run in this process."""
    __tracebackhide__ = True
    count = _num_workers(trainer, method, arguments, keywords)
    if count < 2:
        return None
    with workers.used_for(method):
        call = _Call(trainer, method, arguments, dict(keywords))
        pool, why_new = workers.pool(count, trainer)
        return call.run_by(pool, why_new)


def _num_workers(
    trainer: DistributedTrainer, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> int:
    """Return how many processes run a call; below 2: this one."""
    is_launched = process_env.is_launched() or (runtime.is_initialized() and runtime.current().size > 1)
    if is_launched or TrainerParts.of(trainer).is_fitting or keywords.get("distributed") is False:
        return 1
    asked = keywords.get("num_processes", _config_of(trainer, method, arguments, keywords).num_processes)
    if asked == "auto":
        if is_on_gpu(trainer):
            return accelerator.count()
        return ranks_by_cores(process_env.to_pass_on())
    return asked if type(asked) is int else 1  # the call itself refuses anything else


def _config_of(
    trainer: DistributedTrainer, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> DistributedTrainingConfig:
    for given in (*arguments, keywords.get("config")):
        if isinstance(given, DistributedTrainingConfig):
            return given
    return DistributedTrainingConfig() if method == FIT else trainer.config


class _Call:
    """One call: sent to the workers, and its result applied here."""

    def __init__(
        self, trainer: DistributedTrainer, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self._trainer = trainer
        self._method = method
        self._arguments = arguments
        self._keywords = keywords
        self._callbacks: list[Callback] = []
        self._not_sent: list[str] = []
        self._display: Display | None = None
        self._verbose = False
        self._has_begun = False
        self._is_interrupted = False
        self._stops = False
        self._problem: BaseException | None = None
        if method == FIT:  # raise errors before anything starts
            self._callbacks = checked_callbacks(keywords.get("callbacks"))
            keywords["callbacks"] = self._callbacks
            self._verbose = parse_fit(*arguments, **keywords).config.verbose
            for callback in (*trainer.callbacks, *self._callbacks):
                callback.set_trainer(trainer)  # otherwise the trainer of an earlier fit would be sent too
        else:
            self._not_sent = sorted(TrainerParts.of(trainer).of_fits)
        self._parts = parts_of(trainer, self._callbacks)
        self._staying = {
            name: part for name, part in self._parts.items() if isinstance(part, Callback) and part.stays_in_notebook
        }

    def run_by(self, pool: Pool, why_new: str) -> Any:
        """Run the call in the workers and return its value; `why_new` says why they start, or is empty."""
        __tracebackhide__ = True
        can_continue = True
        try:
            with pool.handling_signals():
                if why_new and self._verbose:
                    self._show("header", ([("workers", why_new)],))
                # The notebook owns the files: workers keep nothing until the result has been read.
                with shared_file() as trainer, shared_file() as given, shared_file() as result:
                    self._send(trainer, given)
                    call = (self._method, trainer, given, result, list(self._staying), self._not_sent)
                    answers = pool.run(run_call, call, partial(self._on_report, pool), self._on_signal)
                    can_continue = answers.can_continue
                    return self._apply(answers, result, pool.num_processes)
        finally:
            for callback in self._staying.values():
                callback.close()
            if self._display is not None:
                self._display.close()
            if self._is_interrupted or not can_continue:
                pool.close()

    def _send(self, trainer: str, given: str) -> None:
        """Write the trainer and the rest of the call to the files at two paths."""
        data = {name: value for name, value in self._keywords.items() if name != "callbacks"}
        call = (settings_here(), self._arguments, data)
        stays = {name: self._parts[name] for name in self._not_sent} | self._staying
        try:
            sent: dict[str, Any] = {}
            write((self._trainer, self._callbacks), trainer, stays, sent=sent)
            write(call, given, {**sent, **self._parts}, is_data=True, sent=sent)
            self._parts = {**sent, **self._parts}
        except Exception as error:
            what = _unsendable_part(self._trainer, self._arguments, self._keywords)
            raise ConfigError(
                f"{what} cannot be sent to worker processes: {type(error).__name__}: {error}. Create objects with an "
                "open file, a lock or a generator in the workers: in a callback's on_train_begin, or by a function "
                "passed in their place. Or leave num_processes out."
            ) from error

    def _on_report(self, pool: Pool, report: tuple[Any, ...]) -> None:
        """Display progress, and call the callbacks that stay in the notebook."""
        if report[0] == BEGUN:
            self._has_begun = True
            self._interrupt_if_asked(pool)
        elif report[0] == SHOW:
            self._show(*report[1:])
        elif self._problem is None:
            self._call_hook(*report[1:])
            self._interrupt_if_asked(pool)

    def _interrupt_if_asked(self, pool: Pool) -> None:
        """Stop the fit at a step after a hook's error or request; before it begins, nothing handles the signal."""
        if self._has_begun and (self._problem is not None or self._stops):
            pool.interrupt()

    def _call_hook(self, name: str, hook: str, arguments: tuple[Any, ...]) -> None:
        """Call a hook of a callback that stays here, and note its error or its request to stop."""
        try:
            getattr(self._staying[name], hook)(*arguments)
        except BaseException as error:  # raised once the fit's work is kept
            self._problem = error
        if self._trainer.stop_training or vars(self._trainer.model).pop("stop_training", False):
            self._trainer.stop_training = False
            self._stops = True

    def _show(self, method: str, arguments: Any) -> None:
        self._display = self._display or make_display(True)
        getattr(self._display, method)(*arguments)

    def _on_signal(self, number: int) -> bool:
        """Return whether to pass a signal on: a fit stops at a step, other calls have nothing to keep."""
        self._is_interrupted = True
        passes = self._method == FIT and self._has_begun
        if passes and number == signal.SIGINT:
            sys.stderr.write("stopping after this step; interrupt again to stop at once\n")
        return passes

    def _apply(self, answers: JobAnswers, result: str, num_ranks: int) -> Any:
        """Apply the changes to the trainer's objects, and return the call's value or raise its error."""
        __tracebackhide__ = True
        ranks: dict[int, CallResult] = answers.by_rank
        value = None
        # Before an error is raised: what was trained until then is kept.
        if 0 in ranks and ranks[0].has_result:
            value = self._read_result(result)
        if self._problem is not None:
            raise self._problem
        answers.check()
        failures = {rank: answer.failed for rank, answer in sorted(ranks.items()) if answer.failed is not None}
        if failures:
            rank = _rank_at_fault(failures)
            error = raised(failures[rank], rank, num_ranks, self._parts)
            # After the stop button, the notebook gets the history so far.
            continues = self._stops or runtime.is_interactive()
            if not (isinstance(error, KeyboardInterrupt) and continues):
                raise error from error.__cause__
        return self._trainer.history if self._method == FIT else value

    def _read_result(self, path: str) -> Any:
        """Return a call's value, or apply a fit's changes to the notebook's own objects."""
        # Predictions stay in the file's memory; Windows does not remove a mapped file.
        value = read(path, self._parts, mapped=os.name == "posix" and self._method != FIT)
        if isinstance(value, Changes):
            merge(value, self._trainer, self._parts)
        return value


def _rank_at_fault(failures: Mapping[int, Failed]) -> int:
    """Return the rank whose error to raise: the lowest with its own error, or the rank that it names."""
    rank = min(failures, key=lambda rank: (not failures[rank].is_own, rank))
    named = failures[rank].about
    return rank if named is None or named not in failures else named


def _unsendable_part(trainer: DistributedTrainer, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """Return the name of the first part of a call that cannot be sent."""
    known = parts_of(trainer)
    for name, part in _named_parts(trainer, arguments, keywords).items():
        receiver_has = {} if part is trainer.model else known  # otherwise only the model's name would be sent
        try:
            with shared_file() as path:
                write(part, path, receiver_has)
        except Exception:
            return name
    return "a part of this call"


def _named_parts(
    trainer: DistributedTrainer, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that a call sends, by the names that errors use."""
    parts: dict[str, Any] = {"the model": trainer.model, "loss_fn": trainer.loss_fn}
    for name, optimizer in trainer.optimizers.items():
        parts[f"the {described_name(name)}"] = optimizer
    parts["metrics"] = TrainerParts.of(trainer).given.metrics
    for name, scheduler in trainer.schedulers.items():
        parts[f"the {described_name(name, 'scheduler')}"] = scheduler
    for callback in (*checked_callbacks(keywords.get("callbacks")), *trainer.callbacks):
        parts[f"the callback {type(callback).__name__}"] = vars(callback)
    names = ["X", "y", *(f"argument {place}" for place in range(3, len(arguments) + 1))]
    parts.update(zip(names, arguments, strict=False))
    parts.update(keywords)
    parts.pop("callbacks", None)  # each has its own name above
    return parts
