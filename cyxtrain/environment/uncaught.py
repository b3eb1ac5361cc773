"""Print an error that ends the program: in short if it is the user's mistake, and once if all ranks raise it.

    Traceback (your code only; CYXTRAIN_TRACEBACK=full shows all of it):
      File "train.py", line 12, in <module>
        trainer.fit(X, y)
    cyxtrain.errors.ConfigError: the model cannot take X, tried on shape [64, 3]: RuntimeError: ...

An error that has its cause on another rank, which prints it, takes two lines: the message and your own line.

`sys.excepthook` is replaced when the first error of this package is created, not at import. The previous hook prints
all other errors. A hook of the program itself stays.
"""

from __future__ import annotations

import atexit
import contextlib
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

SHORT = "short"
"""Print a mistake with the frames of the user's code only."""
ONE_LINE = "one line"
"""Print every error of this package as one line: for the command line."""
FULL = "full"
"""Print all frames, as Python does."""
HEADER = "Traceback (your code only; CYXTRAIN_TRACEBACK=full shows all of it):"
"""The first line of a mistake that is printed in short."""
# Modules whose frames are left out, and those within Python (`python -m`).
_LIBRARIES = ("cyxtrain", "torch", "contextlib")
# Modules whose hooks are replaced: Ubuntu sets one in every process.
_REPLACED = ("sys", "torch", "apport_python_hook")
# Errors whose cause is not in this rank's program, unless all ranks raise them.
_OF_ANOTHER_RANK = (PeerLostError, PeerSilentError, RendezvousError, DistributedTrainingError)
_MAX_LINES = 15
_MAX_FRAMES = 4
_MAX_WORKER_FRAMES = 2
# A frame of a printed traceback, without the line of carets.
_FRAME = re.compile(r'^  File "(.+)", line \d+, in .+\n(?:    [^\n]*[\w"\'][^\n]*\n)?', re.MULTILINE)
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class _Hook:
    """A replacement of `sys.excepthook`; `previous` prints all other errors."""

    style = SHORT
    is_printing = True
    """Whether this rank prints what all ranks raise."""
    ends_by_ctrl_c = False

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.ends_by_ctrl_c = isinstance(error, KeyboardInterrupt)
        if self.style == FULL or process_env.wants_full_traceback() or not self._is_shortened(error):
            self._previous(kind, error, trace)
            return
        is_printed = self.is_printing or not is_on_all_ranks(error)
        if isinstance(error, CyxtrainError) and is_printed:  # Ctrl-C in a fit prints nothing
            print(self._text_of(error, trace), file=sys.stderr)

    def _is_shortened(self, error: BaseException) -> bool:
        if isinstance(error, ConfigError) or _is_of_another_rank(error):
            return True
        if not isinstance(error, (CyxtrainError, KeyboardInterrupt)):
            return False
        return self.style == ONE_LINE or is_on_all_ranks(error)

    def _text_of(self, error: CyxtrainError, trace: TracebackType | None) -> str:
        if self.style == ONE_LINE:
            return f"{type(error).__name__}: {_message(error)}"
        if _is_of_another_rank(error):
            return _in_two_lines(error, trace)
        return _in_short(error, trace)


_hook: _Hook | None = None


def install(style: str | None = None, *, is_printing: bool = True) -> None:
    """Replace `sys.excepthook`, unless that has happened already and PyTorch has not replaced it since.

    Without a `style` the previous one stays, at first `SHORT`, and a hook of the program itself is not replaced. This
    rank prints what all ranks raise only if it `is_printing`.
    """
    global _hook
    module = str(getattr(sys.excepthook, "__module__", None)).partition(".")[0]
    if sys.excepthook is not _hook and (style is not None or module in _REPLACED):
        # PyTorch wraps the hook whenever it makes the default group: the new one keeps the style.
        hook = _Hook(sys.excepthook)
        if _hook is not None:
            hook.style = _hook.style
        _hook = hook
        sys.excepthook = hook
    if _hook is None:
        return
    if style is not None:
        _hook.style = style
    _hook.is_printing = is_printing


@atexit.register
def _end_by_ctrl_c() -> None:
    """Let Python end by SIGINT after Ctrl-C, which is 130 to a shell.

    It forgets to where a function at exit executes a string, as PyTorch's does when it imports `tabulate`. Registered
    at import, so that it runs after functions that are registered later.
    """
    if _hook is not None and _hook.ends_by_ctrl_c:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # CPython's run_eval_code_obj notes it again


def _in_short(error: BaseException, trace: TracebackType | None) -> str:
    """Return the frames of the user's code, with those that led to the error's cause, and the message."""
    places = _users_places(trace)
    if error.__cause__ is not None:
        places += _users_places(error.__cause__.__traceback__)
    if len(places) > _MAX_FRAMES:
        del places[1 : 1 - _MAX_FRAMES]  # the outermost frame and the innermost ones stay
    frames = "".join(traceback.StackSummary.extract(places).format()) + _worker_frames(error.__cause__)
    notes = getattr(error, "__notes__", [])
    message = "\n".join([f"{_type_of(error)}: {error}", *notes]).splitlines()
    free = _MAX_LINES - 1 - frames.count("\n")
    if len(message) > free:
        message[free - 2 : -1] = ["..."]
    return f"{HEADER}\n{frames}" + "\n  ".join(message)


def _worker_frames(cause: BaseException | None) -> str:
    """Return frames of the user's code in a worker process, whose traceback is the message of a cause."""
    if cause is None or cause.__traceback__ is not None:
        return ""
    frames = [frame[0] for frame in _FRAME.finditer(str(cause)) if not frame[1].startswith(_PACKAGE)]
    return "".join(frames[:_MAX_WORKER_FRAMES])


def _type_of(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def _is_of_another_rank(error: BaseException) -> bool:
    return isinstance(error, _OF_ANOTHER_RANK) and not is_on_all_ranks(error)


def _in_two_lines(error: CyxtrainError, trace: TracebackType | None) -> str:
    lines = f"{_type_of(error)}: {_message(error)}".splitlines()
    places = [f'File "{frame.f_code.co_filename}", line {line}' for frame, line in _users_places(trace)]
    return "\n  ".join([*lines, *places[-1:]])


def _message(error: CyxtrainError) -> str:
    """Return an error's message, without another rank's traceback."""
    if not _is_of_another_rank(error) or not isinstance(error, DistributedTrainingError) or not error.failures:
        return str(error)
    first = error.failures[0]
    cause = reason_of(Exception(f"{first.type}: {first.message}"))
    message = f"rank {first.rank} has failed: {cause} (its output has the traceback)"
    if error.during:
        message += f"; this rank was in {error.during}"
    return message


def _users_places(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return (frame, line) of the user's code in a traceback, the outermost one first."""
    return [(frame, line) for frame, line in traceback.walk_tb(trace) if _is_users(frame)]


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith("<frozen ")
