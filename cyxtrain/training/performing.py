"""What a notebook's worker does: one call of a trainer's, as a rank among others, and what comes back of it.

notebook                                  each worker
the trainer, by value            ->       its own, with the notebook's weights
arguments and data, mapped       ->       the call
progress                         <-       rank 0's display
weights, optimizer, history      <-       rank 0, in the format of a checkpoint
callbacks, the call's value      <-       rank 0
an error                         <-       any rank, as itself
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from cyxtrain import runtime
from cyxtrain.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CyxtrainError,
    DistributedTrainingError,
    PeerLostError,
    PeerSilentError,
    is_on_all_ranks,
)
from cyxtrain.training.callbacks import Callback, Logs, checked_callbacks
from cyxtrain.training.display import Display, LiveDisplay, displays_by
from cyxtrain.training.mirroring import Marks, parts_of
from cyxtrain.workers.sharing import SharedFile, as_bytes, read, returning, write

if TYPE_CHECKING:
    from cyxtrain.training.trainer import DistributedTrainer

FIT = "fit"
OF_FITS = ("the optimizer", "rates")
"""Parts of a trainer that other calls do not need: they stay where they are, with the optimizer's state."""
BEGUN = "begun"
"""A report: from here on a fit hears signals, and stops at a step."""
SHOW = "show"
"""A report: a method of a display, and its arguments."""
TELL = "tell"
"""A report: a callback that has stayed, its hook, and the hook's arguments."""
_OF_OTHERS = (
    PeerLostError,
    PeerSilentError,
    CollectiveTimeoutError,
    CollectiveMismatchError,
    DistributedTrainingError,
)
"""What a rank raises because of another one."""
_LIBRARIES = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
"""What leads to the user's code, in a traceback."""
_FLAGS = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    (torch.backends.cuda.matmul, "fp32_precision"),
    (torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
    (torch.backends.mkldnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
)


@dataclass(frozen=True)
class Surroundings:
    """What a process has set for all that it does, and numbers or messages depend on."""

    folder: str
    path: list[str]
    dtype: torch.dtype
    deterministic: tuple[bool, bool]
    flags: list[Any]
    filters: list[Any]

    @classmethod
    def here(cls) -> Surroundings:
        """Returns those of this process."""
        deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        flags = [getattr(owner, name) for owner, name in _FLAGS]
        return cls(os.getcwd(), sys.path, torch.get_default_dtype(), deterministic, flags, list(warnings.filters))

    def enter(self) -> None:
        """Makes them those of this process."""
        os.chdir(self.folder)
        sys.path[:] = self.path
        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        for (owner, name), value in zip(_FLAGS, self.flags, strict=True):
            if getattr(owner, name) != value:
                setattr(owner, name, value)
        warnings.filters[:] = self.filters  # type: ignore[index]


@dataclass(frozen=True)
class Failed:
    """An error of one rank.

    Attributes:
        error: (class, arguments, attributes) of the exception, pickled; None: they cannot be.
        name: Of its class.
        message: What it says.
        text: Its traceback, as far as it is of the user's code.
        is_own: Whether it came about here, not because of another rank.
        about: The rank that it says it is about, or None.
    """

    error: bytes | None
    name: str
    message: str
    text: str
    is_own: bool
    about: int | None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Returns what travels of an error."""
        pickled = None
        for attributes in (vars(error), {}):
            try:
                pickled = pickled or as_bytes((type(error), error.args, attributes), returning({}))
            except Exception:
                continue
        about = error.rank if isinstance(error, CyxtrainError) else None
        return cls(pickled, type(error).__name__, str(error), _told(error), not isinstance(error, _OF_OTHERS), about)


def _told(error: BaseException) -> str:
    """Returns the traceback of an error and of those that led to it, without what is not the user's code.

    An error of ours that no code of the user's led to says all that there is to say.
    """
    links: list[str] = []
    link: BaseException | None = error
    while link is not None:
        place = _from_users_code(link.__traceback__)
        if place is not None:
            links.append("".join(traceback.format_exception(type(link), link, place, chain=False)))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if not links and not isinstance(error, CyxtrainError):
        return "".join(traceback.format_exception(error))
    return "\nwhich led to:\n".join(reversed(links))


def _from_users_code(found: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the first frame on that is not in this package or in PyTorch; None: all are."""
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
        found = found.tb_next
    return found


@dataclass(frozen=True)
class Performed:
    """What has become of a call, on one rank.

    Attributes:
        failed: Its error, or None.
        result: File with the value of the call, or after a fit, however it ended, with the `Changes` of the trainer's
            parts; None but on rank 0.
    """

    failed: Failed | None
    result: Any = None


class Relay(Callback):
    """Stands in a worker for a callback that has stayed where `fit` was called, and tells it what it is told.

    Args:
        name: Of the callback, among the trainer's parts.
        report: Takes what is told; None on other ranks than 0, which say nothing.
    """

    def __init__(self, name: str, report: Callable[[Any], None] | None) -> None:
        self._name = name
        self._report = report

    def _tell(self, hook: str, *arguments: Any) -> None:
        if self._report is not None:
            self._report((TELL, self._name, hook, arguments))

    def set_params(self, params: dict[str, Any]) -> None:
        """Tells it."""
        super().set_params(params)
        self._tell("set_params", params)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_train_begin", logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_epoch_end", epoch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_test_begin", logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Tells it."""
        self._tell("on_test_end", logs)


def perform(
    method: str, trainer_path: str, call_path: str, staying: Sequence[str], report: Callable[[Any], None]
) -> tuple[Performed, bool]:
    """Makes a call of a trainer's on this rank.

    Args:
        method: Its name.
        trainer_path: File with the trainer.
        call_path: File with (surroundings, arguments, named arguments).
        staying: Names of callbacks that have stayed where the call is made.
        report: Takes what the notebook shall know meanwhile.

    Returns:
        What has become of it, and whether this rank can go on.
    """
    try:
        is_master = runtime.is_master()
        relays = {name: Relay(name, report if is_master else None) for name in staying}
        trainer: DistributedTrainer = read(trainer_path, {**dict.fromkeys(OF_FITS), **relays}, mapped=False)
        surroundings, arguments, keywords = read(call_path, {**parts_of(trainer), **relays}, mapped=True)
        surroundings.enter()
        callbacks = checked_callbacks(keywords.get("callbacks")) if method == FIT else []
        marks = Marks(trainer, callbacks) if method == FIT and is_master else None
    except BaseException as error:
        _tell(error)
        return Performed(Failed.of(error)), False
    value, failed, can_go_on = None, None, True
    try:
        with displays_by(partial(_display, report)):
            # A subclass's own method has been called where the call was made.
            value = getattr(_base_of(trainer, method), method)(trainer, *arguments, **keywords)
    except BaseException as error:
        failed, can_go_on = Failed.of(error), is_on_all_ranks(error)
        if not can_go_on:
            _tell(error)
    try:
        return Performed(failed, _written(value, marks) if is_master else None), can_go_on
    except Exception as error:  # what a call returns is made of tensors, and attributes have been tried: ours
        return Performed(failed or Failed.of(error)), False


def _base_of(trainer: DistributedTrainer, method: str) -> Any:
    """Returns the class that has a method which workers make calls of."""
    return next(base for base in reversed(type(trainer).__mro__) if method in vars(base))


def _written(value: Any, marks: Marks | None) -> SharedFile:
    """Writes what a call has returned, or what it has changed."""
    found = SharedFile()
    result, parts = (value, {}) if marks is None else marks.changes()
    write(result, found, parts, returns=True)
    return found


def _tell(error: BaseException) -> None:
    """Lets the other ranks know of an error that this one has alone."""
    told = DistributedTrainingError("sys.exit was called") if isinstance(error, SystemExit) else error
    runtime.tell(told, in_training=True)


class ReportingDisplay(LiveDisplay):
    """Shows a fit in another process.

    Args:
        report: Takes what is to be shown.
        shows: Whether anything is; where a fit has begun is told in any case.
    """

    def __init__(self, report: Callable[[Any], None], *, shows: bool) -> None:
        super().__init__()
        self._report = report
        self._shows = shows

    def _show(self, method: str, *arguments: Any) -> None:
        if self._shows:
            self._report((SHOW, method, arguments))

    def header(self, facts: Sequence[tuple[str, str]]) -> None:
        """Shows a line per fact."""
        self._show("header", list(facts))

    def begin_epoch(self, epoch: int, last_epoch: int, steps: int | None) -> None:
        """Begins a bar."""
        super().begin_epoch(epoch, last_epoch, steps)
        self._report((BEGUN,))
        self._show("begin_epoch", epoch, last_epoch, steps)

    def draw(self, steps: int, text: str) -> None:
        """Moves it."""
        self._show("draw", steps, text)

    def line(self, text: str) -> None:
        """Shows a line."""
        self._show("line", text)

    def end_epoch(self, text: str) -> None:
        """Shows the epoch's line."""
        self._show("end_epoch", text)

    def close(self) -> None:
        """Takes the bar away."""
        self._show("close")


def _display(report: Callable[[Any], None], shows: bool) -> Display:
    return ReportingDisplay(report, shows=shows) if runtime.is_master() else Display()
