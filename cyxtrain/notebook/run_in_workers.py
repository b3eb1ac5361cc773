"""Run a trainer's call in worker processes: all cores from one cell of a notebook.

fit(num_processes=4) -> if there is no launcher: workers, kept between calls -> `worker_calls.py` in each
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
from cyxtrain.notebook.failures import raised
from cyxtrain.notebook.pool import JobAnswers, Pool
from cyxtrain.notebook.relay import BEGUN, SHOW
from cyxtrain.notebook.sharing import read, shared_file, write
from cyxtrain.notebook.state_transfer import Changes, merge, parts_of
from cyxtrain.notebook.worker_cache import is_on_gpu, workers
from cyxtrain.notebook.worker_calls import FIT, CallResult, run_call, settings_here
from cyxtrain.optim.optimizers import described_name
from cyxtrain.progress.display import Display, make_display
from cyxtrain.training import delegation
from cyxtrain.training.inputs.arguments import parse_fit
from cyxtrain.training.trainer import DistributedTrainer, parts_of_trainer
from cyxtrain.workers.machine import ranks_by_cores
from cyxtrain.world import runtime


def register() -> None:
    """Let trainers run their calls in worker processes."""
    delegation.register(run_in_workers)


def run_in_workers(
    trainer: DistributedTrainer, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """Run a trainer's call in worker processes; return None if `num_processes` asks for none or a launcher has any."""
    __tracebackhide__ = True
    count = _num_workers(trainer, method, arguments, keywords)
    if count < 2:
        return None
    with workers.used_for(method):
        return _Call(trainer, method, arguments, dict(keywords)).run_by(*workers.pool(count, trainer))


def _num_workers(
    trainer: DistributedTrainer, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> int:
    """Return how many processes run a call; below 2: this one."""
    launched = process_env.is_launched() or (runtime.is_initialized() and runtime.current().size > 1)
    if launched or parts_of_trainer(trainer).is_fitting or keywords.get("distributed") is False:
        return 1
    given = [each for each in (*arguments, keywords.get("config")) if isinstance(each, DistributedTrainingConfig)]
    given = given or [DistributedTrainingConfig() if method == FIT else trainer.config]
    asked = keywords.get("num_processes", given[0].num_processes)
    if asked == "auto":
        on_gpus = is_on_gpu(trainer)
        return accelerator.count() if on_gpus else ranks_by_cores(process_env.to_pass_on())
    return asked if type(asked) is int else 1  # the call itself refuses anything else


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
        self._display: Display | None = None
        self._has_begun = self._is_interrupted = self._verbose = self._stops = False
        self._problem: BaseException | None = None
        if method == FIT:  # raise errors before anything starts
            self._callbacks = keywords["callbacks"] = checked_callbacks(keywords.get("callbacks"))
            self._verbose = parse_fit(*arguments, **keywords).config.verbose
        self._parts = parts_of(trainer, self._callbacks)
        self._idle = [] if method == FIT else sorted(parts_of_trainer(trainer).of_fits)
        stays = [name for name, part in self._parts.items() if isinstance(part, Callback) and part.stays_in_notebook]
        self._staying = {name: self._parts[name] for name in stays}
        for callback in (*trainer.callbacks, *self._callbacks) if method == FIT else ():
            callback.set_trainer(trainer)  # otherwise that of an earlier fit would be sent too

    def run_by(self, pool: Pool, why_new: str) -> Any:
        """Run the call in the workers and return its value; `why_new` tells why they are starting, or is empty."""
        __tracebackhide__ = True
        can_continue = True
        try:
            with pool.handling_signals():
                if why_new and self._verbose:
                    self._show("header", ([("workers", why_new)],))
                with shared_file() as trainer, shared_file() as given, shared_file() as result:
                    self._send(trainer, given)
                    call = (self._method, trainer, given, result, list(self._staying), self._idle)
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
        stays = {name: self._parts[name] for name in self._idle} | self._staying
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
            if self._problem is not None or self._stops:  # until now nothing could handle the signal
                pool.interrupt()
        elif report[0] == SHOW:
            self._show(*report[1:])
        elif self._problem is None:
            _, name, hook, arguments = report
            try:
                getattr(self._staying[name], hook)(*arguments)
            except BaseException as error:  # stop the fit at a step, so that its work is kept
                self._problem = error
                pool.interrupt()
            if self._trainer.stop_training or vars(self._trainer.model).pop("stop_training", False):
                self._trainer.stop_training, self._stops = False, True
                pool.interrupt()

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
        if 0 in ranks and ranks[0].has_result:
            value = read(result, self._parts, mapped=os.name == "posix" and self._method != FIT)
            if isinstance(value, Changes):
                merge(value, self._trainer, self._parts)
        if self._problem is not None:
            raise self._problem
        answers.check()
        failures = {rank: answer.failed for rank, answer in sorted(ranks.items()) if answer.failed is not None}
        if failures:
            rank = min(failures, key=lambda rank: (not failures[rank].is_own, rank))
            about = failures[rank].about
            rank = about if about in failures else rank  # the other rank has the original error
            error = raised(failures[rank], rank, num_ranks, self._parts)
            continues = self._stops or runtime.is_interactive()
            if not (isinstance(error, KeyboardInterrupt) and continues):
                raise error from error.__cause__
        return self._trainer.history if self._method == FIT else value


def _unsendable_part(trainer: DistributedTrainer, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    parts = {
        "the model": trainer.model,
        "loss_fn": trainer.loss_fn,
        **{f"the {described_name(name)}": each for name, each in trainer.optimizers.items()},
        "metrics": parts_of_trainer(trainer).given.metrics,
        **{f"the {described_name(name, 'scheduler')}": each for name, each in trainer.schedulers.items()},
        **{f"the callback {type(each).__name__}": vars(each) for each in checked_callbacks(keywords.get("callbacks"))},
        **{f"the callback {type(each).__name__}": vars(each) for each in trainer.callbacks},
        **{("X", "y")[place] if place < 2 else f"argument {place + 1}": each for place, each in enumerate(arguments)},
        **{name: each for name, each in keywords.items() if name != "callbacks"},
    }
    known = parts_of(trainer)
    for name, part in parts.items():
        try:
            with shared_file() as path:
                write(part, path, {} if part is trainer.model else known)
        except Exception:
            return name
    return "a part of this call"
