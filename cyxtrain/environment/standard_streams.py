"""File descriptors 0, 1 and 2, which programs expect to be open, and through which this package prints.

Nothing that is printed is worth a training: output that cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any

from cyxtrain.errors import reason_of, warn

UNREAD_SECONDS = 5.0
"""How long output waits for a reader; after that it is left out until somebody reads again."""


def open_absent() -> None:
    """Open the null device as stdin, stdout or stderr if this process was started without it (`>&-`).

    Otherwise the next file or socket would get its descriptor, and everything that is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest number that is free: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            if getattr(sys, name) is None:
                mode = "r" if name == "stdin" else "w"
                stream = open(number, mode, errors="replace", closefd=False)  # noqa: SIM115
                setattr(sys, name, stream)


class _Output:
    """`sys.stdout` or `sys.stderr` for this package to write to: a failure is one warning, not an error.

    A letter that the stream lacks becomes "?". If its file descriptor cannot be written, the null device takes its
    place: the program's own `print` would fail as well.
    """

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number
        self._failed: Any = None

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)
        return getattr(stream, "rich_proxied_file", stream)  # rich's bar replaces the stream by one that writes to us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a string at once; warn the first time that a stream cannot take it."""
        stream = self._stream
        place = place_of(self._number)  # before the null device takes it
        problem = self._try_to_write(stream, text)
        if problem and stream is not self._failed:
            self._failed = stream
            warn(f"{self._name}{place} takes no output: {problem}. Training continues.")
        return len(text)

    def _try_to_write(self, stream: Any, text: str) -> str:
        """Write a string, and return why that was not possible; "" if it was."""
        seconds = UNREAD_SECONDS
        if stream is self._failed:  # it has been waited for once
            seconds = 0.0
        try:
            if _is_unread(stream, seconds):
                return "nobody reads it"
            _write(stream, text)
        except BlockingIOError:  # the program has made the stream non-blocking, and there was no room for all of it
            return "nobody reads it"
        except (OSError, ValueError) as error:  # ValueError: the program has closed it
            self._become_null(stream)
            return reason_of(error)
        return ""

    def flush(self) -> None:
        """Do nothing: every write is flushed."""

    def _become_null(self, stream: Any) -> None:
        with contextlib.suppress(OSError, ValueError):  # the program has closed it
            if stream.fileno() == self._number:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._number)
                os.close(null)
                stream.flush()  # otherwise Python fails again at exit


STDOUT = _Output("stdout", 1)
STDERR = _Output("stderr", 2)


def show(text: str, end: str = "\n") -> None:
    """Print on stdout: the only way in which a fit prints."""
    STDOUT.write(text + end)


def place_of(number: int) -> str:
    """Return where a file descriptor leads, such as " (/dev/pts/0)"; "": unknown."""
    with contextlib.suppress(OSError):  # not Linux
        return f" ({os.readlink(f'/proc/self/fd/{number}')})"
    return ""


def _write(stream: Any, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
    stream.flush()


def _is_unread(stream: Any, seconds: float) -> bool:
    """Return whether a pipe or terminal is full, and still is after so many seconds."""
    if sys.platform == "win32":
        return False
    try:
        poller = select.poll()
        poller.register(stream, select.POLLOUT)
    except (OSError, ValueError, TypeError):  # not a file
        return False
    return not poller.poll(1000 * seconds)
