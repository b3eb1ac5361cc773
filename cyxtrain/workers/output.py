"""Copy the output of many ranks to one terminal: whole lines, each with its rank, and the bar of rank 0 below them.

Of errors in stderr a user's mistake is shown once, and no traceback of Ctrl-C. Output that cannot be written is left
out, with one warning: no rank waits for a terminal, pipe or disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from cyxtrain import errors
from cyxtrain.environment.standard_streams import UNREAD_SECONDS, place_of
from cyxtrain.environment.uncaught import HEADER

LAST_SECONDS = 0.75
"""How long each stream waits for a reader once all ranks have ended."""
KEPT_LINES = 100
"""Lines at the end of a rank's stderr that are repeated after a failure."""
REFRESH_SECONDS = 10.0
"""Seconds between two states of a progress bar that are printed."""
_KEPT_BYTES = 8192  # of each kept line
_NAP_SECONDS = 0.01
_LINE_BYTES = 4 << 20  # longer lines are printed in pieces, so that memory stays bounded
_READ_BYTES = 1 << 16
_ERASE_LINE = b"\r\x1b[K"

TRACEBACK = b"Traceback (most recent call last):"
_SHORT = HEADER.encode()
_IN_ONE_LINE = (errors.ConfigError, errors.CheckpointError, errors.BackendUnavailableError, errors.NonFiniteError)
"""What the command line prints for a mistake."""
_RANKS = re.compile(rb"(?:\[rank\d+\]: )*")
"""What PyTorch puts before each line of a traceback, once for each group that a program has made."""
_MISTAKE = re.compile(
    rb"^%s(?:%s|(?:%s): )"
    % (_RANKS.pattern, re.escape(_SHORT), b"|".join(kind.__name__.encode() for kind in _IN_ONE_LINE)),
    re.MULTILINE,
)


class Stream(Protocol):
    """An unbuffered binary file."""

    def write(self, data: bytes, /) -> int | None:
        """Write some of the bytes and return how many; None if it would block."""


class Terminal:
    """Where the lines of all ranks go: one lock over both streams, because both may be the same screen."""

    def __init__(self, out: Stream, err: Stream, columns: Callable[[], int] = lambda: 0) -> None:
        self._out = out
        self._err = err
        self.columns = columns
        self._bar = b""
        self._lock = threading.RLock()
        self._refused_at: dict[Stream, float] = {}  # of streams that nobody reads
        self._warned: set[str] = set()
        self.patience_seconds = UNREAD_SECONDS
        """How long to wait for a reader before output is left out."""
        self.mistakes: dict[bytes, str] = {}
        """Mistakes that a rank has printed, with its label (see `ErrorFilter`)."""

    @classmethod
    def standard(cls) -> Terminal:
        """Return this process's stdout and stderr, unbuffered: a buffer would fail again at exit on a closed pipe."""
        return cls(_opened(1), _opened(2), _columns)

    def write_out(self, data: bytes) -> None:
        """Write to stdout."""
        self._write(self._out, data)

    def write_err(self, data: bytes) -> None:
        """Write to stderr."""
        self._write(self._err, data)

    def show_bar(self, bar: bytes) -> None:
        """Show a text below all lines, in place of the previous one; blank: none."""
        text = bar.decode(errors="replace").rstrip()[: self.columns()].encode()
        with self._lock:
            if self._bar:
                self._send(self._out, _ERASE_LINE)
            self._bar = text
            self._send(self._out, text)

    def append(self, path: Path, data: bytes) -> None:
        """Append to the log of a rank."""
        try:
            with open(path, "ab") as file:
                file.write(data)
        except OSError as error:
            self._warn(f"logs to {path.parent}", errors.reason_of(error))

    def _write(self, stream: Stream, data: bytes) -> None:
        with self._lock:
            if self._bar:
                self._send(self._out, _ERASE_LINE)
            self._send(stream, data)
            self._send(self._out, self._bar)

    def _send(self, stream: Stream, data: bytes) -> None:
        cause = ""
        try:
            while data and not cause:
                now = time.monotonic()
                written = stream.write(data)
                if written is not None:
                    data = data[written:]
                    self._refused_at.pop(stream, None)
                elif now - self._refused_at.setdefault(stream, now) >= self.patience_seconds:
                    cause = "nobody reads it"
                else:
                    time.sleep(_NAP_SECONDS)
        except OSError as error:
            cause = errors.reason_of(error)
        if cause and stream is self._out:
            self._warn(f"stdout{place_of(1)}", cause)

    def _warn(self, what: str, cause: str) -> None:
        with self._lock:
            if what not in self._warned:
                self._warned.add(what)
                self.write_err(f"cyxtrain launch: cannot write {what}: {cause}; the ranks continue\n".encode())


def _opened(number: int) -> Stream:
    """Return stdout or stderr; a pipe or terminal does not block, if the system opens it again."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: Windows has no such flags
        mode = os.fstat(number).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            return open(os.open(f"/proc/self/fd/{number}", flags), "wb", buffering=0, closefd=False)
    return open(number, "wb", buffering=0, closefd=False)


def _columns() -> int:
    """Return how long a line of the terminal on stdout may be without wrapping; 0: it is none that erases lines."""
    if sys.platform == "win32" or not os.isatty(1):
        return 0
    return (os.get_terminal_size(1).columns or 80) - 1


class LineAssembler:
    r"""Splits bytes into lines; reduces a progress bar, which rewrites its line after \r, to what stays visible.

    Of a finished line the last state counts; of an unfinished one, a state every `REFRESH_SECONDS`, or, if `keeps_bar`,
    `bar` instead of lines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, keeps_bar: bool = False) -> None:
        self._clock = clock
        self._keeps_bar = keeps_bar
        self.bar = b""
        self._rest = b""
        self._shown_at = clock()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without line ends."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [(_states(line) or [b""])[-1] for line in whole]
        states = _states(rest)
        complete = states if rest.endswith(b"\r") else states[:-1]
        if whole or complete:
            self.bar = complete[-1] if complete else b""
        if len(states) > 1:
            if not self._keeps_bar and self._clock() - self._shown_at >= REFRESH_SECONDS:
                lines.append(states[-2])
            rest = states[-1] + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > _LINE_BYTES:
            lines.append(rest)
            rest = b""
        if lines:
            self._shown_at = self._clock()
        self._rest = rest
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line, if it had no line end."""
        states, self._rest = _states(self._rest), b""
        return [state for state in states[-1:] if state.strip()]


def _states(line: bytes) -> list[bytes]:
    return [state for state in line.split(b"\r") if state]


def is_mistake(stderr: bytes | None) -> bool:
    """Return whether the last error of a rank is a user's mistake, printed in short."""
    return _MISTAKE.search((stderr or b"").rpartition(TRACEBACK)[2]) is not None


class ErrorFilter:
    """Leaves out of a rank's stderr a mistake that another rank has printed, and tracebacks of Ctrl-C."""

    def __init__(self, label: str, mistakes: dict[bytes, str]) -> None:
        self._label = label
        self._mistakes = mistakes
        self._held: list[bytes] = []  # the beginning of an error
        self._is_dropping = False
        self.hides_interrupts = False
        """Set when the launcher has sent SIGINT."""

    def feed(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines to print, with those that were held back."""
        printed: list[bytes] = []
        for line in lines:
            text = _RANKS.sub(b"", line, count=1)
            begins = text.startswith(_SHORT) or (self.hides_interrupts and text.startswith(TRACEBACK))
            in_one_line = not begins and _MISTAKE.match(text) is not None
            if begins or in_one_line:
                printed += self.finish()
            if begins or in_one_line or self._held:
                self._held.append(line)
                if in_one_line or not (begins or text.startswith(b" ")):  # the message follows the frames
                    self._is_dropping = self._is_left_out(text)
                    printed += [] if self._is_dropping else self._held
                    self._held = []
            elif not (self._is_dropping and text.startswith(b" ")):  # the message continues
                self._is_dropping = False
                printed.append(line)
        return printed

    def finish(self) -> list[bytes]:
        """Return the lines that are held back, and forget them."""
        held, self._held = self._held, []
        return held

    def _is_left_out(self, message: bytes) -> bool:
        texts = [_RANKS.sub(b"", line, count=1) for line in self._held]
        if texts[0].startswith(TRACEBACK):
            return message.startswith(b"KeyboardInterrupt")
        return self._mistakes.setdefault(b"\n".join(texts), self._label) != self._label


class OutputReader:
    """A daemon thread that copies one stream of one process; another process may keep the pipe open for ever.

    Without a label it copies what it reads as it is, until lines are to be left out.
    """

    def __init__(
        self,
        source: IO[bytes],
        label: str,
        write: Callable[[bytes], None],
        log: Callable[[bytes], None] | None,
        show_bar: Callable[[bytes], None] | None = None,
        errors: ErrorFilter | None = None,
    ) -> None:
        self._source = source
        self._errors = errors
        self._log = log
        self._prefix = f"[{label}] ".encode() if label else b""
        self._write = write
        self._show_bar = show_bar
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._is_writing = False
        self._thread = threading.Thread(target=self._read, name=f"output of {label}", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait so long for more output, and longer for a slow terminal."""
        self._thread.join(seconds)
        if self._is_writing:
            self._thread.join(UNREAD_SECONDS)

    def last_lines(self) -> bytes:
        """Return the last `KEPT_LINES` lines, without the label."""
        return b"".join(line + b"\n" for line in list(self._kept))

    def _read(self) -> None:
        with self._source:
            assembler = LineAssembler(keeps_bar=self._show_bar is not None)
            show_bar = self._show_bar or (lambda bar: None)
            while data := self._data():
                if not self._prefix and self._errors is not None and not self._errors.hides_interrupts:
                    self._write(data)
                    continue
                lines = assembler.feed(data)
                show_bar(assembler.bar)
                self._show(lines)
            show_bar(b"")
            self._show(assembler.finish())
            self._print([] if self._errors is None else self._errors.finish())

    def _data(self) -> bytes:
        try:
            return self._source.read(_READ_BYTES)
        except OSError:  # the end of a terminal
            return b""

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._kept.extend(line[:_KEPT_BYTES] for line in lines)
        if self._log is not None:
            self._log(b"".join(line + b"\n" for line in lines))
        self._print(lines if self._errors is None else self._errors.feed(lines))

    def _print(self, lines: list[bytes]) -> None:
        self._is_writing = True
        self._write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._is_writing = False
