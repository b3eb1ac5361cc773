"""Print an error that ends the program: a user's mistake in short, and once if all ranks raise it.

    Traceback (your code only; CYXTRAIN_TRACEBACK=full shows all of it):
      File "train.py", line 12, in <module>
        trainer.fit(X, y)
    cyxtrain.errors.ConfigError: the model cannot take X, tried on shape [64, 3]: RuntimeError: ...

An error that has its cause on another rank, which prints it, takes two lines: the message and your own line.

`sys.excepthook` is replaced when the first error of this package is created, not at import. The previous hook prints
all other errors. A hook of the program itself stays.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from cyxtrain.environment import process_env
from cyxtrain.errors import (
    ConfigError,
    CyxtrainError,
    DistributedTrainingError,
    PeerLostError,
    PeerSilentError,
    RendezvousError,
    is_on_all_ranks,
    reason_of,
)

SHORT, ONE_LINE, FULL = "short", "one line", "full"
"""How errors are printed."""
HEADER = "Traceback (your code only; CYXTRAIN_TRACEBACK=full shows all of it):"
"""The first line of a mistake that is printed in short."""
_LIBRARIES = ("cyxtrain", "torch", "contextlib")
"""Modules whose frames are left out, and those within Python (`python -m`)."""
_REPLACED = ("sys", "torch", "apport_python_hook")
"""Modules whose hooks are replaced: Ubuntu sets one in every process."""
_OF_ANOTHER_RANK = (PeerLostError, PeerSilentError, RendezvousError, DistributedTrainingError)
"""Errors whose cause is not in this rank's program, unless all ranks raise them."""
_MAX_LINES, _MAX_FRAMES = 15, 4
_FRAME = re.compile(r'^  File "(.+)", line \d+, in .+\n(?:    [^\n]*[\w"\'][^\n]*\n)?', re.MULTILINE)
"""A frame in the text of a traceback, without the line of carets."""
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class _Hook:
    """Replaces `sys.excepthook`; `previous` prints all other errors."""

    style = SHORT
    """`ONE_LINE` applies to every error of this package."""
    is_printing = True
    """Whether this rank prints what all ranks raise."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.style == FULL or process_env.wants_full_traceback() or not self._is_shortened(error):
            self._previous(kind, error, trace)
        elif isinstance(error, CyxtrainError) and (self.is_printing or not is_on_all_ranks(error)):
            in_short = _in_two_lines if _is_of_another_rank(error) else _in_short
            is_one_line = self.style == ONE_LINE
            print(f"{kind.__name__}: {_message(error)}" if is_one_line else in_short(error, trace), file=sys.stderr)

    def _is_shortened(self, error: BaseException) -> bool:
        if isinstance(error, ConfigError) or _is_of_another_rank(error):
            return True
        return isinstance(error, (CyxtrainError, KeyboardInterrupt)) and (
            self.style == ONE_LINE or is_on_all_ranks(error)
        )


_hook: _Hook | None = None


def install(style: str | None = None, *, is_printing: bool = True) -> None:
    """Replace `sys.excepthook` where that has not happened, or PyTorch has replaced it since.

    Without a `style` errors are printed in short, and a hook of the program itself stays. This rank prints what all
    ranks raise only if it `is_printing`.
    """
    global _hook
    module = str(getattr(sys.excepthook, "__module__", None)).partition(".")[0]
    if sys.excepthook is not _hook and (style is not None or module in _REPLACED):
        style = style or (SHORT if _hook is None else _hook.style)
        sys.excepthook = _hook = _Hook(sys.excepthook)
    if _hook is not None:
        _hook.style = style or _hook.style
        _hook.is_printing = is_printing


def _in_short(error: BaseException, trace: TracebackType | None) -> str:
    """Return the frames of the user's code, also those that led to the error's cause, and the message."""
    places = _users_places(trace, None if error.__cause__ is None else error.__cause__.__traceback__)
    if len(places) > _MAX_FRAMES:
        del places[1 : 1 - _MAX_FRAMES]
    frames = "".join(traceback.StackSummary.extract(places).format()) + _worker_frames(error.__cause__)
    notes = getattr(error, "__notes__", [])
    message = "\n".join([f"{type(error).__module__}.{type(error).__qualname__}: {error}", *notes]).splitlines()
    free = _MAX_LINES - 1 - frames.count("\n")
    if len(message) > free:
        message[free - 2 : -1] = ["..."]
    return f"{HEADER}\n{frames}" + "\n  ".join(message)


def _worker_frames(cause: BaseException | None) -> str:
    """Return the frames of the user's code in a worker process, whose traceback is the text of a cause; at most two."""
    text = "" if cause is None or cause.__traceback__ is not None else str(cause)
    return "".join([each[0] for each in _FRAME.finditer(text) if not each[1].startswith(_PACKAGE)][:2])


def _is_of_another_rank(error: BaseException) -> bool:
    return isinstance(error, _OF_ANOTHER_RANK) and not is_on_all_ranks(error)


def _in_two_lines(error: CyxtrainError, trace: TracebackType | None) -> str:
    """Return the message, and where the user's code was."""
    message = "\n  ".join(f"{type(error).__module__}.{type(error).__qualname__}: {_message(error)}".splitlines())
    places = [f'File "{each.f_code.co_filename}", line {line}' for each, line in _users_places(trace)]
    return "\n  ".join([message, *places[-1:]])


def _message(error: CyxtrainError) -> str:
    """Return an error's message, without another rank's traceback."""
    if not _is_of_another_rank(error) or not isinstance(error, DistributedTrainingError) or not error.failures:
        return str(error)
    first = error.failures[0]
    cause = reason_of(Exception(f"{first.type}: {first.message}"))
    here = f"; this rank was in {error.during}" if error.during else ""
    return f"rank {first.rank} has failed: {cause} (its output has the traceback){here}"


def _users_places(*traces: TracebackType | None) -> list[tuple[FrameType, int]]:
    places = [place for each in traces for place in traceback.walk_tb(each)]
    return [place for place in places if _is_users(place[0])]


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith("<frozen ")
