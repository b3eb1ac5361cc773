"""Calls of a trainer's that worker processes make: all cores from one cell of a notebook.

fit(num_processes=4) -> is there no launcher? -> workers, kept from call to call -> `performing.py` in each
<- weights, optimizer, history, callbacks: the notebook's own objects, changed in place
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

from cyxtrain.callbacks.callback import Callback, checked_callbacks
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import accelerator, process_env
from cyxtrain.errors import ConfigError
from cyxtrain.notebook.failures import raised
from cyxtrain.notebook.pool import JobAnswers, Pool
from cyxtrain.notebook.relay import BEGUN, SHOW
from cyxtrain.notebook.sharing import SharedFile, read, write
from cyxtrain.notebook.state_transfer import Changes, merge, parts_of
from cyxtrain.notebook.worker_cache import is_on_gpu, workers
from cyxtrain.notebook.worker_calls import FIT, OF_FITS, Performed, SideEffects, perform
from cyxtrain.progress.display import Display, make_display
from cyxtrain.training import delegation
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
    """Run a trainer's call in worker processes; return None if `num_processes` asks for none or a launcher has any."""
    __tracebackhide__ = True
    count = _num_workers(trainer, method, arguments, keywords)
    if count < 2:
        return None
    with workers.used_for(method):
        return _Call(trainer, method, arguments, dict(keywords)).made_by(*workers.pool(count, trainer))


def _num_workers(
    trainer: DistributedTrainer, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> int:
    """Returns how many processes shall make a call; below 2: this one."""
    launched = process_env.is_launched() or (runtime.is_initialized() and runtime.get_world_size() > 1)
    if launched or trainer._fit is not None or keywords.get("distributed") is False:
        return 1
    given = [each for each in (*arguments, keywords.get("config")) if isinstance(each, DistributedTrainingConfig)]
    given = given or [DistributedTrainingConfig() if method == FIT else trainer.config]
    asked = keywords.get("num_processes", given[0].num_processes)
    if asked == "auto":
        on_gpus = is_on_gpu(trainer)
        return accelerator.count() if on_gpus else ranks_by_cores(process_env.to_pass_on())
    return asked if type(asked) is int else 1  # what else there is, the call itself refuses


class _Call:
    """One call, from here to the workers and back.

    Args:
        trainer: Whose.
        method: Its name.
        arguments: As they were given.
        keywords: As they were given.
    """

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
        if method == FIT:  # what is wrong with it is better heard before anything starts
            self._callbacks = keywords["callbacks"] = checked_callbacks(keywords.get("callbacks"))
            self._verbose = parse_fit(*arguments, **keywords).config.verbose
        self._parts = parts_of(trainer, self._callbacks)
        stays = [name for name, part in self._parts.items() if isinstance(part, Callback) and part.stays_in_notebook]
        self._staying = {name: self._parts[name] for name in stays}
        for callback in (*trainer.callbacks, *self._callbacks) if method == FIT else ():
            callback.set_trainer(trainer)  # not that of an earlier fit, which would come along

    def made_by(self, pool: Pool, why_new: str) -> Any:
        """Lets workers make the call, and returns what it returns.

        Args:
            pool: They.
            why_new: Why they are just starting; "": they are not.
        """
        __tracebackhide__ = True
        can_go_on = True
        try:
            with pool.hearing_signals():
                if why_new and self._verbose:
                    self._show("header", ([("workers", why_new)],))
                with closing(SharedFile()) as trainer, closing(SharedFile()) as given:
                    self._send(trainer, given)
                    call = (self._method, trainer.path, given.path, list(self._staying))
                    answers = pool.run(perform, call, partial(self._heed, pool), self._hear)
                can_go_on = answers.can_go_on
                return self._take_in(answers, pool.num_processes)
        finally:
            for callback in self._staying.values():
                callback.close()
            if self._display is not None:
                self._display.close()
            if self._is_interrupted or not can_go_on:
                pool.close()
            elif pool.is_usable:
                pool.forget_answers()

    def _send(self, trainer: SharedFile, given: SharedFile) -> None:
        data = {name: value for name, value in self._keywords.items() if name != "callbacks"}
        call = (SideEffects.here(), self._arguments, data)
        idle = () if self._method == FIT else OF_FITS
        stays = {name: part for name, part in self._parts.items() if name in idle} | self._staying
        try:
            objects: dict[str, Any] = {}
            write((self._trainer, self._callbacks), trainer, stays, objects=objects)
            self._parts = {**objects, **self._parts}
            write(call, given, self._parts, is_data=True)
        except Exception as error:
            what = _what_cannot_go(self._trainer, self._arguments, self._keywords)
            raise ConfigError(
                f"{what} cannot be sent to worker processes: {type(error).__name__}: {error}. What holds an open file, "
                "a lock or a generator is best made over there: in a callback's on_train_begin, or by a function that "
                "is given in its place. Or leave num_processes out."
            ) from error

    def _heed(self, pool: Pool, report: tuple[Any, ...]) -> None:
        """Shows what the workers show, and calls the callbacks that have stayed."""
        if report[0] == BEGUN:
            self._has_begun = True
            if self._problem is not None or self._stops:  # there was nothing yet that could have heard of it
                pool.interrupt()
        elif report[0] == SHOW:
            self._show(*report[1:])
        elif self._problem is None:
            _, name, hook, arguments = report
            try:
                getattr(self._staying[name], hook)(*arguments)
            except BaseException as error:  # the fit stops at a step, so that its work is not lost
                self._problem = error
                pool.interrupt()
            if self._trainer.stop_training or vars(self._trainer.model).pop("stop_training", False):
                self._trainer.stop_training, self._stops = False, True
                pool.interrupt()

    def _show(self, method: str, arguments: Any) -> None:
        self._display = self._display or make_display(True)
        getattr(self._display, method)(*arguments)

    def _hear(self, number: int) -> bool:
        """Returns whether the workers shall hear a signal: a fit stops at a step, the rest has nothing to keep."""
        self._is_interrupted = True
        hears = self._method == FIT and self._has_begun
        if hears and number == signal.SIGINT:
            sys.stderr.write("stopping after this step; interrupt again to stop at once\n")
        return hears

    def _take_in(self, answers: JobAnswers, num_ranks: int) -> Any:
        """Changes the trainer's objects to what they have become, and returns the value of the call or raises."""
        __tracebackhide__ = True
        ranks: dict[int, Performed] = answers.by_rank
        value = None
        if 0 in ranks and ranks[0].result is not None:
            value = read(ranks[0].result, self._parts, mapped=os.name == "posix" and self._method != FIT)
            if isinstance(value, Changes):
                merge(value, self._trainer, self._parts)
        if self._problem is not None:
            raise self._problem
        answers.check()
        failures = {rank: answer.failed for rank, answer in sorted(ranks.items()) if answer.failed is not None}
        if failures:
            rank = min(failures, key=lambda rank: (not failures[rank].is_own, rank))
            about = failures[rank].about
            rank = about if about in failures else rank  # it was told of that one's
            error = raised(failures[rank], rank, num_ranks)
            goes_on = self._stops or runtime.is_interactive()
            if not (isinstance(error, KeyboardInterrupt) and goes_on):
                raise error from error.__cause__
        return self._trainer.history if self._method == FIT else value


def _what_cannot_go(trainer: DistributedTrainer, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """Returns what of a call cannot be sent, in words."""
    parts = {
        "the model": trainer.model,
        "loss_fn": trainer.loss_fn,
        "the optimizer": trainer.optimizer,
        "metrics": trainer._metrics,
        "the scheduler": trainer.scheduler,
        **{f"the callback {type(each).__name__}": vars(each) for each in checked_callbacks(keywords.get("callbacks"))},
        **{f"the callback {type(each).__name__}": vars(each) for each in trainer.callbacks},
        **{("X", "y")[place] if place < 2 else f"argument {place + 1}": each for place, each in enumerate(arguments)},
        **{name: each for name, each in keywords.items() if name != "callbacks"},
    }
    known = parts_of(trainer)
    for name, part in parts.items():
        try:
            with closing(SharedFile()) as file:
                write(part, file, {} if part is trainer.model else known)
        except Exception:
            return name
    return "something of this call"
