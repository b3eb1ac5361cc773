"""Copy the output of many ranks to one terminal: whole lines with their rank, and rank 0's bar below.

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
# Mistakes that the command line prints as one line.
_IN_ONE_LINE = (errors.ConfigError, errors.CheckpointError, errors.BackendUnavailableError, errors.NonFiniteError)
# PyTorch's prefix of each line of a traceback, once for each group that a program has made.
_RANKS = re.compile(rb"(?:\[rank\d+\]: )*")
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
        self._lock = threading.RLock()  # reentrant: a write that fails warns, which writes
        self._refused_at: dict[Stream, float] = {}  # since when nobody reads a stream
        self._warned: set[str] = set()
        self.patience_seconds = UNREAD_SECONDS
        """How long to wait for a reader before output is left out."""
        self.mistakes: dict[bytes, str] = {}
        """Mistakes that a rank has printed, with its label (see `ErrorFilter`)."""

    @classmethod
    def standard(cls) -> Terminal:
        """Return this process's stdout and stderr, unbuffered."""
        # A buffer would fail again at exit on a closed pipe.
        return cls(_opened(1), _opened(2), _columns)

    def write_out(self, data: bytes) -> None:
        """Write to stdout."""
        self._write(self._out, data)

    def write_err(self, data: bytes) -> None:
        """Write to stderr."""
        self._write(self._err, data)

    def show_bar(self, bar: bytes) -> None:
        """Show a progress bar below all lines, in place of the previous one; a blank one removes it."""
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
        try:
            cause = self._write_all(stream, data)
        except OSError as error:
            cause = errors.reason_of(error)
        if cause and stream is self._out:
            self._warn(f"stdout{place_of(1)}", cause)

    def _write_all(self, stream: Stream, data: bytes) -> str:
        """Write data, with patience; return why the rest of it was left out, or an empty string."""
        while data:
            now = time.monotonic()
            written = stream.write(data)
            if written is not None:
                data = data[written:]
                self._refused_at.pop(stream, None)
                continue
            refused_at = self._refused_at.setdefault(stream, now)
            if now - refused_at >= self.patience_seconds:
                return "nobody reads it"
            time.sleep(_NAP_SECONDS)
        return ""

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
            # Opened anew: O_NONBLOCK on the inherited one would also apply to the processes that share it.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            return open(os.open(f"/proc/self/fd/{number}", flags), "wb", buffering=0, closefd=False)
    return open(number, "wb", buffering=0, closefd=False)


def _columns() -> int:
    """Return how long a line on stdout may be without wrapping; 0 if stdout cannot erase lines."""
    if sys.platform == "win32" or not os.isatty(1):
        return 0
    columns = os.get_terminal_size(1).columns or 80
    return columns - 1


class LineAssembler:
    r"""Splits bytes into lines; of a progress bar, which rewrites its line after \r, the end stays.

    A finished line is reduced to its last state. An unfinished one gives a state every `REFRESH_SECONDS`; with
    `keeps_bar` it gives none, and its newest complete state is in `bar`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, keeps_bar: bool = False) -> None:
        self._clock = clock
        self._keeps_bar = keeps_bar
        self.bar = b""
        self._unfinished = b""
        self._shown_at = clock()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without line ends."""
        *finished, self._unfinished = (self._unfinished + data).split(b"\n")
        lines = [_last_state(line) for line in finished]
        if finished:
            self.bar = b""
        lines += self._reduce_unfinished()
        if len(self._unfinished) > _LINE_BYTES:
            lines.append(self._unfinished)
            self._unfinished = b""
        if lines:
            self._shown_at = self._clock()
        return lines

    def _reduce_unfinished(self) -> list[bytes]:
        """Keep only the last state of the unfinished line; return the earlier state that is due to be printed."""
        states = _states(self._unfinished)
        is_complete = self._unfinished.endswith(b"\r")  # otherwise more of the last state may follow
        complete = states if is_complete else states[:-1]
        if complete:
            self.bar = complete[-1]
        if len(states) < 2:
            return []
        self._unfinished = states[-1]
        if is_complete:
            self._unfinished += b"\r"
        if self._keeps_bar or self._clock() - self._shown_at < REFRESH_SECONDS:
            return []
        return [states[-2]]

    def finish(self) -> list[bytes]:
        """Return the last line, if it had no line end."""
        last = _last_state(self._unfinished)
        self._unfinished = b""
        return [last] if last.strip() else []


def _states(line: bytes) -> list[bytes]:
    return [state for state in line.split(b"\r") if state]


def _last_state(line: bytes) -> bytes:
    """Return what stays visible of a line."""
    states = _states(line)
    return states[-1] if states else b""


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
            printed += self._feed_line(line)
        return printed

    def _feed_line(self, line: bytes) -> list[bytes]:
        """Hold a line back if it belongs to an error; return what is to be printed now."""
        text = _without_ranks(line)
        begins = text.startswith(_SHORT) or (self.hides_interrupts and text.startswith(TRACEBACK))
        if begins or _MISTAKE.match(text) is not None:
            printed = self.finish()
            self._held.append(line)
            if not begins:  # the mistake is this one line
                printed += self._end_error(text)
            return printed
        is_indented = text.startswith(b" ")
        if self._held:
            self._held.append(line)
            # The message follows the frames.
            return [] if is_indented else self._end_error(text)
        if self._is_dropping and is_indented:
            return []  # the message continues
        self._is_dropping = False
        return [line]

    def _end_error(self, message: bytes) -> list[bytes]:
        """Return the held lines of an error that ends with this message; none if it is left out."""
        self._is_dropping = self._is_left_out(message)
        held = self.finish()
        return [] if self._is_dropping else held

    def finish(self) -> list[bytes]:
        """Return the lines that are held back, and forget them."""
        held = self._held
        self._held = []
        return held

    def _is_left_out(self, message: bytes) -> bool:
        texts = [_without_ranks(line) for line in self._held]
        if texts[0].startswith(TRACEBACK):
            return message.startswith(b"KeyboardInterrupt")
        printed_by = self._mistakes.setdefault(b"\n".join(texts), self._label)
        return printed_by != self._label


def _without_ranks(line: bytes) -> bytes:
    return _RANKS.sub(b"", line, count=1)


class OutputReader:
    """A daemon thread that copies one stream of a process; another process may hold its pipe for ever.

    Without a label it copies bytes unchanged until lines are to be left out.
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
        """Wait for more output, and longer for a slow terminal."""
        self._thread.join(seconds)
        if self._is_writing:
            self._thread.join(UNREAD_SECONDS)

    def last_lines(self) -> bytes:
        """Return the last `KEPT_LINES` lines, without the label."""
        kept = list(self._kept)  # a copy: the thread may still append
        return b"".join(line + b"\n" for line in kept)

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
            if self._errors is not None:
                self._print(self._errors.finish())

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
        if self._errors is not None:
            lines = self._errors.feed(lines)
        self._print(lines)

    def _print(self, lines: list[bytes]) -> None:
        data = b"".join(self._prefix + line + b"\n" for line in lines)
        self._is_writing = True  # `join` then waits for the terminal
        self._write(data)
        self._is_writing = False
